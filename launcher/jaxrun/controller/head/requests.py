"""Answers what other processes ask of a running job (protocol/requests.py): stacks, overviews, profiles."""

from __future__ import annotations

from functools import partial

from jaxrun.analysis.diagnosis.snapshot import Overview, find_end
from jaxrun.analysis.lockstep.profile_plan import steps_in
from jaxrun.controller.head.divergence_detector import DivergenceDetector
from jaxrun.controller.head.head_state import HeadState, JobPhase
from jaxrun.controller.head.profiles import Profiles
from jaxrun.controller.head.queries import RankQueries, Replies, flights_of
from jaxrun.controller.head.snapshots import Snapshots
from jaxrun.controller.head.straggler_detector import StragglerDetector
from jaxrun.protocol.requests import Answer, AnswerState, OverviewRequest, ProfileRequest, StacksRequest
from jaxrun.protocol.snapshot_messages import RankDetail, RankVitals
from jaxrun.records.event_log.actions import Action, AnswerRequest
from jaxrun.records.event_log.events import Requested

_PHASES = {JobPhase.STARTING: "starting", JobPhase.RUNNING: "running"}


class Requests:
    """Times are seconds since the epoch."""

    def __init__(
        self,
        state: HeadState,
        queries: RankQueries,
        snapshots: Snapshots,
        divergence: DivergenceDetector,
        stragglers: StragglerDetector,
        profiles: Profiles,
    ) -> None:
        self._state = state
        self._queries = queries
        self._snapshots = snapshots
        self._divergence = divergence
        self._stragglers = stragglers
        self._profiles = profiles

    def handle(self, event: Requested, now: float) -> list[Action]:
        number, workers = event.number, self._state.workers
        if self._state.phase is JobPhase.CONCLUDING:
            return [AnswerRequest(number, Answer(AnswerState.REFUSED, "the job is ending"))]
        match event.request:
            case ProfileRequest():
                return self._profiles.handle_request(number, event.request, now)
            case OverviewRequest():
                return self._queries.ask(workers.live, RankDetail.VITALS, partial(self._answer_overview, number), now)
            case StacksRequest(native=native):
                then = partial(self._answer_stacks, number, native)
                return self._snapshots.ask(workers.working, then, now, native=native)

    def _answer_stacks(self, number: str, native: bool, replies: Replies, now: float) -> list[Action]:
        """Answer, and make use of the calls that came with the stacks."""
        actions = [*self._divergence.compare(replies, now), *self._stragglers.add(replies, now)]
        snapshot = self._snapshots.snapshot(replies, now, native=native)
        return [AnswerRequest(number, Answer(AnswerState.DONE, content=snapshot)), *actions]

    def _answer_overview(self, number: str, replies: Replies, now: float) -> list[Action]:
        workers = self._state.workers
        ends = ((rank, find_end(workers.outcome(rank, now))) for rank in workers.not_working)
        overview = Overview(
            time=now,
            phase=_PHASES.get(self._state.phase, "ending"),
            hosts=workers.hosts,
            live=workers.live,
            flights=flights_of(replies),
            vitals={
                rank: RankVitals(
                    reply.time,
                    reply.cpu_seconds,
                    reply.memory_bytes,
                    reply.kernel_wait,
                    reply.gpu_percent,
                    reply.gpu_bytes,
                )
                for rank, reply in replies.items()
                if reply.number
            },
            ends={rank: end for rank, end in ends if end is not None},
            calls_per_step=steps_in(self._divergence.flights),
            straggler=self._stragglers.straggler,
        )
        return [AnswerRequest(number, Answer(AnswerState.DONE, content=overview))]
