"""What has happened so far in one test on all ranks, and what the parent must do next and when, without I/O.

The ranks' messages go in, actions come out. Times are seconds on the caller's clock. The parent keeps the time limits,
because nothing within a rank can end a wait in C++.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jaxrun.frontends.pytest_plugin.rank_results import RankProgress
from jaxrun.protocol.debugger_messages import DebuggerDecision, DebuggerOutput, DebuggerReadRequest
from jaxrun.protocol.pytest_messages import (
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

_MAX_CHECK_INTERVAL_S = 30.0  # between two checks for an abandoned rank

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


class RunState:
    """The state of one test on `size` ranks.

    debug: whether a debugger opens on the first rank that fails
    """

    def __init__(self, size: int, debug: bool = False) -> None:
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
                granted, self._debuggable = self._debuggable, False  # only one rank of a test
                if granted:
                    self.debugged_rank = number
                    yield ShowDebuggerText(number, f"{error}\n")
                yield SendToRanks(DebuggerDecision(granted), (number,))
            case DebuggerOutput(text=text):
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


# ---- time limits


class Expiry(enum.Enum):
    """What is to happen when the next time has come."""

    TIMEOUT = "the test has taken too long"
    GRACE = "a rank has failed, and the grace of the others is over"
    CHECK = "a rank has finished some time ago: check whether another waits for it in vain"


class Timeouts:
    """`timeout`: seconds for the whole test; `grace`: for the other ranks when one has failed or finished."""

    def __init__(self, began: float, timeout: float, grace: float) -> None:
        self._deadline = began + timeout
        self._grace = grace
        self._resumed_at = began
        self._check_interval = grace
        self._checked_at: float | None = None

    def next_expiry(self, state: RunState) -> tuple[float, Expiry]:
        """When something is to happen next, and what."""
        expiries = [(self._deadline, Expiry.TIMEOUT)]
        if state.first_failure_at is not None:
            expiries.append((max(state.first_failure_at, self._resumed_at) + self._grace, Expiry.GRACE))
        elif state.last_finish_at is not None:
            since = state.last_finish_at if self._checked_at is None else self._checked_at
            expiries.append((max(since, self._resumed_at) + self._check_interval, Expiry.CHECK))
        return min(expiries, key=lambda expiry: expiry[0])

    def record_check(self, now: float) -> None:
        """No rank waits in vain yet; the next check comes after twice the interval."""
        self._checked_at = now
        self._check_interval = min(2 * self._check_interval, _MAX_CHECK_INTERVAL_S)

    def exclude_pause(self, began: float, now: float) -> None:
        """Do not count the time that the user has spent in a debugger."""
        self._deadline += now - began
        self._resumed_at = now
