"""Checks a running job regularly: is its time over, does it stall, do ranks wait for finished ones or diverge?"""

from __future__ import annotations

from functools import partial

from msgspec import Struct

from jaxrun.analysis.diagnosis.job_end import EarlyExit, TimedOut
from jaxrun.analysis.diagnosis.wait_graph import find_wait_graph
from jaxrun.controller.head.core_shortage import CoreShortage
from jaxrun.controller.head.divergence_detector import DivergenceDetector
from jaxrun.controller.head.head_state import HeadState
from jaxrun.controller.head.job_shutdown import JobShutdown
from jaxrun.controller.head.queries import RankQueries, Replies, dumps_of, kernel_waits_of
from jaxrun.controller.head.stall_checks import StallChecks, have_explained
from jaxrun.controller.head.stall_detector import EarlyExitDetector, StallDetector
from jaxrun.controller.head.straggler_detector import StragglerDetector
from jaxrun.controller.head.time_accounting import TimeAccounting
from jaxrun.controller.head.timers import Timer
from jaxrun.job_events.actions import Action
from jaxrun.protocol.query_messages import RankDetail


class HealthChecks(Struct):
    """The checks of one attempt; those for stalls exist once its program runs, those for early exits after the first.

    _stall, _early_exit:  None until then
    """

    _state: HeadState
    _queries: RankQueries
    _divergence: DivergenceDetector
    _stragglers: StragglerDetector
    _shutdown: JobShutdown
    _time: TimeAccounting
    _cores: CoreShortage
    _early_exit: EarlyExitDetector | None = None
    _stall: StallChecks | None = None

    def start(self, now: float) -> None:
        """The program runs from now on."""
        limits, polls = self._state.limits, self._state.platform != "cpu"
        detector = StallDetector(now, limit=limits.stall, notice=limits.stall_notice, polls=polls)
        self._stall = StallChecks(self._state, self._queries, self._shutdown, self._time, detector)
        self._stall.start_if_needed(now)
        self._schedule_divergence_check(now)

    def start_early_exit_checks(self, now: float) -> None:
        """Start checking for an early exit: a rank's program has ended while others work."""
        if self._early_exit is None:
            self._early_exit = detector = EarlyExitDetector(now, has_calls=self._divergence.is_enabled)
            self._look_for_waits_later(detector, now)

    def discount(self, seconds: float) -> None:
        """Discount a time in which someone suspended the whole job."""
        self._time.suspend(seconds)
        for checks in (self._stall, self._early_exit):
            if checks is not None:
                checks.discount(seconds)

    # ---- time-outs: each check begins with a query

    def on_job_timeout(self, now: float) -> list[Action]:
        """End the job because the time of --timeout is over, after its ranks have reported where they are."""
        return self._queries.ask_stacks(self._state.workers.working, self._end_job, now)

    def _look_for_waits_later(self, detector: EarlyExitDetector, now: float) -> None:
        look = partial(self._look_for_waits, detector)
        self._state.timers.set(Timer.EARLY_EXIT_CHECK, now + detector.next_check_s, look)

    def _look_for_waits(self, detector: EarlyExitDetector, now: float) -> list[Action]:
        return self._queries.ask_stacks(self._state.workers.working, partial(self._check_early_exit, detector), now)

    def _read_calls(self, now: float) -> list[Action]:
        calls = self._queries.ask(self._state.workers.live, RankDetail.CALLS, self._compare_calls, now)
        return [*self._stragglers.probe_clocks(now), *calls]

    # ---- the replies

    def _end_job(self, replies: Replies, now: float) -> list[Action]:
        stacks = self._queries.stacks(replies, now)
        return self._shutdown.abort(TimedOut(stacks, have_explained(self._state, stacks)), now)

    def _check_early_exit(self, detector: EarlyExitDetector, replies: Replies, now: float) -> list[Action]:
        if not self._state.is_healthy:
            return []
        finished = self._state.workers.live_reported
        graph = find_wait_graph(self._state.flights, dumps_of(replies), kernel_waits_of(replies), finished=finished)
        if detector.check(replies, graph, now):
            return self._shutdown.abort(EarlyExit(self._queries.stacks(replies, now)), now)
        self._look_for_waits_later(detector, now)
        return []

    def _compare_calls(self, replies: Replies, now: float) -> list[Action]:
        actions = self._divergence.compare(now)
        if self._state.is_healthy:
            self._schedule_divergence_check(now)
            actions += self._divergence.compare_entered(now)
            if self._stall is not None:
                self._stall.learn_limit(replies, now)
            actions += self._stragglers.add(replies, now)
            actions += self._cores.check(self._stragglers.core_waits(), now)
            waits, offset_s = self._stragglers.new_waits, self._stragglers.clock_offset(now)
            actions += self._time.add(self._state.flights, waits, offset_s, now)
        return actions

    def _schedule_divergence_check(self, now: float) -> None:
        pause = self._divergence.next_read_s()
        if pause is not None:
            self._state.timers.set(Timer.DIVERGENCE_CHECK, now + pause, self._read_calls)
