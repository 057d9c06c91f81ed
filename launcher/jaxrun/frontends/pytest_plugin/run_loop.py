"""Runs one test on the ranks of a gang: hands what they send to the RunState, keeps the time limits, says how it went.

The parent keeps the time limits, because nothing within a rank can end a wait in C++.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Iterable
from typing import Any

from jaxrun.analysis.diagnosis.snapshot import Snapshot
from jaxrun.analysis.diagnosis.stacks import main_stack
from jaxrun.analysis.lockstep.compare import Lag, find_lags
from jaxrun.analysis.lockstep.report import format_lag
from jaxrun.analysis.verdict.stack_text import format_place
from jaxrun.frontends.gang.call_events import Disconnected, LauncherOutput, Printed, RankMessage, Returned
from jaxrun.frontends.gang.exceptions import WorkerDied
from jaxrun.frontends.pytest_plugin.rank_results import PhaseState, RankResult, RunResult
from jaxrun.frontends.pytest_plugin.rank_sessions import RankSessions, session_error
from jaxrun.frontends.pytest_plugin.run_state import ParentTerminal, RunState
from jaxrun.protocol.pytest_messages import RecordedWarning, RunTest
from jaxrun.text import format_ranks, format_seconds, format_signal

_MAX_CHECK_INTERVAL_S = 30.0  # between two checks for an abandoned rank
_DIVERGENCE_REPORT_TIMEOUT_S = 1.0  # for the launcher to report how the ranks fell out of step


class Expiry(enum.Enum):
    """What is to happen when the next time has come."""

    TIMEOUT = "the test has taken too long"
    GRACE = "a rank has failed, and the grace of the others is over"
    CHECK = "a rank has finished some time ago: check whether another waits for it in vain"


class RunLimits:
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


class RunLoop:
    """Runs one test. `record` is called with the ranks' warnings; `debug` is RunState's."""

    def __init__(
        self,
        sessions: RankSessions,
        terminal: ParentTerminal,
        record: Callable[[RecordedWarning], None],
        debug: bool = False,
    ) -> None:
        self._sessions = sessions
        self._call = sessions.call
        self._state = RunState(len(sessions.hosts), sessions.call.send, sessions.gang.fault, record, terminal, debug)
        self._notes: list[str] = []
        self._launcher_output = ""

    def run(self, order: RunTest, timeout: float, grace: float) -> RunResult:
        """Run the test to its end, or until it is clear that it will have none. `timeout`, `grace`: seconds."""
        self._call.send(order)
        began = time.monotonic()
        limits = RunLimits(began, timeout, grace)
        expiry = None
        while expiry is None and self._state.running:
            expiry = self._step(limits)
        return self._build_result(began, timeout if expiry is Expiry.TIMEOUT else None)

    def _step(self, limits: RunLimits) -> Expiry | None:
        """Wait for one event and handle it. Returns why the test is given up, else None."""
        began = time.monotonic()
        debugging = self._state.debugged_rank is not None
        expires_at, expiry = limits.next_expiry(self._state)
        event = self._call.receive(None if debugging else max(0.0, expires_at - began))
        now = time.monotonic()
        if debugging:
            limits.exclude_pause(began, now)
        elif event is None and now >= expires_at:
            if expiry is not Expiry.CHECK or self._has_abandoned_rank():
                return expiry
            limits.record_check(now)
        self._handle(event, now)
        return None

    def _has_abandoned_rank(self) -> bool:
        abandoned = find_abandoned_rank(_lags(self._sessions.snapshot()), self._state.finished)
        self._notes += [abandoned] if abandoned else []
        return bool(abandoned)

    def _handle(self, event: Any, now: float) -> None:
        match event:
            case RankMessage(rank, message):
                self._state.handle_message(rank, message, now)
            case Printed():
                self._call.show(event)
            case LauncherOutput(text):
                self._launcher_output += text
            case Disconnected(rank):
                self._state.handle_disconnect(rank, now)
            case Returned(rank):
                self._state.handle_disconnect(rank, now, session_error(event) or "its pytest session has ended")

    # ---- the result

    def _build_result(self, began: float, timeout: float | None) -> RunResult:
        state = self._state
        divergence = self._find_divergence()
        died = self._call.explain_death() if self._call.disconnected else None
        cut_off = state.running if died is None else ()
        notes = [*self._notes, *(self._sessions.gang.stacks().splitlines() if cut_off and timeout is not None else [])]
        snapshot = self._sessions.snapshot() if cut_off else None
        ranks = {rank: self._rank_result(rank, began, died, snapshot) for rank in state.ranks}
        if died is not None:
            notes += str(died).splitlines()
        elif not divergence:  # which is what the launcher has printed
            notes += self._launcher_output.splitlines()
        if cut_off:
            failure_at = state.first_failure_at
            since = f" {format_seconds(time.monotonic() - failure_at)} after the first failure" if failure_at else ""
            notes.append(f"{format_ranks(cut_off)} ended{since}; the next test gets a new gang")
        left = self._call.disconnected or any(rank.disconnected_at is not None for rank in state.ranks.values())
        in_step = state.in_step and not state.may_be_out_of_step and not divergence
        now = time.time()
        span = (now - (time.monotonic() - began), now)
        reusable = in_step and not (left or state.running)
        return RunResult(ranks, self._sessions.hosts, span, timeout, reusable, divergence, tuple(notes))

    def _find_divergence(self) -> str:
        """How the ranks fell out of step, as far as it is known; empty if they did not."""
        suspected = self._state.may_be_out_of_step
        found = self._sessions.new_divergences() if suspected or self._launcher_output else []
        if not suspected or found:
            return "\n".join(found)
        snapshot = self._sessions.snapshot()  # for which the launcher compares the ranks' flight recorders
        until = time.monotonic() + _DIVERGENCE_REPORT_TIMEOUT_S
        while not found and (event := self._call.receive(until - time.monotonic())) is not None:
            self._handle(event, time.monotonic())
            found = self._sessions.new_divergences()
        return "\n".join(found or (format_lag(lag, self._sessions.hosts) for lag in _lags(snapshot)[:1]))

    def _rank_result(self, rank: int, began: float, died: WorkerDied | None, snapshot: Snapshot | None) -> RankResult:
        progress = self._state.ranks[rank]
        failed_at = progress.first_failure_at - began if progress.first_failure_at is not None else None
        if progress.calls is not None:
            return RankResult(progress.reports, failed_at=failed_at)
        if progress.session_error:
            cut_off, detail = PhaseState.DIED, progress.session_error
        elif died is not None and rank in died.ranks:
            cut_off, detail = PhaseState.DIED, _describe_death(died)
        elif died is not None:
            cut_off, detail = PhaseState.STOPPED, "with the others"
        else:
            cut_off, detail = _position(rank, snapshot)
        return RankResult(progress.reports, cut_off, detail, failed_at, self._sessions.read_captured(rank))


def find_abandoned_rank(lags: Iterable[Lag], finished: frozenset[int]) -> str:
    """A sentence about a rank that waits for ever in a call with a rank that finished without it; "" if none."""
    for lag in lags:
        for rank in sorted(lag.reached.keys() - finished):
            number = lag.reached[rank]
            without = [other for other in sorted(finished) if lag.reached.get(other, number) < number]
            if without:
                call = f"is in cross-process call #{number} of ranks {lag.group}"
                return f"rank {rank} {call}, and {format_ranks(without)} finished the test without it"
    return ""


def _lags(snapshot: Snapshot | None) -> tuple[Lag, ...]:
    return find_lags(snapshot.flights) if snapshot is not None else ()


def _position(rank: int, snapshot: Snapshot | None) -> tuple[PhaseState, str]:
    """Whether a rank waits or computes, and where it is, as far as it is known."""
    waits, dump = snapshot is None or snapshot.waits.get(rank), snapshot.dumps.get(rank, "") if snapshot else ""
    return PhaseState.STUCK if waits else PhaseState.BUSY, format_place(main_stack(dump))


def _describe_death(died: WorkerDied) -> str:
    return f"of {format_signal(died.signal)}" if died.signal is not None else f"with exit status {died.status}"
