"""Why do agents end? The engine that started them may be ending the job, because of a host that does not answer.

What agents and signals say is held until that is known: for a moment, or, once every host was asked, until all that are
there have answered. Pure: the station passes what it knows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from jaxrun.head.events import AgentLost, Event
from jaxrun.protocol.agent_messages import AgentSignalled, StartFailed

EXIT_GRACE_S = 0.05  # seconds in which the end of what has started an agent is heard of, if the agent ended with it
STARTUP_EXIT_GRACE_S = (
    0.5  # the same while it still starts others: it may have failed at that, and end those first that had come
)


@dataclass(frozen=True, slots=True)
class Evidence:
    """What the station knows when the time has come.

    silent:    the ranks whose hosts have not answered; empty where nobody asked
    spoke:     the ranks that have said last words
    ended:     how the starter ended, if it has
    by_itself: it was not killed, and says that something went wrong
    all_came:  every agent had reported
    """

    unanswered: Sequence[int]
    failure_reported: frozenset[int]
    launch_end: StartFailed | None
    launch_failed: bool
    all_reported: bool


class LossAttribution:
    """Events that are held. Times are seconds since the epoch."""

    def __init__(self, answer: float) -> None:
        """`answer`: seconds in which a host that is there has answered."""
        self.deadline: float | None = None
        self.probed = False
        self._answer = answer
        self._held: list[Event] = []

    def hold(self, events: Sequence[Event], now: float, *, all_came: bool, ask: Callable[[], None] | None) -> None:
        """Hold these events; `ask` sends something to every host, where they are to be asked and were not yet."""
        self._held += events
        wait = EXIT_GRACE_S if all_came else STARTUP_EXIT_GRACE_S
        if ask is not None and not self.probed:
            ask()
            self.probed, wait = True, self._answer
        self.deadline = max(self.deadline or 0.0, now + wait)

    def explain(self, known: Evidence) -> list[Event]:
        """All that was held, after what seems to be its cause; nothing is held then."""
        held, self._held = self._held, []
        self.deadline, self.probed = None, False
        causes: list[Event] = [
            AgentLost(rank, f"its host has not answered for {self._answer:g} s") for rank in known.unanswered
        ]
        ended: list[Event] = [known.launch_end] if known.launch_end else []
        if not causes and not known.all_reported and known.launch_failed:
            causes = ended  # it could not start the others, and so ended those that had come
        lost = [event for event in held if isinstance(event, AgentLost)]
        signalled = {event.rank for event in held if isinstance(event, AgentSignalled)}
        if not causes and lost and known.launch_failed:
            # It ended the job because an agent had gone, the first of them; the others went with it.
            first = next((event for event in lost if event.rank not in known.failure_reported | signalled), None)
            causes = [first] if first else []
            rest = [event for event in held if event is not first]
            held = [
                replace(event, ended_by_launch_command=True) if isinstance(event, AgentLost) else event
                for event in rest
            ]
        return [*(causes or ([] if signalled else ended)), *held]
