"""Makes all ranks stop at the same poll: the first one that no rank has made when the stop is requested.

A rank that has reported its number of polls waits in the next one. The reporting thread is not the program's, so a
rank may meanwhile be in a call for which others wait. See protocol/stop_messages.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxrun.controller.head.worker_table import WorkerTable
from jaxrun.job_events.actions import Action, PrintLine, Send
from jaxrun.protocol.stop_messages import NO_STEP, PollCount, StopAt, StopEvent, StopPolled, StopReached, StopRequested
from jaxrun.text import format_ranks


class StopAgreement:
    """`reason` is why the job should stop; empty if it should not. `grows`: only to be started on more hosts."""

    def __init__(self, workers: WorkerTable) -> None:
        self.reason = ""
        self.grows = False
        self._workers = workers
        self._polling: set[int] = set()
        self._polls: dict[int, int] = {}
        self._is_agreed = self._is_told = False
        self._steps: dict[int, int] = {}  # the steps at which ranks were told to stop

    @property
    def polling(self) -> tuple[int, ...]:
        return tuple(rank for rank in self._workers.working if rank in self._polling)

    @property
    def all_poll(self) -> bool:
        return self._workers.working_count > 0 and set(self._workers.working) <= self._polling

    @property
    def is_asked(self) -> bool:
        """Whether ranks that poll have been asked to stop."""
        return bool(self.reason and self.polling)

    @property
    def was_reached(self) -> bool:
        return bool(self._steps)

    def request(self, reason: str, *, grows: bool = False) -> list[Action]:
        """Ask the ranks to stop; ranks that do not poll yet are asked once they do."""
        is_first = not self.reason
        if is_first or self.grows:  # ending the job takes precedence
            self.reason, self.grows = reason, grows
        return [Send(self.polling, StopRequested(reason))] if is_first and self.polling else []

    def handle(self, event: StopEvent, now: float) -> list[Action]:
        match event:
            case StopPolled():
                self._polling.add(event.rank)
                return [Send((event.rank,), StopRequested(self.reason))] if self.reason else []
            case PollCount():
                self._polls[event.rank] = event.polls
            case StopReached():
                self._steps[event.rank] = event.step
        return self.advance()

    def advance(self) -> list[Action]:
        """Do what is next once the last rank for which the others wait has answered, or does not work any more."""
        return [*self._agree(), *self._tell()]

    def _agree(self) -> list[Action]:
        """Once all working ranks have reported, decide at which poll they stop."""
        if not self.reason or self._is_agreed or len(self._polls) < self._workers.working_count:
            return []
        working = self._workers.working
        if not working or not self._polls.keys() >= set(working):
            return []
        self._is_agreed = True
        return [Send(working, StopAt(max(self._polls.values()) + 1))]

    def _tell(self) -> list[Action]:
        """Once all that still work were told to stop, print at which step."""
        if self._is_told or not self._steps or self._workers.working_of(self._polls) - self._steps.keys():
            return []
        self._is_told = True
        by_step: dict[int, list[int]] = {}
        for rank, step in sorted(self._steps.items()):
            by_step.setdefault(step, []).append(rank)
        texts = [f"{format_ranks(ranks)} {_verb(ranks, step)}" for step, ranks in by_step.items()]
        hint = "; but all ranks should call should_stop equally often" if len(texts) > 1 else ""
        return [PrintLine(f"{', '.join(texts)}{hint}")]


def _verb(ranks: Sequence[int], step: int) -> str:
    at = f" at step {step}" if step != NO_STEP else ""
    return f"{'stops' if len(ranks) == 1 else 'stop'}{at}"
