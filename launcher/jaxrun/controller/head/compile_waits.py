"""Names ranks that do not come to a call whose program the other ranks compile, or wait to compile.

Compilers may wait for each other, as those do that tune kernels on several GPUs together, and say nothing. So after a
while the ranks that have not come are asked where they are, together with one that compiles.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jaxrun.analysis.diagnosis.rank_state import find_rank_states
from jaxrun.analysis.lockstep import report
from jaxrun.analysis.lockstep.compare import Lag
from jaxrun.controller.head.call_matcher import CallMatcher, CallSlot, SlotKey
from jaxrun.protocol.snapshot_messages import SnapshotPurpose, SnapshotReply
from jaxrun.records.event_log.actions import Action, PrintLine, TakeSnapshot

COMPILE_WAIT_S = 10.0  # after the first rank has lowered the program
_MAX_NOTICES = 4


@dataclass(frozen=True, slots=True)
class _Question:
    """The call of `slot`; the ranks that have not come to it, and one that compiles, are asked where they are."""

    slot: CallSlot
    missing: tuple[int, ...]
    compiling: int


class CompileWaits:
    """The calls whose programs some ranks compile. Times are seconds since the epoch."""

    def __init__(self, matcher: CallMatcher, hosts: Mapping[int, str]) -> None:
        self._matcher = matcher
        self._hosts = hosts
        self._since: dict[SlotKey, float] = {}  # the oldest first
        self._question: _Question | None = None
        self._notices = 0

    def add(self, key: SlotKey, now: float) -> None:
        """A rank is about to compile the program of this call."""
        if self._notices < _MAX_NOTICES:
            self._since.setdefault(key, now)

    def deadline(self) -> float | None:
        return next((since + COMPILE_WAIT_S for since in self._since.values()), None)

    def ask_due(self, now: float) -> list[Action]:
        """Ask where the ranks are that others have waited for long enough."""
        actions: list[Action] = []
        while (deadline := self.deadline()) is not None and deadline <= now:
            key = next(iter(self._since))
            del self._since[key]
            slot = self._matcher.find(key)
            if slot is None or slot.mismatch or not slot.lowered:
                continue
            missing = sorted(rank for rank in slot.members - slot.calls.keys() if not self._matcher.has_ended(rank))
            if missing:
                self._question = _Question(slot, tuple(missing), min(slot.lowered))
                actions = [TakeSnapshot((*missing, min(slot.lowered)), SnapshotPurpose.COMPILE_WAIT)]
        return actions

    def handle(self, reply: SnapshotReply) -> list[Action]:
        """Name those that have not come: neither have they made the call, as one of a program that they know."""
        question, self._question = self._question, None
        if question is None or question.compiling not in reply.flights:
            return []
        slot, (group, number) = question.slot, question.slot.key
        is_waiting = question.compiling in self._matcher.waiting
        if question.compiling not in slot.lowered or not (is_waiting or reply.flights[question.compiling].compiling):
            return []
        reached = {rank: reply.flights[rank].last_number(group) for rank in question.missing if rank in reply.flights}
        behind = tuple(rank for rank, last in reached.items() if last < number and rank not in slot.calls)
        if not behind:
            return []
        self._notices += 1
        call = slot.calls[question.compiling]
        lag = Lag(group, number, tuple(sorted(slot.calls)), behind, call.name, call.source_line, reached, frozenset())
        states = find_rank_states(reply.stacks, reply.kernel_waits, reply.flights)
        places = {rank: state.place for rank, state in states.items()}
        return [PrintLine(report.format_compile_wait(lag, places, self._hosts, COMPILE_WAIT_S))]
