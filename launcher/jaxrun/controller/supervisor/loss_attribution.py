"""Decides why agents end: whether a host, an agent, or the launch command (mpirun, srun) went first.

mpirun and srun end a whole job when they lose one host or process, and then every agent is signalled or lost at once.
So these events are held for a moment, or, once all hosts were probed, for the time in which a live host answers;
then the cause is passed on first. No I/O: the server passes in what it knows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from jaxrun.protocol.agent_messages import AgentSignalled, StartFailed
from jaxrun.records.event_log.events import AgentLost, Event

EXIT_GRACE_S = 0.05  # wait for the launch command's exit status before the agent that vanished is blamed
STARTUP_EXIT_GRACE_S = 0.5  # the same during start-up: it may have failed, and first end those it started


@dataclass(frozen=True, slots=True)
class Evidence:
    """What the server knows when the time is up.

    unanswered:        the ranks whose hosts have not answered the probe; empty where none was sent
    failure_reported:  the ranks whose worker has reported its failure
    launch_end:        how the launch command ended, if it has
    launch_failed:     it ended of its own accord, with an error
    all_reported:      every agent has reported
    """

    unanswered: Sequence[int]
    failure_reported: frozenset[int]
    launch_end: StartFailed | None
    launch_failed: bool
    all_reported: bool


class LossAttribution:
    """Events that are held until their cause is known. Times are seconds since the epoch."""

    def __init__(self, probe_timeout_s: float) -> None:
        """`probe_timeout_s`: seconds in which a live host answers a probe."""
        self.deadline: float | None = None
        self.probed = False
        self._probe_timeout_s = probe_timeout_s
        self._held: list[Event] = []

    def hold(
        self, events: Sequence[Event], now: float, *, all_reported: bool, probe: Callable[[], None] | None
    ) -> None:
        """Hold these events; `probe`, if given, sends something to every host, once until they are explained."""
        self._held += events
        wait = EXIT_GRACE_S if all_reported else STARTUP_EXIT_GRACE_S
        if probe is not None and not self.probed:
            probe()
            self.probed, wait = True, self._probe_timeout_s
        self.deadline = max(self.deadline or 0.0, now + wait)

    def explain(self, evidence: Evidence) -> list[Event]:
        """Return all that was held, after its likeliest cause; nothing is held then."""
        held, self._held = self._held, []
        self.deadline, self.probed = None, False
        signalled = {event.rank for event in held if isinstance(event, AgentSignalled)}
        launch_end: list[Event] = [evidence.launch_end] if evidence.launch_end else []
        if evidence.unanswered:
            reason = f"its host has not answered for {self._probe_timeout_s:g} s"
            return [*(AgentLost(rank, reason) for rank in evidence.unanswered), *held]
        if evidence.launch_failed and not evidence.all_reported and launch_end:
            return [*launch_end, *held]  # it could not start all agents, and ended those that it had started
        if evidence.launch_failed and any(isinstance(event, AgentLost) for event in held):
            # It ended the job because an agent had vanished, the first of those lost; the others went with it.
            not_first = evidence.failure_reported | signalled
            lost = (event for event in held if isinstance(event, AgentLost) and event.rank not in not_first)
            first = next(lost, None)
            others: list[Event] = [
                replace(event, ended_by_launch_command=True) if isinstance(event, AgentLost) else event
                for event in held
                if event is not first
            ]
            if first is not None:
                return [first, *others]
            held = others
        return [*([] if signalled else launch_end), *held]
