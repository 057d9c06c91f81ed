"""One test on a session: what the ranks do is told to its course, and what that orders is done."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from jaxrun.diagnosis.stacks import main_stack
from jaxrun.gang.call import Disconnected, LauncherOutput, Printed, RankMessage, Returned
from jaxrun.gang.exceptions import WorkerDied
from jaxrun.lockstep import compare, report
from jaxrun.lockstep.flight import Flight
from jaxrun.protocol.pytest_messages import DebuggerInput, RecordedWarning, RunTest
from jaxrun.pytest_plugin.actions import (
    Action,
    ReadDebuggerLine,
    RecordWarning,
    SendToRanks,
    ShowDebuggerText,
    TriggerFault,
)
from jaxrun.pytest_plugin.debugger import DebuggerTerminal
from jaxrun.pytest_plugin.rank_results import PhaseState, RankResult
from jaxrun.pytest_plugin.run_state import RunState
from jaxrun.pytest_plugin.session import GangSession, session_error
from jaxrun.pytest_plugin.timeouts import Expiry, Timeouts
from jaxrun.text import format_ranks, format_seconds, format_signal
from jaxrun.verdict.snapshot import Snapshot

_DIVERGENCE_REPORT_TIMEOUT_S = 1.0  # seconds that the launcher has to say how the ranks came apart


@dataclass(frozen=True, slots=True)
class RunResult:
    """How a test went.

    limit:  the time limit that it reached; None if it reached none
    whole:  whether the session can run another test
    notes:  what else there is to say of it
    apart:  how the ranks fell out of step, in several lines; empty if they did not
    """

    results: dict[int, RankResult]
    timeout: float | None = None
    reusable: bool = True
    notes: list[str] = field(default_factory=list)
    divergence: str = ""


class RunLoop:
    """`record` is told of the ranks' warnings; for `debug` see Course."""

    def __init__(
        self,
        session: GangSession,
        terminal: DebuggerTerminal,
        record: Callable[[RecordedWarning], None],
        debug: int | None = None,
    ) -> None:
        self._session = session
        self._call = session.call
        self._terminal = terminal
        self._record = record
        self._state = RunState(len(session.gang.workers), debug)
        self._closed: dict[int, str] = {}  # by rank, why its session has ended
        self._notes: list[str] = []
        self._launcher_output = ""  # the launcher's

    def run(self, order: RunTest, timeout: float, grace: float) -> RunResult:
        """Run one test to its end, or until it is clear that it will have none."""
        self._call.send(order)
        began = time.monotonic()
        patience = Timeouts(began, timeout, grace)
        why = None
        while why is None and not self._state.done:
            why = self._step(patience)
        self._terminal.release()
        return self._build_result(began, timeout if why is Expiry.TIMEOUT else None)

    def _step(self, patience: Timeouts) -> Expiry | None:
        """Wait for an event; why there is no point in waiting for another, if so."""
        began = time.monotonic()
        debugging = self._state.debugged_rank is not None
        at, why = patience.next_expiry(self._state)
        event = self._call.receive(None if debugging else max(0.0, at - began))
        now = time.monotonic()
        if debugging:
            patience.exclude_pause(began, now)
        elif event is None and now >= at:
            if why is not Expiry.CHECK or self._has_abandoned_rank():
                return why
            patience.record_check(now)
        self._handle(event, now)
        return None

    def _has_abandoned_rank(self) -> bool:
        _, look = self._session.take_snapshot()
        deserted = self._state.find_abandoned_rank(_recorders(look))
        self._notes += [deserted] if deserted else []
        return bool(deserted)

    def _handle(self, event: Any, now: float) -> None:
        match event:
            case RankMessage(rank, message):
                self._execute(self._state.handle_message(rank, message, now))
            case Printed():
                self._session.gang.show_printed(event)
            case LauncherOutput(words):
                self._launcher_output += words
            case Disconnected(rank):
                self._execute(self._state.handle_disconnect(rank, now))
            case Returned(rank):
                self._closed[rank] = session_error(event) or "its pytest session has ended"
                self._execute(self._state.handle_disconnect(rank, now))

    def _execute(self, orders: Iterable[Action]) -> None:
        for order in orders:
            match order:
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

    # ---- the end

    def _build_result(self, began: float, limit: float | None) -> RunResult:
        course, notes = self._state, self._notes
        apart = self._find_divergence()
        died = self._call.explain_death()
        words, look = self._session.take_snapshot() if course.running and died is None else ("", None)
        parts = {rank: self._rank_result(rank, began, died, look) for rank in course.ranks}
        notes += [words] if limit is not None and words else []
        notes += (self._launcher_output.replace(f"jaxrun: {apart}\n", "") if died is None else str(died)).splitlines()
        if course.running and died is None:
            after = (
                f" {format_seconds(time.monotonic() - course.first_failure_at)} after the first failure"
                if course.first_failure_at
                else ""
            )
            notes.append(f"{format_ranks(course.running)} ended{after}; the next test gets a new gang")
        whole = (
            course.done
            and not (self._call.disconnected or self._closed or apart or course.may_be_out_of_step)
            and course.in_step
        )
        return RunResult(parts, limit, whole, notes, apart)

    def _find_divergence(self) -> str:
        """How the ranks fell out of step, as far as that is known; where it only seems so, the launcher is asked."""
        if not self._state.may_be_out_of_step or report.find_report(self._launcher_output):
            return report.find_report(self._launcher_output)
        _, look = self._session.take_snapshot()  # in which the launcher compares what the ranks have done
        until = time.monotonic() + _DIVERGENCE_REPORT_TIMEOUT_S
        while (
            not report.find_report(self._launcher_output)
            and (event := self._call.receive(until - time.monotonic())) is not None
        ):
            self._handle(event, time.monotonic())
        lag = next(iter(compare.find_lags(_recorders(look))), None)
        return report.find_report(self._launcher_output) or (
            report.format_lag(lag, self._session.hosts) if lag is not None else ""
        )

    def _rank_result(self, rank: int, began: float, died: WorkerDied | None, look: Snapshot | None) -> RankResult:
        progress = self._state.ranks[rank]
        times = [time - began for time in (progress.failed_at, progress.disconnected_at) if time is not None]
        part = RankResult(progress.reports, failed_at=min(times, default=None))
        if progress.calls is not None:
            return part
        end, what = self._cut_off(rank, died, look)
        return RankResult(progress.reports, end, what, part.failed_at, self._session.read_captured(rank))

    def _cut_off(self, rank: int, died: WorkerDied | None, look: Snapshot | None) -> tuple[PhaseState, str]:
        if rank in self._closed:
            return PhaseState.DIED, self._closed[rank]
        if died is not None:
            return (
                (PhaseState.DIED, _describe_death(died))
                if rank in died.ranks
                else (PhaseState.STOPPED, "with the others")
            )
        dump = look.dumps.get(rank, "") if look is not None else ""
        asleep = look is None or bool(look.waits.get(rank))
        return PhaseState.STUCK if asleep else PhaseState.BUSY, main_stack(dump).place()


def _recorders(look: Snapshot | None) -> dict[int, Flight]:
    return {rank: Flight.from_json(text) for rank, text in look.flights.items()} if look is not None else {}


def _describe_death(died: WorkerDied) -> str:
    return f"of {format_signal(died.signal)}" if died.signal is not None else f"with exit status {died.status}"
