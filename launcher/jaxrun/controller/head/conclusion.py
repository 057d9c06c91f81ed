"""Concludes a job whose workers have all ended: finds out how they diverged, and makes the outcome."""

from __future__ import annotations

import signal
from collections.abc import Sequence

from msgspec import Struct

from jaxrun.analysis.diagnosis.job_end import (
    Completed,
    Diverged,
    End,
    EndedBySignal,
    Grown,
    OutOfStep,
    Preempted,
    stacks_at,
)
from jaxrun.analysis.diagnosis.job_outcome import JobOutcome, WorkerOutcome
from jaxrun.controller.head.divergence_detector import DivergenceDetector
from jaxrun.controller.head.fault_injection import FaultInjector
from jaxrun.controller.head.head_state import HeadState, JobPhase
from jaxrun.controller.head.job_shutdown import JobShutdown
from jaxrun.controller.head.straggler_detector import StragglerDetector
from jaxrun.controller.head.time_accounting import TimeAccounting
from jaxrun.controller.head.timers import Timer
from jaxrun.job_events.actions import Action, Finish
from jaxrun.protocol.flight_file import LOCKSTEP_CHECK, LOCKSTEP_FAIL, LOCKSTEP_STRICT

CONCLUDE_TIMEOUT_S = 0.8  # for the flight recorders' answers about how the ranks diverged


class Conclusion(Struct):
    _state: HeadState
    _shutdown: JobShutdown
    _divergence: DivergenceDetector
    _stragglers: StragglerDetector
    _faults: FaultInjector
    _time: TimeAccounting

    def conclude_if_over(self, now: float) -> list[Action]:
        """Once all workers have ended, ask how they diverged; when that is known, finish."""
        state = self._state
        if state.phase is JobPhase.STARTING or self._state.workers.any_live:
            return []
        questions: list[Action] = []
        if state.phase is not JobPhase.CONCLUDING:
            state.enter(JobPhase.CONCLUDING)
            state.timers.set(Timer.CONCLUDE, now + CONCLUDE_TIMEOUT_S, self._divergence.give_up_waiting)
            questions = self._divergence.conclude(now, well=isinstance(state.end, Completed))
        if self._divergence.is_waiting:
            return questions
        state.enter(JobPhase.OVER)
        recorded = self._stragglers.conclude(now)
        workers = state.workers.outcomes(now)
        end = self._end_as_asked(workers)
        is_well, waits = isinstance(end, Completed), self._stragglers.new_waits
        recorded += self._time.conclude(waits, self._stragglers.clock_offset(now), now, well=is_well)
        remaining = self._faults.report_remaining() if is_well else []
        return [*recorded, *remaining, Finish(self._outcome(self._end_in_step(end), workers))]

    def _end_as_asked(self, workers: Sequence[WorkerOutcome]) -> End:
        """Return why the job ended, which for a success or a signal may be that it stopped as it was asked to."""
        end, stop = self._state.end, self._state.stop
        asked = stop.reason if stop.was_reached else ""
        there = [worker for worker in workers if worker.rank not in self._state.workers.lost]
        match end:
            case Completed() if stop.was_reached:
                return Grown(asked) if stop.grows else Preempted(asked)
            case EndedBySignal(signum=signal.SIGTERM) if all(map(self._gave_way, there)):
                return Preempted(asked, end)
            case EndedBySignal(signum=signal.SIGUSR2) if self._state.requeue and all(map(self._gave_way, there)):
                return Preempted(asked, end)
        return end

    def _end_in_step(self, end: End) -> End:
        """Return why the job ended, which for a success may be that its ranks were out of step."""
        lockstep, reports = self._state.lockstep, self._divergence.reports
        if lockstep == LOCKSTEP_FAIL and isinstance(end, Completed | Preempted | Grown) and reports.divergences:
            return Diverged()
        unseen = [found for found in reports.divergences if found not in reports.raised]
        if lockstep in (LOCKSTEP_CHECK, LOCKSTEP_STRICT) and isinstance(end, Completed) and unseen:
            return OutOfStep()
        return end

    def _outcome(self, end: End, workers: tuple[WorkerOutcome, ...]) -> JobOutcome:
        state, reports, stacks = self._state, self._divergence.reports, stacks_at(end)
        return JobOutcome(
            end,
            state.workers.hosts,
            workers,
            run_at=state.run_at,
            decided_at=state.decided_at,
            flights=stacks.flights if stacks is not None and stacks.flights else dict(state.flights),
            divergences=tuple(reports.divergences),
            shown_divergences=tuple(reports.shown),
            raised_divergences=tuple(reports.raised),
            straggler=state.straggler,
            unanswered=self._shutdown.unanswered,
            lost=state.workers.lost,
            returns=state.workers.returns,
            started_again=state.workers.started_again,
            drained=frozenset(state.drained),
            leaving=frozenset(state.leaving),
            stop_requested=state.stop_requested,
            saved_step=state.workers.saved_step,
            faults_left=self._faults.remaining,
            uses_mpi=state.workers.uses_mpi,
        )

    def _gave_way(self, worker: WorkerOutcome) -> bool:
        """Whether a worker that was told to end ended well; if the job is to continue, also if by a signal."""
        return worker.ended_well or (
            self._state.requeue and (worker.killed_by_launcher or worker.status == -signal.SIGTERM)
        )
