"""Runs one test on the ranks of a session: receives their messages, updates the RunState and executes its actions."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest

from jaxrun.analysis.diagnosis.snapshot import Snapshot
from jaxrun.analysis.diagnosis.stacks import main_stack
from jaxrun.analysis.lockstep import compare, report
from jaxrun.analysis.verdict.stack_text import format_place
from jaxrun.frontends.gang.call_events import Disconnected, LauncherOutput, Printed, RankMessage, Returned
from jaxrun.frontends.gang.exceptions import WorkerDied
from jaxrun.frontends.pytest_plugin.rank_results import (
    PhaseState,
    RankResult,
    find_abandoned_rank,
    in_step,
    may_be_out_of_step,
)
from jaxrun.frontends.pytest_plugin.run_state import (
    Action,
    Expiry,
    ReadDebuggerLine,
    RecordWarning,
    RunState,
    SendToRanks,
    ShowDebuggerText,
    Timeouts,
    TriggerFault,
)
from jaxrun.frontends.pytest_plugin.session import GangSession, session_error
from jaxrun.protocol.debugger_messages import DebuggerInput
from jaxrun.protocol.flight import Flight
from jaxrun.protocol.pytest_messages import RecordedWarning, RunTest
from jaxrun.text import format_ranks, format_seconds, format_signal

_DIVERGENCE_REPORT_TIMEOUT_S = 1.0  # for the launcher to report how the ranks fell out of step


@dataclass(frozen=True, slots=True)
class RunResult:
    """How a test went.

    ranks:       what became of each rank
    timeout:     the time limit that was reached, in seconds; None if none was
    reusable:    whether the session can run another test
    notes:       lines for the report
    divergence:  how the ranks fell out of step, in several lines; empty if they did not
    """

    ranks: dict[int, RankResult]
    timeout: float | None = None
    reusable: bool = True
    notes: list[str] = field(default_factory=list)
    divergence: str = ""


class RunLoop:
    """Runs one test. `record` is called with the ranks' warnings; `debug` is RunState's."""

    def __init__(
        self,
        session: GangSession,
        terminal: DebuggerTerminal,
        record: Callable[[RecordedWarning], None],
        debug: bool = False,
    ) -> None:
        self._session = session
        self._call = session.call
        self._terminal = terminal
        self._record = record
        self._state = RunState(len(session.gang.workers), debug)
        self._session_errors: dict[int, str] = {}  # of the ranks whose session has ended
        self._notes: list[str] = []
        self._launcher_output = ""

    def run(self, order: RunTest, timeout: float, grace: float) -> RunResult:
        """Run the test to its end, or until it is clear that it will have none. `timeout`, `grace`: seconds."""
        self._call.send(order)
        began = time.monotonic()
        timeouts = Timeouts(began, timeout, grace)
        expiry = None
        while expiry is None and not self._state.done:
            expiry = self._step(timeouts)
        self._terminal.release()
        return self._build_result(began, timeout if expiry is Expiry.TIMEOUT else None)

    def _step(self, timeouts: Timeouts) -> Expiry | None:
        """Wait for one event and handle it. Returns why the test is given up, else None."""
        began = time.monotonic()
        debugging = self._state.debugged_rank is not None
        expires_at, expiry = timeouts.next_expiry(self._state)
        event = self._call.receive(None if debugging else max(0.0, expires_at - began))
        now = time.monotonic()
        if debugging:
            timeouts.exclude_pause(began, now)
        elif event is None and now >= expires_at:
            if expiry is not Expiry.CHECK or self._has_abandoned_rank():
                return expiry
            timeouts.record_check(now)
        self._handle(event, now)
        return None

    def _has_abandoned_rank(self) -> bool:
        _, snapshot = self._session.take_snapshot()
        abandoned = find_abandoned_rank(self._state.ranks, _flights(snapshot))
        self._notes += [abandoned] if abandoned else []
        return bool(abandoned)

    def _handle(self, event: Any, now: float) -> None:
        match event:
            case RankMessage(rank, message):
                self._execute(self._state.handle_message(rank, message, now))
            case Printed():
                self._call.show(event)
            case LauncherOutput(text):
                self._launcher_output += text
            case Disconnected(rank):
                self._execute(self._state.handle_disconnect(rank, now))
            case Returned(rank):
                self._session_errors[rank] = session_error(event) or "its pytest session has ended"
                self._execute(self._state.handle_disconnect(rank, now))

    def _execute(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case SendToRanks(message, ranks):
                    self._call.send(message, ranks)
                case TriggerFault(fault):
                    self._session.gang.fault(fault.kind, fault.rank)
                case ShowDebuggerText(rank, text):
                    self._terminal.show(rank, text)
                case ReadDebuggerLine(rank):
                    self._call.send(DebuggerInput(self._terminal.read(rank)), (rank,))
                case RecordWarning(warning):
                    self._record(warning)

    # ---- the result

    def _build_result(self, began: float, timeout: float | None) -> RunResult:
        divergence = self._find_divergence()
        died = self._call.explain_death() if self._call.disconnected else None
        cut_off = self._state.running if died is None else ()
        text, snapshot = self._session.take_snapshot() if cut_off else ("", None)
        ranks = {rank: self._rank_result(rank, began, died, snapshot) for rank in self._state.ranks}
        notes = [*self._notes, *([text] if timeout is not None and text else [])]
        # The report shows the divergence anyway.
        output = self._launcher_output.replace(f"jaxrun: {divergence}\n", "") if died is None else str(died)
        notes += output.splitlines()
        if cut_off:
            failure_at = self._state.first_failure_at
            since = f" {format_seconds(time.monotonic() - failure_at)} after the first failure" if failure_at else ""
            notes.append(f"{format_ranks(cut_off)} ended{since}; the next test gets a new gang")
        all_there = self._state.done and not self._call.disconnected and not self._session_errors
        ranks_agree = in_step(self._state.ranks) and not may_be_out_of_step(self._state.ranks) and not divergence
        return RunResult(ranks, timeout, all_there and ranks_agree, notes, divergence)

    def _find_divergence(self) -> str:
        """How the ranks fell out of step, as far as it is known; empty if they did not."""
        found = report.find_report(self._launcher_output)
        if found or not may_be_out_of_step(self._state.ranks):
            return found
        _, snapshot = self._session.take_snapshot()  # for which the launcher compares the ranks' flight recorders
        until = time.monotonic() + _DIVERGENCE_REPORT_TIMEOUT_S
        while not found and (event := self._call.receive(until - time.monotonic())) is not None:
            self._handle(event, time.monotonic())
            found = report.find_report(self._launcher_output)
        lag = next(iter(compare.find_lags(_flights(snapshot))), None)
        return found or (report.format_lag(lag, self._session.hosts) if lag is not None else "")

    def _rank_result(self, rank: int, began: float, died: WorkerDied | None, snapshot: Snapshot | None) -> RankResult:
        progress = self._state.ranks[rank]
        times = [time - began for time in (progress.failed_at, progress.disconnected_at) if time is not None]
        failed_at = min(times, default=None)
        if progress.calls is not None:
            return RankResult(progress.reports, failed_at=failed_at)
        state, detail = self._cut_off(rank, died, snapshot)
        return RankResult(progress.reports, state, detail, failed_at, self._session.read_captured(rank))

    def _cut_off(self, rank: int, died: WorkerDied | None, snapshot: Snapshot | None) -> tuple[PhaseState, str]:
        if rank in self._session_errors:
            return PhaseState.DIED, self._session_errors[rank]
        if died is not None:
            by_itself = rank in died.ranks
            return (PhaseState.DIED, _describe_death(died)) if by_itself else (PhaseState.STOPPED, "with the others")
        dump = snapshot.dumps.get(rank, "") if snapshot is not None else ""
        waits = snapshot is None or bool(snapshot.waits.get(rank))
        return PhaseState.STUCK if waits else PhaseState.BUSY, format_place(main_stack(dump))


class DebuggerTerminal:
    """The parent's terminal, for the debugger of one rank at a time.

    Once it is used, pytest captures nothing until the next test.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._capture: Any = config.pluginmanager.get_plugin("capturemanager")
        self._rank: int | None = None

    def show(self, rank: int, text: str) -> None:
        self._switch_to(rank)
        print(text, end="", flush=True)

    def read(self, rank: int) -> str:
        """A line that the user types; empty at the end of the input."""
        self._switch_to(rank)
        return sys.stdin.readline()

    def release(self) -> None:
        """The test has ended."""
        self._rank = None

    def _switch_to(self, rank: int) -> None:
        if self._capture is not None:
            self._capture.suspend_global_capture(in_=True)
        if rank != self._rank:
            self._rank = rank
            print(f"\n>>> rank {rank} is in its debugger, and others may wait for it; c goes on", flush=True)


def _flights(snapshot: Snapshot | None) -> dict[int, Flight]:
    return dict(snapshot.flights) if snapshot is not None else {}


def _describe_death(died: WorkerDied) -> str:
    return f"of {format_signal(died.signal)}" if died.signal is not None else f"with exit status {died.status}"
