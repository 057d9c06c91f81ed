"""Answers how far all ranks have come, and what they use, while somebody asks: `jaxrun top`."""

from __future__ import annotations

from jaxrun.analysis.diagnosis.overview import Overview, describe_end
from jaxrun.analysis.lockstep.profile_plan import steps_in
from jaxrun.controller.head.attempt import Attempt, JobPhase
from jaxrun.controller.head.divergence_detector import DivergenceDetector
from jaxrun.controller.head.straggler_detector import StragglerDetector
from jaxrun.protocol.requests import Answer, AnswerState
from jaxrun.protocol.snapshot_messages import SnapshotPurpose, SnapshotReply
from jaxrun.records.event_log.actions import AnswerRequests, TakeSnapshot

_PHASES = {JobPhase.STARTING: "starting", JobPhase.RUNNING: "running"}


class Overviews:
    """Times are seconds since the epoch."""

    def __init__(self, attempt: Attempt, divergence: DivergenceDetector, stragglers: StragglerDetector) -> None:
        self._attempt = attempt
        self._divergence = divergence
        self._stragglers = stragglers
        self._asked: list[str] = []  # the requests that wait

    def handle_request(self, number: str) -> TakeSnapshot:
        self._asked.append(number)
        return TakeSnapshot(self._attempt.workers.live, SnapshotPurpose.OVERVIEW)

    def handle(self, reply: SnapshotReply, now: float) -> AnswerRequests:
        """All hosts have answered, or those that do."""
        attempt, workers = self._attempt, self._attempt.workers
        ends = ((rank, describe_end(workers.outcome(rank, now))) for rank in workers.not_working)
        overview = Overview(
            time=now,
            phase=_PHASES.get(attempt.phase, "ending"),
            hosts=workers.hosts,
            live=workers.live,
            flights=reply.flights,
            vitals=reply.vitals,
            ends={rank: text for rank, text in ends if text},
            calls_per_step=steps_in(self._divergence.flights),
            straggler=self._stragglers.straggler,
        )
        numbers, self._asked = tuple(self._asked), []
        return AnswerRequests(numbers, Answer(AnswerState.DONE, content=overview))
