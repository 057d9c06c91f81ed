"""Reports divergences, once the details of their programs have arrived, to people and to the ranks that wait.

Before a report, one rank of each group is asked for the details of its program, and for its last calls, which show how
the ranks came to differ; its agent knows them even if the rank is stuck. A busy rank may make its next calls later:
they are read again and again, and if they lead to another advice, that follows. Only the first divergence in each group
of ranks is reported: most later ones are consequences.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from functools import partial

from msgspec import Struct, field
from msgspec.structs import replace

from jaxrun.analysis.lockstep import divergence_text
from jaxrun.analysis.lockstep.call_order import find_call_order
from jaxrun.analysis.lockstep.divergence import CallOrder, Divergence
from jaxrun.controller.head.call_matcher import CallMatcher, CallSlot
from jaxrun.controller.head.round import Round
from jaxrun.controller.head.timers import Timer, Timers
from jaxrun.controller.head.worker_table import WorkerTable
from jaxrun.job_events.actions import Action, PrintLine, RecordDivergence, Send
from jaxrun.protocol.flight import Flight, ProgramDetails, parse_group
from jaxrun.protocol.query_messages import ProgramDetailsReply, ProgramDetailsRequest

_DETAILS_TIMEOUT_S = 0.3  # for the details of the programs that a report names
_NEXT_CALLS_S = 0.5  # for further calls, if the calls so far do not show how the ranks came to differ
_MAX_NEXT_CALLS_S = 30.0  # between two readings of them, after the report
_ENOUGH_CALLS = 64  # that each rank has made after the one in which they differ
_NAN_SEARCH_PATIENCE_S = 2.0  # for the FloatingPointError that ends a search for a NaN, and the job
_MAX_REPORTS = 4


class _PendingReport(Struct):
    """A divergence whose program details are awaited, and the call in which ranks wait for them.

    round:  the details of programs, by rank and program
    """

    divergence: Divergence
    slot: CallSlot | None
    round: Round[tuple[int, int], ProgramDetailsReply] = field(default_factory=lambda: Round(()))
    reported: Divergence | None = None  # as it was reported, if further calls may lead to another advice
    pause_s: float = _NEXT_CALLS_S  # until the ranks are asked again, as they may have made further calls
    details: dict[int, ProgramDetails] = field(default_factory=dict)
    flights: dict[int, Flight] = field(default_factory=dict)


class DivergenceReports:
    """The reported divergences. Times are seconds since the epoch.

    divergences:    those that were reported
    shown:          those that were printed when they were found
    raised:         those that ranks were told about, and raise as an exception
    is_concluding:  divergences are no longer printed, because the verdict will contain them
    """

    def __init__(self, matcher: CallMatcher, workers: WorkerTable, timers: Timers) -> None:
        self.divergences: list[Divergence] = []
        self.shown: list[Divergence] = []
        self.raised: list[Divergence] = []
        self.is_concluding = False
        self._matcher = matcher
        self._workers = workers
        self._hosts: Mapping[int, str] = workers.hosts  # filled in later
        self._timers = timers
        self._numbers = itertools.count(1)
        self._pending: dict[int, _PendingReport] = {}
        self._told: set[int] = set()

    @property
    def are_enough(self) -> bool:
        return len(self.divergences) >= _MAX_REPORTS

    @property
    def are_pending(self) -> bool:
        return any(pending.reported is None for pending in self._pending.values())

    @property
    def are_asking(self) -> bool:
        """Whether the job's last answers are awaited, about divergences that were reported or will be."""
        return self.are_pending or (self.is_concluding and bool(self._pending))

    def was_told(self, rank: int) -> bool:
        """Whether this rank was sent a mismatch, which it raises as an exception."""
        return rank in self._told

    def has(self, group: str) -> bool:
        """Whether a divergence among the cross-process calls of these ranks has been reported."""
        return any(known.number and known.group == group for known in self.divergences)

    def is_broken(self, group: str) -> bool:
        """Whether a rank of the group is lost, while the others go on: they may have made calls that it has not."""
        lost = self._workers.lost
        return bool(lost) and not parse_group(group, len(self._hosts)).isdisjoint(lost)

    def add(self, divergence: Divergence, slot: CallSlot | None, now: float) -> list[Action]:
        """Ask for the details of the programs that differ; ranks may wait in the call of this `slot`."""
        if self.is_broken(divergence.group):
            return []
        number = next(self._numbers)
        self._pending[number] = _PendingReport(divergence, slot)
        return self._ask(number, now)

    def _ask(self, number: int, now: float) -> list[Action]:
        pending = self._pending[number]
        groups = pending.divergence.call_groups
        asked = sorted({(group.recorded_by, group.program) for group in groups if group.name})
        pending.round = Round(asked, lambda replies, now: self._report(number, now))
        if not asked:
            return self._report(number, now)
        pending.round.limit(self._timers, Timer.DETAILS, now + _DETAILS_TIMEOUT_S, of=number)
        return [Send((rank,), ProgramDetailsRequest(program)) for rank, program in asked]

    def handle_details(self, reply: ProgramDetailsReply, now: float) -> list[Action]:
        key = (reply.rank, reply.program)
        asked = [pending for pending in self._pending.values() if key in pending.round.missing]
        for pending in asked:
            pending.details[reply.rank] = reply.details
            pending.flights[reply.rank] = reply.flight
        complete = [pending.round for pending in asked if pending.round.add(key, reply)]
        return [action for one in complete for action in one.end(now)]

    def report_all(self, now: float) -> list[Action]:
        """Report without the details that have not arrived yet."""
        return [action for number in tuple(self._pending) for action in self._report(number, now)]

    def _report(self, number: int, now: float) -> list[Action]:
        self._timers.cancel_one(Timer.DETAILS, number)
        pending = self._pending[number]
        waiting = pending.slot.waiting if pending.slot is not None else ()
        order = find_call_order(pending.divergence, pending.flights)
        if pending.reported is not None:
            return self._follow_up(number, pending, pending.reported, order, now)
        is_open = order.is_open and not (waiting or self.is_concluding)
        if is_open and order is CallOrder.NO_BATCHES and pending.pause_s == _NEXT_CALLS_S:
            self._ask_later(number, pending, now)
            return []
        self._timers.cancel_one(Timer.CALL_ORDER, number)
        divergence = replace(pending.divergence.with_program_details(pending.details), order=order)
        if is_open:
            pending.reported = divergence
            self._ask_later(number, pending, now)
        else:
            del self._pending[number]
        text = divergence_text.format_divergence(divergence, self._hosts)
        self._told |= set(waiting)
        actions = self._matcher.resolve(pending.slot, text) if pending.slot is not None else []
        if self.are_enough or self.has(divergence.group):
            same = [known for known in self.divergences if known.is_in_call(divergence)]  # the recorders were faster
            self.raised += same if waiting else []
            return actions
        self.divergences.append(divergence)
        if waiting:
            self.raised.append(divergence)
            return actions
        if order is CallOrder.NAN_SEARCH:
            then = partial(self._show, divergence, text)
            self._timers.set(Timer.CALL_ORDER, now + _NAN_SEARCH_PATIENCE_S, then, of=number)
            return actions
        return [*actions, *self._show(divergence, text, now)]

    def _ask_later(self, number: int, pending: _PendingReport, now: float) -> None:
        self._timers.set(Timer.CALL_ORDER, now + pending.pause_s, partial(self._ask, number), of=number)
        pending.pause_s = min(2 * pending.pause_s, _MAX_NEXT_CALLS_S)

    def _follow_up(
        self, number: int, pending: _PendingReport, reported: Divergence, order: CallOrder, now: float
    ) -> list[Action]:
        """Correct the advice of a report by the calls that the ranks have made since, once these decide."""
        if reported not in self.divergences:  # there was another one of the same ranks
            del self._pending[number]
            return []
        if order.is_open and not (self.is_concluding or self._has_enough_calls(pending)):
            self._ask_later(number, pending, now)
            return []
        del self._pending[number]
        corrected = replace(reported.with_program_details(pending.details), order=order)
        for known in (self.divergences, self.shown, self.raised):
            known[:] = [corrected if one == reported else one for one in known]
        advice = divergence_text.format_advice(corrected)
        if advice == divergence_text.format_advice(reported) or corrected not in self.shown:
            return []
        return [PrintLine(f"the next calls after {corrected.title} show more: {advice}")]

    def _has_enough_calls(self, pending: _PendingReport) -> bool:
        group, number = pending.divergence.group, pending.divergence.number
        made = [flight.call_counts.get(group, 0) for flight in pending.flights.values()]
        return bool(made) and min(made) >= number + _ENOUGH_CALLS

    def _show(self, divergence: Divergence, text: str, now: float) -> list[Action]:
        if self.is_concluding:
            return []
        self.shown.append(divergence)
        return [RecordDivergence(text), PrintLine(text)]
