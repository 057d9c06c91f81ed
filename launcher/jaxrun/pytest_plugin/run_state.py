"""What has happened so far in one test on all ranks, and what the parent must do next: a state machine without I/O.

The ranks' messages go in, actions come out. Times are seconds on the caller's clock.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxrun.protocol.flight import Flight, parse_group
from jaxrun.protocol.pytest_messages import (
    DebugDecision,
    DebuggerOutput,
    DebuggerReadRequest,
    DebugRequest,
    FaultRequest,
    FromRank,
    Gather,
    Gathered,
    PeerLost,
    PhaseReport,
    RecordedWarning,
    RunFinished,
)
from jaxrun.text import format_ranks

# ---- actions: what the parent is to do, in this order


@dataclass(frozen=True, slots=True)
class SendToRanks:
    message: Any
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TriggerFault:
    fault: FaultRequest


@dataclass(frozen=True, slots=True)
class ShowDebuggerText:
    rank: int
    text: str


@dataclass(frozen=True, slots=True)
class ReadDebuggerLine:
    """Read a line from the terminal and send it to the rank's debugger."""

    rank: int


@dataclass(frozen=True, slots=True)
class RecordWarning:
    """Hand a warning to pytest."""

    warning: RecordedWarning


Action = SendToRanks | TriggerFault | ShowDebuggerText | ReadDebuggerLine | RecordWarning


# ---- the state


@dataclass(slots=True)
class RankProgress:
    """How far one rank has come in the test.

    reports:          pytest's reports by phase
    calls, chains:    cross-process calls by group, from RunFinished; calls is None until the rank has finished
    failed_at, finished_at, disconnected_at:  times; None until it happens
    gather:           the gather that the rank waits in
    """

    reports: dict[str, dict[str, Any]] = field(default_factory=dict)
    calls: Mapping[str, int] | None = None
    chains: Mapping[str, int] = field(default_factory=dict)
    failed_at: float | None = None
    finished_at: float | None = None
    disconnected_at: float | None = None
    gather: Gather | None = None

    @property
    def done(self) -> bool:
        return self.calls is not None or self.disconnected_at is not None


