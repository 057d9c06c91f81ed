"""Reports divergences, once the details of their programs have arrived, to people and to the ranks that wait.

Before a report, one rank of each group is asked for the details of its program, which its agent knows even if the rank
is stuck. Only the first divergence in each group of ranks is reported: most later ones are consequences.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from jaxrun.analysis.lockstep import divergence_text
from jaxrun.analysis.lockstep.divergence import Divergence
from jaxrun.controller.head.call_matcher import CallMatcher, CallSlot
from jaxrun.controller.head.timers import Timer, Timers
from jaxrun.protocol.flight import ProgramDetails
from jaxrun.protocol.snapshot_messages import ProgramDetailsReply, ProgramDetailsRequest
from jaxrun.records.event_log.actions import Action, PrintLine, RecordDivergence, Send

_DETAILS_TIMEOUT_S = 0.3  # for the details of the programs that a report names
_MAX_REPORTS = 4


@dataclass(slots=True)
class _PendingReport:
    """A divergence whose program details are awaited, and the call in which ranks wait for them."""

    divergence: Divergence
    slot: CallSlot | None
    awaited: set[tuple[int, int]]  # rank, program
    details: dict[int, ProgramDetails] = field(default_factory=dict)


class DivergenceReports:
    """The reported divergences. Times are seconds since the epoch.

    divergences:    those that were reported
    shown:          those that were printed when they were found
    raised:         those that ranks were told about, and raise as an exception
    is_concluding:  divergences are no longer printed, because the verdict will contain them
    """

    def __init__(self, matcher: CallMatcher, hosts: Mapping[int, str], timers: Timers) -> None:
        """`hosts` may be filled in later."""
        self.divergences: list[Divergence] = []
        self.shown: list[Divergence] = []
        self.raised: list[Divergence] = []
        self.is_concluding = False
        self._matcher = matcher
        self._hosts = hosts
        self._timers = timers
        self._numbers = itertools.count(1)
        self._pending: dict[int, _PendingReport] = {}
        self._told: set[int] = set()

    @property
    def are_enough(self) -> bool:
        return len(self.divergences) >= _MAX_REPORTS

    @property
    def are_pending(self) -> bool:
        return bool(self._pending)

    def was_told(self, rank: int) -> bool:
        """Whether this rank was sent a mismatch, which it raises as an exception."""
        return rank in self._told

    def has(self, group: str) -> bool:
        """Whether a divergence among the cross-process calls of these ranks has been reported."""
        return any(known.number and known.group == group for known in self.divergences)

    def add(self, divergence: Divergence, slot: CallSlot | None, now: float) -> list[Action]:
        """Ask for the details of the programs that differ; ranks may wait in the call of this `slot`."""
        awaited = {(group.recorded_by, group.program) for group in divergence.call_groups if group.name}
        number = next(self._numbers)
        self._pending[number] = _PendingReport(divergence, slot, awaited)
        if not awaited:
            return self._report(number, now)
        self._timers.set(Timer.DETAILS, now + _DETAILS_TIMEOUT_S, partial(self._report, number), of=number)
        return [Send((rank,), ProgramDetailsRequest(program)) for rank, program in sorted(awaited)]

    def handle_details(self, reply: ProgramDetailsReply, now: float) -> list[Action]:
        key = (reply.rank, reply.program)
        for pending in self._pending.values():
            if key in pending.awaited:
                pending.awaited.discard(key)
                pending.details[reply.rank] = reply.details
        complete = [number for number, pending in self._pending.items() if not pending.awaited]
        return [action for number in complete for action in self._report(number, now)]

    def report_all(self, now: float) -> list[Action]:
        """Report without the details that have not arrived yet."""
        return [action for number in tuple(self._pending) for action in self._report(number, now)]

    def _report(self, number: int, now: float) -> list[Action]:
        self._timers.cancel_one(Timer.DETAILS, number)
        pending = self._pending.pop(number)
        divergence = pending.divergence.with_program_details(pending.details)
        text = divergence_text.format_divergence(divergence, self._hosts)
        waiting = pending.slot.waiting if pending.slot is not None else ()
        self._told |= set(waiting)
        actions = self._matcher.resolve(pending.slot, text) if pending.slot is not None else []
        if self.are_enough or self.has(divergence.group):
            return actions
        self.divergences.append(divergence)
        if waiting:
            self.raised.append(divergence)
        if waiting or self.is_concluding:
            return actions
        self.shown.append(divergence)
        return [*actions, RecordDivergence(text), PrintLine(text)]
