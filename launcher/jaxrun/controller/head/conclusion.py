"""Concludes a job whose workers have all ended: finds out how they diverged, and makes the outcome."""

from __future__ import annotations

import signal

from msgspec import Struct
from msgspec.structs import replace

from jaxrun.analysis.diagnosis.job_outcome import EndReason, JobOutcome, WorkerOutcome
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
_ENDED_WELL = (EndReason.OK, EndReason.PREEMPTED, EndReason.GROWN)


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
            questions = self._divergence.conclude(now, well=state.outcome.reason is EndReason.OK)
        if self._divergence.is_waiting:
            return questions
        state.enter(JobPhase.OVER)
        recorded = self._stragglers.conclude(now)
        outcome = self._final_outcome(now)
        is_well, waits = outcome.reason is EndReason.OK, self._stragglers.new_waits
        recorded += self._time.conclude(waits, self._stragglers.clock_offset(now), now, well=is_well)
        remaining = self._faults.report_remaining() if is_well else []
        return [*recorded, *remaining, Finish(replace(outcome, reason=self._final_reason(outcome)))]

    def _final_reason(self, outcome: JobOutcome) -> EndReason:
        """Return the reason why the job ended, which for a success may be that its ranks were out of step."""
        lockstep = self._state.lockstep
        if lockstep == LOCKSTEP_FAIL and outcome.reason in _ENDED_WELL and outcome.divergences:
            return EndReason.DIVERGED
        unseen = [found for found in outcome.divergences if found not in outcome.raised_divergences]
        if lockstep in (LOCKSTEP_CHECK, LOCKSTEP_STRICT) and outcome.reason is EndReason.OK and unseen:
            return EndReason.OUT_OF_STEP
        return outcome.reason

    def _final_outcome(self, now: float) -> JobOutcome:
        state = self._state
        outcome = replace(
            state.outcome,
            workers=self._state.workers.outcomes(now),
            run_at=state.run_at,
            divergences=tuple(self._divergence.reports.divergences),
            shown_divergences=tuple(self._divergence.reports.shown),
            raised_divergences=tuple(self._divergence.reports.raised),
            unanswered=self._shutdown.unanswered,
            lost=state.workers.lost,
            returns=state.workers.returns,
            started_again=state.workers.started_again,
            stop_requested=state.stop_requested,
            drained=frozenset(state.drained),
            faults_left=self._faults.remaining,
            saved_step=self._state.workers.saved_step,
            uses_mpi=self._state.workers.uses_mpi,
            flights=state.outcome.flights or dict(state.flights),
            straggler=state.straggler,
        )
        if outcome.reason is EndReason.OK and state.stop.was_reached:
            return replace(
                outcome, reason=EndReason.GROWN if state.stop.grows else EndReason.PREEMPTED, text=state.stop.reason
            )
        is_preempted = outcome.reason is EndReason.INTERRUPTED and all(map(self._gave_way, outcome.workers))
        told_by = (signal.SIGTERM, signal.SIGUSR2) if self._state.requeue else (signal.SIGTERM,)
        if not is_preempted or outcome.signum not in told_by:
            return outcome
        return replace(outcome, reason=EndReason.PREEMPTED, text=state.stop.reason if state.stop.was_reached else "")

    def _gave_way(self, worker: WorkerOutcome) -> bool:
        """Whether a worker that was told to end ended well; if the job is to continue, also if by a signal."""
        return worker.ended_well or (
            self._state.requeue and (worker.killed_by_launcher or worker.status == -signal.SIGTERM)
        )
