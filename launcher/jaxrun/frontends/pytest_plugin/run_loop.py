"""Runs one test on the ranks of a gang: hands what they send to the RunState, keeps the time limits, says how it went.

The parent keeps the time limits, because nothing within a rank can end a wait in C++.
"""

from __future__ import annotations

import contextlib
import enum
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from jaxrun.analysis.diagnosis.job_stacks import JobStacks
from jaxrun.analysis.diagnosis.stacks import main_stack
from jaxrun.analysis.diagnosis.wait_graph import GroupCall, WaitGraph, wait_graph_of
from jaxrun.analysis.lockstep.compare import find_lags
from jaxrun.analysis.lockstep.divergence_text import format_lag
from jaxrun.analysis.verdict.stack_text import find_place
from jaxrun.frontends.gang.call_events import Disconnected, LauncherOutput, Printed, RankMessage, Returned
from jaxrun.frontends.gang.gang_errors import WorkerDied
from jaxrun.frontends.pytest_plugin.rank_results import PhaseState, RankResult, RunResult
from jaxrun.frontends.pytest_plugin.rank_sessions import RankSessions, why_session_ended
from jaxrun.frontends.pytest_plugin.run_state import RunState
from jaxrun.protocol.pytest_messages import RecordedWarning, RunTest
from jaxrun.text import agree, format_ranks, format_seconds, format_status

_MAX_CHECK_INTERVAL_S = 30.0  # between two checks for an abandoned rank
_HANDOVER_S = 1.0  # a step that waits for no other rank ends within this time
_DIVERGENCE_REPORT_TIMEOUT_S = 1.0  # for the launcher to report how the ranks fell out of step


class Expiry(enum.Enum):
    """What to do when the next time limit is reached."""

    TIMEOUT = "the test has taken too long"
    GRACE = "a rank has failed, and the grace of the others is over"
    CHECK = "a rank has finished some time ago: check whether another waits for it in vain"


class RunLimits:
    """The time limits of one test, in seconds since its beginning, without those that the user spent in a debugger.

    timeout:  for the whole test
    grace:    for the other ranks when one has failed or finished
    """

    def __init__(self, timeout: float, grace: float) -> None:
        self._timeout = timeout
        self._grace = self._check_interval = grace
        self._checked_at = 0.0

    def next_expiry(self, state: RunState) -> tuple[float, Expiry]:
        expiries = [(self._timeout, Expiry.TIMEOUT)]
        if state.first_failure_at is not None:
            expiries.append((state.first_failure_at + self._grace, Expiry.GRACE))
        elif state.last_finish_at is not None:
            expiries.append((max(state.last_finish_at, self._checked_at) + self._check_interval, Expiry.CHECK))
        return min(expiries, key=lambda expiry: expiry[0])

    def record_check(self, now: float) -> None:
        """No rank waits in vain yet; the next check comes after twice the interval."""
        self._checked_at = now
        self._check_interval = min(2 * self._check_interval, _MAX_CHECK_INTERVAL_S)


class ParentTerminal(Protocol):
    """The terminal of the process that runs pytest, for debuggers."""

    def show(self, rank: int, text: str) -> None: ...

    def read(self, rank: int) -> str: ...


