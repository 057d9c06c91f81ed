"""Checks a running job regularly: is its time over, does it stall, do ranks wait for finished ones or diverge?"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from jaxrun.analysis.diagnosis.job_outcome import EndReason, JobOutcome
from jaxrun.analysis.diagnosis.wait_graph import find_wait_graph
from jaxrun.controller.head.divergence_detector import DivergenceDetector
from jaxrun.controller.head.head_state import HeadState
from jaxrun.controller.head.job_shutdown import JobShutdown
from jaxrun.controller.head.queries import RankQueries, Replies, kernel_waits_of, stacks_of
from jaxrun.controller.head.stall_detector import EarlyExitDetector, StallCheck, StallDetector
from jaxrun.controller.head.straggler_detector import StragglerDetector
from jaxrun.controller.head.timers import Timer
from jaxrun.protocol.nccl_report import NcclReport
from jaxrun.protocol.snapshot_messages import RankDetail
from jaxrun.records.event_log.actions import Action, PrintSnapshot, PrintStallNotice


@dataclass(slots=True)
class HealthChecks:
    _state: HeadState
    _queries: RankQueries
    _divergence: DivergenceDetector
    _stragglers: StragglerDetector
    _shutdown: JobShutdown
    _early_exit: EarlyExitDetector | None = None
    _stall: StallDetector | None = None

    def start(self, now: float) -> None:
        limits, polls = self._state.limits, self._state.platform != "cpu"
        self._stall = StallDetector(now, limit=limits.stall, notice=limits.stall_notice, polls=polls)
        if self._stall.is_needed:
            self._state.timers.set(Timer.STALL_CHECK, now + self._stall.next_check_s, self._look_for_progress)
        self._schedule_divergence_check(now)

    def start_early_exit_checks(self, now: float) -> None:
        """Start checking for an early exit: a rank's program has ended while others work."""
        if self._early_exit is None:
            self._early_exit = EarlyExitDetector(now, has_calls=self._divergence.is_enabled)
            self._state.timers.set(Timer.EARLY_EXIT_CHECK, now + self._early_exit.next_check_s, self._look_for_waits)

    def discount(self, seconds: float) -> None:
        """Discount a time in which someone suspended the whole job."""
        for detector in (self._stall, self._early_exit):
            if detector is not None:
                detector.discount(seconds)

    # ---- time-outs: each check begins with a query

    def on_job_timeout(self, now: float) -> list[Action]:
        """End the job because the time of --timeout is over, after its ranks have reported where they are."""
        return self._queries.ask_stacks(self._state.workers.working, self._end_job, now)

    def _look_for_progress(self, now: float) -> list[Action]:
        assert self._stall is not None
        working = self._state.workers.working
        if self._stall.wants_stacks:
            return self._queries.ask_stacks(working, self._check_progress, now)
        return self._queries.ask(working, RankDetail.PROGRESS, self._check_progress, now)

    def _look_for_waits(self, now: float) -> list[Action]:
        return self._queries.ask_stacks(self._state.workers.working, self._check_early_exit, now)

    def _read_calls(self, now: float) -> list[Action]:
        calls = self._queries.ask(self._state.workers.live, RankDetail.CALLS, self._compare_calls, now)
        return [*self._stragglers.probe_clocks(now), *calls]

    # ---- the replies

    def _end_job(self, replies: Replies, now: float) -> list[Action]:
        return self._shutdown.abort(self._queries.outcome(EndReason.TIMEOUT, replies, now), now)

    def _check_progress(self, replies: Replies, now: float) -> list[Action]:
        if not self._state.is_healthy:
            return []
        assert self._stall is not None
        is_held = not self._state.debugged.isdisjoint(replies)
        check = self._stall.update(replies, now, self._queries.helpers(replies, now), is_held=is_held)
        if check.is_over:
            outcome = self._queries.outcome(EndReason.STALL, replies, now)
            self._shutdown.prepare_abort(outcome)
            return self._queries.ask_nccl(replies, partial(self._end_stalled, outcome), now, at_end=True)
        self._state.timers.set(Timer.STALL_CHECK, now + self._stall.next_check_s, self._look_for_progress)
        if check.is_half or check.is_told or check.is_in_doubt:
            return self._queries.ask_nccl(replies, partial(self._tell, check, replies), now)
        return []

    def _end_stalled(self, outcome: JobOutcome, nccl: NcclReport | None, now: float) -> list[Action]:
        if self._state.outcome is not outcome:  # something else has ended the job meanwhile
            return []
        self._state.decide(replace(outcome, nccl=nccl))
        return self._shutdown.kill_all(now)

    def _tell(self, check: StallCheck, replies: Replies, nccl: NcclReport | None, now: float) -> list[Action]:
        """Report who waits for whom; if that is in doubt, only if NCCL confirms it."""
        if not self._state.is_healthy or (check.is_in_doubt and not (nccl and nccl.differing)):
            return []
        assert self._stall is not None
        snapshot = self._queries.snapshot(replies, now, nccl=nccl)
        if not check.is_half:
            return [PrintStallNotice(snapshot, check.idle_s)]
        limit = f"the job is stopped after {self._stall.limit:g} s of it (--stall-timeout)"
        return [PrintSnapshot(snapshot, f"no progress for {check.idle_s:.0f} s; {limit} · ")]

    def _check_early_exit(self, replies: Replies, now: float) -> list[Action]:
        if not self._state.is_healthy:
            return []
        assert self._early_exit is not None
        finished = self._state.workers.live_reported
        graph = find_wait_graph(self._state.flights, stacks_of(replies), kernel_waits_of(replies), finished=finished)
        if self._early_exit.check(replies, graph, now):
            return self._shutdown.abort(self._queries.outcome(EndReason.EARLY_EXIT, replies, now), now)
        self._state.timers.set(Timer.EARLY_EXIT_CHECK, now + self._early_exit.next_check_s, self._look_for_waits)
        return []

    def _compare_calls(self, replies: Replies, now: float) -> list[Action]:
        actions = self._divergence.compare(replies, now)
        if self._state.is_healthy:
            self._schedule_divergence_check(now)
            actions += self._stragglers.add(replies, now)
        return actions

    def _schedule_divergence_check(self, now: float) -> None:
        pause = self._divergence.next_read_s()
        if pause is not None:
            self._state.timers.set(Timer.DIVERGENCE_CHECK, now + pause, self._read_calls)
