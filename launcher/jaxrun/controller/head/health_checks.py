"""Checks a running job regularly: is its time over, does it stall, do ranks wait for finished ones or diverge?"""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial

from msgspec import Struct
from msgspec.structs import replace

from jaxrun.analysis.diagnosis.job_outcome import EndReason, JobOutcome
from jaxrun.analysis.diagnosis.snapshot import Snapshot
from jaxrun.analysis.diagnosis.wait_graph import find_wait_graph, wait_graph_of
from jaxrun.analysis.verdict.stack_text import describe_stall
from jaxrun.controller.head.core_shortage import CoreShortage
from jaxrun.controller.head.divergence_detector import DivergenceDetector
from jaxrun.controller.head.head_state import HeadState, ToldStall
from jaxrun.controller.head.job_shutdown import JobShutdown
from jaxrun.controller.head.queries import RankQueries, Replies, kernel_waits_of, stacks_of
from jaxrun.controller.head.stall_detector import EarlyExitDetector, StallCheck, StallDetector
from jaxrun.controller.head.straggler_detector import StragglerDetector
from jaxrun.controller.head.time_accounting import TimeAccounting
from jaxrun.controller.head.timers import Timer
from jaxrun.job_events.actions import Action, PrintStallNotice
from jaxrun.protocol.nccl_report import NcclReport
from jaxrun.protocol.snapshot_messages import RankDetail
from jaxrun.text import format_seconds

_MIN_LEARNED_CALLS = 20  # of each rank, before --stall-timeout auto knows what is usual


class HealthChecks(Struct):
    _state: HeadState
    _queries: RankQueries
    _divergence: DivergenceDetector
    _stragglers: StragglerDetector
    _shutdown: JobShutdown
    _time: TimeAccounting
    _cores: CoreShortage
    _early_exit: EarlyExitDetector | None = None
    _stall: StallDetector | None = None
    _is_checking_progress: bool = False

    def start(self, now: float) -> None:
        limits, polls = self._state.limits, self._state.platform != "cpu"
        self._stall = StallDetector(now, limit=limits.stall, notice=limits.stall_notice, polls=polls)
        if self._stall.is_needed:
            self._start_stall_checks(now)
        self._schedule_divergence_check(now)

    def _start_stall_checks(self, now: float) -> None:
        if self._stall is not None and not self._is_checking_progress:
            self._is_checking_progress = True
            self._state.timers.set(Timer.STALL_CHECK, now + self._stall.next_check_s, self._look_for_progress)

    def start_early_exit_checks(self, now: float) -> None:
        """Start checking for an early exit: a rank's program has ended while others work."""
        if self._early_exit is None:
            self._early_exit = EarlyExitDetector(now, has_calls=self._divergence.is_enabled)
            self._state.timers.set(Timer.EARLY_EXIT_CHECK, now + self._early_exit.next_check_s, self._look_for_waits)

    def discount(self, seconds: float) -> None:
        """Discount a time in which someone suspended the whole job."""
        self._time.suspend(seconds)
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
        outcome = self._queries.outcome(EndReason.TIMEOUT, replies, now)
        return self._shutdown.abort(replace(outcome, is_explained=self.have_explained(replies, now)), now)

    def _check_progress(self, replies: Replies, now: float) -> list[Action]:
        if not self._state.is_healthy:
            return []
        assert self._stall is not None
        stall = self._state.stall
        is_held = not self._state.debugged.isdisjoint(replies)
        check = self._stall.update(replies, now, self._queries.helpers(replies, now), is_held=is_held)
        if check.is_over or check.is_half or check.is_told:
            self._time.note_stall(check.idle_s)
        if stall is not None and now - check.idle_s > stall.told_at:  # there was progress
            self._state.stall = None
        if check.is_over:
            outcome = self._queries.outcome(EndReason.STALL, replies, now)
            if self._stall.longest_s is not None:
                idle, longest = format_seconds(check.idle_s), format_seconds(self._stall.longest_s)
                text = f"no rank has made a call for {idle}; the longest before was {longest}."
                outcome = replace(outcome, text=text)
            self._shutdown.prepare_abort(outcome)
            return self._queries.ask_nccl(replies, partial(self._end_stalled, outcome, replies), now, at_end=True)
        self._state.timers.set(Timer.STALL_CHECK, now + self._stall.next_check_s, self._look_for_progress)
        if check.is_half or check.is_told or check.is_in_doubt:
            return self._queries.ask_nccl(replies, partial(self._tell, check, replies), now)
        return []

    def _end_stalled(self, outcome: JobOutcome, replies: Replies, nccl: NcclReport | None, now: float) -> list[Action]:
        if self._state.outcome is not outcome:  # something else has ended the job meanwhile
            return []
        self._state.decide(replace(outcome, nccl=nccl, is_explained=self.have_explained(replies, now, nccl)))
        return self._shutdown.kill_all(now)

    def have_explained(self, replies: Replies, now: float, nccl: NcclReport | None = None) -> bool:
        """Whether the last notice has told who waits for whom, and it is still so."""
        told = self._state.stall
        return told is not None and told.who_waits == _who_waits(self._queries.snapshot(replies, now, nccl=nccl))

    def _tell(self, check: StallCheck, replies: Replies, nccl: NcclReport | None, now: float) -> list[Action]:
        """Report who waits for whom; if that is in doubt, only if NCCL confirms it."""
        if not self._state.is_healthy or (check.is_in_doubt and not (nccl and nccl.differing)):
            return []
        assert self._stall is not None
        snapshot, before = self._queries.snapshot(replies, now, nccl=nccl), self._state.stall
        who_waits = _who_waits(snapshot)
        self._state.stall = ToldStall(describe_stall(snapshot), who_waits, now - check.idle_s, now)
        limit_s = self._stall.limit if check.is_half else 0.0
        is_as_before = before is not None and before.who_waits == who_waits
        return [PrintStallNotice(snapshot, check.idle_s, limit_s, is_as_before)]

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
            actions += self._divergence.compare_entered(now)
            self._learn_stall_limit(replies, now)
            actions += self._stragglers.add(replies, now)
            actions += self._cores.check(self._stragglers.core_waits(), now)
            waits, offset_s = self._stragglers.new_waits, self._stragglers.clock_offset(now)
            actions += self._time.add(self._state.flights, waits, offset_s, now)
        return actions

    def _learn_stall_limit(self, replies: Replies, now: float) -> None:
        """With --stall-timeout auto, adapt the limit once all ranks have made some calls."""
        least_s = self._state.limits.learns_stall
        if least_s is None or self._stall is None:
            return
        flights = [reply.flight for reply in replies.values() if reply.number]
        if flights and min(sum(flight.call_counts.values()) for flight in flights) >= _MIN_LEARNED_CALLS:
            self._stall.learn_limit(max(flight.totals.longest for flight in flights), least_s)
            self._start_stall_checks(now)

    def _schedule_divergence_check(self, now: float) -> None:
        pause = self._divergence.next_read_s()
        if pause is not None:
            self._state.timers.set(Timer.DIVERGENCE_CHECK, now + pause, self._read_calls)


def _who_waits(snapshot: Snapshot) -> Hashable:
    """Return what each rank does, and NCCL's finding, to compare them with another snapshot's."""
    states, nccl = wait_graph_of(snapshot).states, snapshot.nccl
    return (
        tuple((rank, state.activity, state.place, state.errors) for rank, state in sorted(states.items())),
        nccl.differing if nccl is not None else (),
    )