class RunLoop:
    """Runs one test. `record` is called with the ranks' warnings; `debug` is RunState's."""

    def __init__(
        self,
        sessions: RankSessions,
        terminal: ParentTerminal,
        record: Callable[[RecordedWarning], None],
        *,
        debug: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sessions = sessions
        self._call = sessions.call
        self._terminal = terminal
        self._state = RunState(
            len(sessions.hosts), self._call.send, sessions.gang.fault, record, self._show, self._read_line, debug
        )
        self._notes: list[str] = []
        self._launcher_output = ""
        self._clock = clock
        self._began = clock()  # later, if the user was in a debugger
        self._stepping_since: float | None = None  # when the debugged rank got a line, until it comes back

    def run(self, order: RunTest, timeout: float, grace: float) -> RunResult:
        """Run the test to its end, or until it is clear that it will have none. `timeout`, `grace`: seconds."""
        began = time.time()
        self._call.send(order)
        limits = RunLimits(timeout, grace)
        expiry = None
        while expiry is None and self._state.running:
            expiry = self._step(limits)
        return self._build_result(began, timeout if expiry is Expiry.TIMEOUT else None)

    def _step(self, limits: RunLimits) -> Expiry | None:
        """Wait for one event and handle it. Returns why the test is given up, else None."""
        expires_at, expiry = limits.next_expiry(self._state)
        if self._state.debugged_rank is not None:
            event = self._receive_from_debugger()
        else:
            event = self._call.receive(max(0.0, expires_at - self._now()))
            if event is None and self._now() >= expires_at:
                if expiry is not Expiry.CHECK or self._has_abandoned_rank():
                    return expiry
                limits.record_check(self._now())
        self._handle(event)
        return None

    def _receive_from_debugger(self) -> Any:
        """Wait for one event, or until the debugged rank does not come back from a step though others wait; then None.

        It may wait for one of them in that step. The next one gets the terminal then.
        """
        timeout = None
        if self._stepping_since is not None and self._state.is_terminal_awaited:
            timeout = max(0.0, self._stepping_since + _HANDOVER_S - self._clock())
        with self._clock_stopped():
            event = self._call.receive(timeout)
        if event is None and timeout is not None:
            self._state.hand_terminal_over()
        return event

    def _now(self) -> float:
        """Seconds of the test so far, without those that the user spent in a debugger."""
        return self._clock() - self._began

    @contextlib.contextmanager
    def _clock_stopped(self) -> Iterator[None]:
        since = self._clock()
        yield
        self._began += self._clock() - since

    def _show(self, rank: int, text: str) -> None:
        self._stepping_since = None
        self._terminal.show(rank, text)

    def _read_line(self, rank: int) -> str:
        with self._clock_stopped():
            line = self._terminal.read(rank)
        self._stepping_since = self._clock()
        return line

    def _has_abandoned_rank(self) -> bool:
        stacks = self._sessions.stacks()
        abandoned = describe_abandoned(wait_graph_of(stacks, self._state.finished)) if stacks is not None else ""
        self._notes += [abandoned] if abandoned else []
        return bool(abandoned)

    def _handle(self, event: Any) -> None:
        now = self._now()
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
                self._state.handle_disconnect(rank, now, why_session_ended(event))

    # ---- the result

    def _build_result(self, began: float, timeout: float | None) -> RunResult:
        state = self._state
        died = self._call.explain_death() if self._call.disconnected else None
        divergence = self._find_divergence()
        cut_off = state.running if died is None else ()
        notes = [*self._notes, *(self._sessions.gang.stacks().splitlines() if cut_off and timeout is not None else [])]
        stacks = self._sessions.stacks() if cut_off else None
        ranks = {rank: self._rank_result(rank, died, stacks) for rank in state.ranks}
        if died is not None:
            notes += str(died).replace(divergence, "").splitlines()  # which --lockstep fail tells again
        elif not divergence:  # which is what the launcher has printed
            notes += self._launcher_output.splitlines()
        if cut_off:
            after = ""
            if state.first_failure_at is not None:
                after = f" {format_seconds(self._now() - state.first_failure_at)} after the first failure"
            notes.append(f"{format_ranks(cut_off)} ended{after}; the next test gets a new gang")
        left = self._call.disconnected or any(rank.disconnected_at is not None for rank in state.ranks.values())
        in_step = state.in_step and not state.may_be_out_of_step and not divergence
        reusable = in_step and not (left or state.running)
        span = (began, time.time())
        return RunResult(ranks, self._sessions.hosts, span, timeout, reusable, divergence, tuple(notes))

    def _find_divergence(self) -> str:
        """Return how the ranks fell out of step, as far as it is known; empty if they did not."""
        suspected = self._state.may_be_out_of_step
        may_be_told = suspected or self._launcher_output or self._call.disconnected
        found = self._sessions.new_divergences() if may_be_told else []
        if not suspected or found:
            return "\n".join(found)
        stacks = self._sessions.stacks()  # for which the launcher compares the ranks' flight recorders
        until = time.monotonic() + _DIVERGENCE_REPORT_TIMEOUT_S
        while not found and (event := self._call.receive(until - time.monotonic())) is not None:
            self._handle(event)
            found = self._sessions.new_divergences()
        lags = find_lags(stacks.flights) if stacks is not None else ()
        return "\n".join(found or (format_lag(lag, self._sessions.hosts) for lag in lags[:1]))

    def _rank_result(self, rank: int, died: WorkerDied | None, stacks: JobStacks | None) -> RankResult:
        progress = self._state.ranks[rank]
        failed_at = progress.first_failure_at
        if progress.calls is not None:
            return RankResult(progress.reports, failed_at=failed_at)
        if progress.session_error:
            cut_off, detail = PhaseState.DIED, progress.session_error
        elif died is not None and rank in died.ranks:
            cut_off, detail = PhaseState.DIED, format_status(-died.signal if died.signal else died.status)
        elif died is not None:
            cut_off, detail = PhaseState.STOPPED, "with the others"
        else:
            cut_off, detail = _position(rank, stacks)
        graph = wait_graph_of(stacks) if stacks is not None else WaitGraph({})
        waits_for = graph.awaited_by(rank) if cut_off is PhaseState.STUCK else ()
        captured = self._sessions.read_captured(rank)
        return RankResult(progress.reports, cut_off, detail, failed_at, captured, waits_for)


def describe_abandoned(graph: WaitGraph) -> str:
    """A sentence about ranks that wait forever in a call with a rank that finished without it; "" if none do."""
    for waiting, call, never in graph.abandoned():
        where = (
            f"cross-process call #{call.number} of ranks {call.group}" if isinstance(call, GroupCall) else call.function
        )
        who = f"{format_ranks(waiting)} {agree('is', len(waiting))}"
        return f"{who} in {where}, and {format_ranks(never)} finished the test without it"
    return ""


def _position(rank: int, stacks: JobStacks | None) -> tuple[PhaseState, str]:
    """Whether a rank waits or computes, and where it is, as far as it is known."""
    waits, dump = stacks is None or stacks.waits.get(rank), stacks.dumps.get(rank, "") if stacks else ""
    return PhaseState.STUCK if waits else PhaseState.BUSY, find_place(main_stack(dump)).format()
