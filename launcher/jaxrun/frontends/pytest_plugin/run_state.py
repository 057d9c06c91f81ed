"""The progress of one test on all ranks, and the answers to the requests of its ranks to the parent.

Messages of ranks go in. Times are seconds since the test began. The parent answers, because it knows when a rank will
never come, and only one rank at a time may use its terminal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from msgspec import Struct, field

from jaxrun.protocol.debugger_messages import (
    DebuggerClosed,
    DebuggerDecision,
    DebuggerInput,
    DebuggerOutput,
    DebuggerReadRequest,
)
from jaxrun.protocol.flight import parse_group
from jaxrun.protocol.pytest_messages import (
    DebuggerQuestion,
    FaultRequest,
    Gather,
    Gathered,
    PeerLost,
    PhaseReport,
    RecordedWarning,
    RunFinished,
)
from jaxrun.text import agree, format_ranks, group_alike


class RankProgress(Struct):
    """The progress of one rank in the test.

    reports:          pytest's reports by phase
    calls, chains:    cross-process calls by group, from RunFinished; calls is None until the rank has finished
    failed_at, finished_at, disconnected_at:  times; None until it happens
    session_error:    why its pytest session has ended, though its process lives
    gather:           the gather that the rank waits in
    """

    reports: dict[str, dict[str, Any]] = field(default_factory=dict)
    calls: Mapping[str, int] | None = None
    chains: Mapping[str, int] = field(default_factory=dict)
    failed_at: float | None = None
    finished_at: float | None = None
    disconnected_at: float | None = None
    session_error: str = ""
    gather: Gather | None = None

    @property
    def done(self) -> bool:
        return self.calls is not None or self.disconnected_at is not None

    @property
    def first_failure_at(self) -> float | None:
        times = [time for time in (self.failed_at, self.disconnected_at) if time is not None]
        return min(times, default=None)


class RunState:
    """The state of one test on `size` ranks, and what is done at their request.

    send:      sends a message to ranks
    inject:    injects a fault
    record:    hands a warning to pytest
    show, read_line:  of the terminal, for the debugger of a rank
    debug:     whether a debugger opens on the first rank that fails
    """

    def __init__(
        self,
        size: int,
        send: Callable[[Any, Iterable[int]], None],
        inject: Callable[[str, int], None],
        record: Callable[[RecordedWarning], None],
        show: Callable[[int, str], None],
        read_line: Callable[[int], str],
        debug: bool = False,
    ) -> None:
        self.ranks = {rank: RankProgress() for rank in range(size)}
        self.debugged_rank: int | None = None
        self._send = send
        self._inject = inject
        self._record = record
        self._show = show
        self._read_line = read_line
        self._debuggable = debug
        self._terminal_is_closed = False  # a rank has died, so the launcher ends the others
        self._done_once: set[FaultRequest | RecordedWarning] = set()
        self._held_for_debugger: list[tuple[int, DebuggerOutput | DebuggerReadRequest | DebuggerQuestion]] = []

    @property
    def running(self) -> tuple[int, ...]:
        """The ranks that have neither finished nor disconnected."""
        return tuple(number for number, rank in self.ranks.items() if not rank.done)

    @property
    def finished(self) -> frozenset[int]:
        return frozenset(number for number, rank in self.ranks.items() if rank.calls is not None)

    @property
    def first_failure_at(self) -> float | None:
        times = [rank.first_failure_at for rank in self.ranks.values()]
        return min((time for time in times if time is not None), default=None)

    @property
    def last_finish_at(self) -> float | None:
        return max((rank.finished_at for rank in self.ranks.values() if rank.finished_at is not None), default=None)

    def handle_message(self, number: int, message: Any, now: float) -> None:
        if isinstance(message, (DebuggerOutput, DebuggerReadRequest, DebuggerQuestion)):
            self._handle_debugger(number, message)
            return
        self._leave_debugger(number)
        rank = self.ranks[number]
        match message:
            case PhaseReport(report):
                rank.reports[report["when"]] = report
                if report["outcome"] == "failed" and rank.failed_at is None:
                    rank.failed_at = now
            case DebuggerClosed():
                self._drop_held(number)
            case Gather():
                rank.gather = message
                self._complete_gather()
            case FaultRequest(kind, target) if message not in self._done_once:
                self._done_once.add(message)
                self._inject(kind, target)
            case RecordedWarning() if message not in self._done_once:
                self._done_once.add(message)
                self._record(message)
            case RunFinished(calls, chains):
                rank.calls, rank.chains, rank.finished_at = calls, chains, now
                self._complete_gather()

    def handle_disconnect(self, number: int, now: float, session_error: str = "") -> None:
        """Handle the end of a rank's connection, or of its pytest session."""
        self.ranks[number].disconnected_at = now
        self.ranks[number].session_error = session_error
        self._drop_held(number)
        if session_error:
            self._leave_debugger(number)
        else:
            self._close_terminal()
        self._complete_gather()

    # ---- gathers: barrier, allgather and broadcast

    def _complete_gather(self) -> None:
        """Answer the ranks that wait in a gather, if all have come or if some never will."""
        waiting = {number: rank.gather for number, rank in self.ranks.items() if rank.gather and not rank.done}
        reason = self._why_incomplete(waiting)
        if not waiting or (not reason and len(waiting) < len(self.ranks)):
            return
        for number in waiting:
            self.ranks[number].gather = None
        if reason:
            self._send(PeerLost(reason), tuple(waiting))
            return
        values = tuple(gather.value for gather in waiting.values())
        root = next(iter(waiting.values())).root
        self._send(Gathered(values if root < 0 else (values[root],)), tuple(waiting))

    def _why_incomplete(self, waiting: Mapping[int, Gather]) -> str:
        """Return why the gather will never be complete; empty if it may be."""
        gone = [number for number, rank in self.ranks.items() if rank.disconnected_at is not None]
        if gone:
            return f"{format_ranks(gone)} {agree('is', len(gone))} gone"
        for number in sorted(self.finished):
            return f"rank {number} {_describe_end(self.ranks[number])}"
        places = group_alike({number: gather.where for number, gather in waiting.items()})
        if len(waiting) == len(self.ranks) and len(places) > 1:
            return ", ".join(f"{format_ranks(ranks)} {agree('is', len(ranks))} at {where}" for where, ranks in places)
        return ""

    # ---- debuggers: one rank at a time

    @property
    def is_terminal_awaited(self) -> bool:
        """Whether the debugger of another rank waits until the debugged rank is left."""
        return bool(self._held_for_debugger)

    def hand_terminal_over(self) -> None:
        """Give the terminal to the next rank, because the debugged one does not come back from a step."""
        rank = self.debugged_rank
        assert rank is not None
        self._show(rank, f"\n>>> rank {rank} has not come back from that step: it may wait for another rank")
        self._leave_debugger(rank)

    def _handle_debugger(self, number: int, message: DebuggerOutput | DebuggerReadRequest | DebuggerQuestion) -> None:
        if self._terminal_is_closed and not isinstance(message, DebuggerQuestion):
            return
        if self.debugged_rank not in (None, number):
            self._held_for_debugger.append((number, message))
            return
        match message:
            case DebuggerQuestion(error):
                granted, self._debuggable = self._debuggable, False  # only one rank of a test
                if granted:
                    self.debugged_rank = number
                    self._show(number, f"{error}\n")
                self._send(DebuggerDecision(granted), (number,))
            case DebuggerOutput(text=text):
                self.debugged_rank = number
                self._show(number, text)
            case DebuggerReadRequest():
                self.debugged_rank = number
                self._send(DebuggerInput(message.number, self._read_line(number)), (number,))

    def _leave_debugger(self, number: int) -> None:
        """If the user has left this rank's debugger, handle what other ranks' debuggers have sent meanwhile."""
        if self.debugged_rank != number:
            return
        self.debugged_rank = None
        held, self._held_for_debugger = self._held_for_debugger, []
        for other, message in held:
            self._handle_debugger(other, message)

    def _drop_held(self, number: int) -> None:
        """Forget what this rank's debugger has sent while another rank was debugged."""
        self._held_for_debugger = [(other, message) for other, message in self._held_for_debugger if other != number]

    def _close_terminal(self) -> None:
        """End all debugging. A rank that waits for a line gets none, and is killed soon."""
        self.debugged_rank = None
        self._debuggable, self._terminal_is_closed = False, True
        held, self._held_for_debugger = self._held_for_debugger, []
        for other, message in held:
            self._handle_debugger(other, message)

    # ---- whether the ranks are in step

    @property
    def in_step(self) -> bool:
        """Whether all ranks of each group have made the same number of cross-process calls."""
        return _agree({number: rank.calls or {} for number, rank in self.ranks.items()}, 0)

    @property
    def may_be_out_of_step(self) -> bool:
        """Whether all ranks have finished without a failure, but not all of them seem to have made the same calls."""
        if self.running or self.first_failure_at is not None:
            return False
        return not (self.in_step and _agree({number: rank.chains for number, rank in self.ranks.items()}, None))


def _agree(by_rank: Mapping[int, Mapping[str, int]], unknown: int | None) -> bool:
    """Whether the ranks of each group have the same value for it, as far as it is known."""
    for group in {group for values in by_rank.values() for group in values}:
        values = {by_rank[rank].get(group, unknown) for rank in parse_group(group, len(by_rank))}
        if len(values - {None}) > 1:
            return False
    return True


def _describe_end(rank: RankProgress) -> str:
    outcomes = {report["outcome"] for report in rank.reports.values()}
    return "has failed" if "failed" in outcomes else "has skipped" if "skipped" in outcomes else "has finished its test"