class RunState:
    """The state of one test on `size` ranks.

    debug: the rank that a debugger may open on when it fails; -1 for the first rank that fails; None for none
    """

    def __init__(self, size: int, debug: int | None = None) -> None:
        self.ranks = {rank: RankProgress() for rank in range(size)}
        self.debugged_rank: int | None = None
        self._debuggable = debug
        self._faults: set[FaultRequest] = set()
        self._warnings: set[RecordedWarning] = set()
        self._held_for_debugger: list[tuple[int, DebuggerOutput | DebuggerReadRequest | DebugRequest]] = []

    @property
    def done(self) -> bool:
        return not self.running

    @property
    def running(self) -> tuple[int, ...]:
        """The ranks that have neither finished nor disconnected."""
        return tuple(number for number, rank in self.ranks.items() if not rank.done)

    @property
    def first_failure_at(self) -> float | None:
        times = [time for rank in self.ranks.values() for time in (rank.failed_at, rank.disconnected_at)]
        return min((time for time in times if time is not None), default=None)

    @property
    def last_finish_at(self) -> float | None:
        return max((rank.finished_at for rank in self.ranks.values() if rank.finished_at is not None), default=None)

    @property
    def in_step(self) -> bool:
        """Whether all ranks of each group have made the same number of cross-process calls."""
        counts = [rank.calls or {} for rank in self.ranks.values()]
        groups = {group for made in counts for group in made}
        return all(len({counts[rank].get(group, 0) for rank in parse_group(group)}) <= 1 for group in groups)

    @property
    def may_be_out_of_step(self) -> bool:
        """Whether all ranks have finished without a failure, but not all of them seem to have made the same calls."""
        if self.first_failure_at is not None or not self.done:
            return False
        groups = {group for rank in self.ranks.values() for group in rank.chains}
        known = ([self.ranks[rank].chains.get(group) for rank in parse_group(group)] for group in groups)
        return not self.in_step or any(len({*chains} - {None}) > 1 for chains in known)

    def find_abandoned_rank(self, flights: Mapping[int, Flight]) -> str:
        """A sentence about a rank that waits for ever in a call with a rank that finished without it; "" if none.

        `flights`: the flight recorders of the ranks.
        """
        finished = {number: rank.calls for number, rank in self.ranks.items() if rank.calls is not None}
        for number in self.running:
            flight = flights.get(number, Flight())
            for group in {call.group for call in (flight.last_call, flight.pending) if call is not None}:
                reached = flight.last_number(group)
                without = [r for r in parse_group(group) if r in finished and finished[r].get(group, 0) < reached]
                if without:
                    call = f"is in cross-process call #{reached} of ranks {group}"
                    return f"rank {number} {call}, and {format_ranks(without)} finished the test without it"
        return ""

    def handle_message(self, number: int, message: FromRank, now: float) -> Iterator[Action]:
        """Handle a message of rank `number`; yields actions, each of which is to be done at once."""
        if isinstance(message, (DebuggerOutput, DebuggerReadRequest, DebugRequest)):
            yield from self._handle_debugger(number, message)
            return
        if self.debugged_rank == number:
            yield from self._leave_debugger()
        rank = self.ranks[number]
        match message:
            case PhaseReport(report):
                rank.reports[report["when"]] = report
                if report["outcome"] == "failed" and rank.failed_at is None:
                    rank.failed_at = now
            case Gather():
                rank.gather = message
                yield from self._complete_gather()
            case FaultRequest() if message not in self._faults:
                self._faults.add(message)
                yield TriggerFault(message)
            case RecordedWarning() if message not in self._warnings:
                self._warnings.add(message)
                yield RecordWarning(message)
            case RunFinished(calls, chains):
                rank.calls, rank.chains, rank.finished_at = calls, chains, now
                yield from self._complete_gather()

    def handle_disconnect(self, number: int, now: float) -> Iterator[Action]:
        """Handle the end of a rank's connection."""
        self.ranks[number].disconnected_at = now
        if self.debugged_rank == number:
            yield from self._leave_debugger()
        yield from self._complete_gather()

    # ---- gathers: barrier, allgather and broadcast

    def _complete_gather(self) -> Iterator[Action]:
        """Answer the ranks that wait in a gather, if all are there or if some never will be."""
        waiting = {number: rank.gather for number, rank in self.ranks.items() if rank.gather and not rank.done}
        if not waiting:
            return
        reason = self._why_incomplete(waiting)
        if not reason and len(waiting) < len(self.ranks):
            return
        for number in waiting:
            self.ranks[number].gather = None
        if reason:
            yield SendToRanks(PeerLost(reason), tuple(waiting))
            return
        values = tuple(gather.value for gather in waiting.values())
        root = next(iter(waiting.values())).root
        yield SendToRanks(Gathered(values if root < 0 else (values[root],)), tuple(waiting))

    def _why_incomplete(self, waiting: Mapping[int, Gather]) -> str:
        """Why the gather will never be complete; empty if it may be."""
        gone = [number for number, rank in self.ranks.items() if rank.disconnected_at is not None]
        if gone:
            return f"{format_ranks(gone)} {'is' if len(gone) == 1 else 'are'} gone"
        for number, rank in self.ranks.items():
            if rank.calls is not None:
                return f"rank {number} {_describe_end(rank)}"
        places: dict[str, list[int]] = {}
        for number, gather in waiting.items():
            places.setdefault(gather.where, []).append(number)
        if len(waiting) == len(self.ranks) and len(places) > 1:
            return ", ".join(
                f"{format_ranks(ranks)} {'is' if len(ranks) == 1 else 'are'} at {where}"
                for where, ranks in places.items()
            )
        return ""

    # ---- debuggers: one rank at a time

    def _handle_debugger(
        self, number: int, message: DebuggerOutput | DebuggerReadRequest | DebugRequest
    ) -> Iterator[Action]:
        if self.debugged_rank not in (None, number):
            self._held_for_debugger.append((number, message))
            return
        match message:
            case DebugRequest(error):
                granted = self._debuggable in (-1, number)
                if granted:
                    self._debuggable, self.debugged_rank = None, number  # only one rank of a test
                    yield ShowDebuggerText(number, f"{error}\n")
                yield SendToRanks(DebugDecision(granted), (number,))
            case DebuggerOutput(text):
                self.debugged_rank = number
                yield ShowDebuggerText(number, text)
            case DebuggerReadRequest():
                self.debugged_rank = number
                yield ReadDebuggerLine(number)

    def _leave_debugger(self) -> Iterator[Action]:
        """The user has left the debugger: handle what other ranks' debuggers have sent meanwhile."""
        self.debugged_rank = None
        held, self._held_for_debugger = self._held_for_debugger, []
        for number, message in held:
            yield from self._handle_debugger(number, message)


def _describe_end(rank: RankProgress) -> str:
    outcomes = {report["outcome"] for report in rank.reports.values()}
    return "has failed" if "failed" in outcomes else "has skipped" if "skipped" in outcomes else "has finished its test"
