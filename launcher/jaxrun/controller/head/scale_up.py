"""Makes a job on fewer hosts than possible stop at a common step when lost hosts are back.

the attempt has run for --grow ──▶ LookForHosts ──▶ HostsFound ──▶ StopRequested to all ranks (stop_agreement.py)
                                       └──────── none: later ─────────┘
"""

from __future__ import annotations

from jaxrun.controller.head.head_state import HeadState, JobPhase
from jaxrun.controller.head.timers import Timer
from jaxrun.job_events.actions import Action, LookForHosts, PrintLine
from jaxrun.job_events.events import HostsFound
from jaxrun.text import format_ranks

LOOK_INTERVAL_S = 10.0  # an mpirun that finds no host takes some tenths of a second of one core


class ScaleUp:
    def __init__(self, state: HeadState) -> None:
        self._state = state
        self._looks = False
        self._is_said = False  # whether we have printed that the program does not poll

    def start(self, now: float) -> None:
        """Schedule the first check for hosts, because the program has started."""
        if self._state.limits.grow is not None:
            self._state.timers.set(Timer.GROW, now + self._state.limits.grow, self._look_for_hosts)

    def _look_for_hosts(self, now: float) -> list[Action]:
        if self._is_ending:
            return []
        if self._is_said and not self._state.stop.all_poll:
            return self._wait(now)
        self._looks = True
        return [LookForHosts()]

    def handle_found(self, event: HostsFound, now: float) -> list[Action]:
        if not self._looks:  # a look of the start-up has ended only now, for a host that is in use again
            return []
        self._looks, stop = False, self._state.stop
        if self._is_ending or not event.hosts:
            return self._wait(now)
        reason = f"{', '.join(event.hosts)} {'is' if len(event.hosts) == 1 else 'are'} back"
        if stop.all_poll:
            asked = PrintLine(
                f"{reason}: asked {format_ranks(stop.polling)} to stop (should_stop), to start on more hosts"
            )
            return [asked, *stop.request(reason, grows=True)]
        said = PrintLine(f"{reason}; the job stays smaller, unless its program asks should_stop")
        is_first, self._is_said = not self._is_said, True
        return [*([said] if is_first else []), *self._wait(now)]

    @property
    def _is_ending(self) -> bool:
        return self._state.phase is not JobPhase.RUNNING or bool(self._state.stop.reason)

    def _wait(self, now: float) -> list[Action]:
        if not self._is_ending:
            self._state.timers.set(Timer.GROW, now + LOOK_INTERVAL_S, self._look_for_hosts)
        return []
