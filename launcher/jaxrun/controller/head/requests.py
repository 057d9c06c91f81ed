"""Answers requests of other processes to a running job (protocol/job_messages.py): stacks, overviews, profiles.

Whatever handling a request raises, then or when ranks have replied, is its last answer: it never ends the job.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace

from jaxrun.analysis.diagnosis.overview import Overview, find_end
from jaxrun.analysis.lockstep.profile_plan import ProfiledCalls, plan_profile, steps_in
from jaxrun.controller.head.divergence_detector import DivergenceDetector
from jaxrun.controller.head.editor_debuggers import EditorDebuggers
from jaxrun.controller.head.head_state import HeadState, JobPhase
from jaxrun.controller.head.host_wait import HostWait
from jaxrun.controller.head.queries import Continuation, RankQueries, Replies, flights_of
from jaxrun.controller.head.round import Round
from jaxrun.controller.head.straggler_detector import StragglerDetector
from jaxrun.job_events.actions import Action, AnswerRequest, Send
from jaxrun.job_events.events import Requested, RequestEnded, RequestInput
from jaxrun.protocol.flight import Flight
from jaxrun.protocol.flight_file import LOCKSTEP_OFF
from jaxrun.protocol.job_messages import (
    Answer,
    AnswerState,
    DebugRequest,
    GoRequest,
    OverviewRequest,
    ProfileRequest,
    StacksRequest,
)
from jaxrun.protocol.nccl_report import NcclReport
from jaxrun.protocol.query_messages import RankDetail
from jaxrun.protocol.worker_messages import ProfileCalls, ProfileEnded
from jaxrun.text import format_ranks, format_ranks_on_hosts, format_seconds, plural

RequestEvent = Requested | RequestInput | RequestEnded | ProfileEnded
T = TypeVar("T")
_PHASES = {JobPhase.STARTING: "starting", JobPhase.RUNNING: "running"}


class Requests:
    def __init__(
        self,
        state: HeadState,
        queries: RankQueries,
        divergence: DivergenceDetector,
        stragglers: StragglerDetector,
        host_wait: HostWait,
        editors: EditorDebuggers,
    ) -> None:
        self._state = state
        self._queries = queries
        self._divergence = divergence
        self._stragglers = stragglers
        self._host_wait = host_wait
        self._editors = editors
        self._profiles = Profiles(state, queries)

    def remove_rank(self, rank: int, now: float) -> list[Action]:
        return self._profiles.remove_rank(rank, now)

    def handle(self, event: RequestEvent, now: float) -> list[Action]:
        match event:
            case ProfileEnded():
                return self._profiles.handle_ended(event, now)
            case RequestInput():
                return self._contain(event.number, self._editors.handle_input, event, now)
            case RequestEnded():
                return self._contain(event.number, self._editors.handle_end, event, now)
            case Requested():
                return self._contain(event.number, self._handle_request, event, now)

    def _contain(self, number: str, handle: Callable[[T, float], list[Action]], subject: T, now: float) -> list[Action]:
        """Return the actions of `handle`; if it fails, give up the request `number`, and answer it with the error."""
        try:
            return handle(subject, now)
        except Exception as error:
            self._profiles.forget(number)
            return [*self._editors.forget(number, now), _refuse(number, _describe_fault(error))]

    def _handle_request(self, event: Requested, now: float) -> list[Action]:
        number, workers = event.number, self._state.workers
        if self._state.phase is JobPhase.CONCLUDING:
            return [AnswerRequest(number, Answer(AnswerState.REFUSED, "the job is ending"))]
        match event.request:
            case ProfileRequest():
                order = partial(self._contain, number, self._profiles.order)
                return self._profiles.handle_request(number, event.request, order, now)
            case DebugRequest():
                return self._editors.handle_request(number, event.request, now)
            case GoRequest():
                return self._editors.handle_go(number, now)
            case OverviewRequest():
                then = partial(self._contain, number, partial(self._answer_overview, number))
                return self._queries.ask(workers.live, RankDetail.VITALS, then, now)
            case StacksRequest(native=native):
                then = partial(self._contain, number, partial(self._answer_stacks, number, native))
                return self._queries.ask_stacks(workers.working, then, now, native=native)

    def _answer_stacks(self, number: str, native: bool, replies: Replies, now: float) -> list[Action]:
        """Answer, and make use of the calls that came with the stacks."""
        actions = [*self._divergence.compare(now), *self._stragglers.add(replies, now)]

        def answer(nccl: NcclReport | None, now: float) -> list[Action]:
            stacks = self._queries.stacks(replies, now, native=native, nccl=nccl)
            return [AnswerRequest(number, Answer(AnswerState.DONE, content=stacks))]

        return [*self._queries.ask_nccl(replies, partial(self._contain, number, answer), now), *actions]

    def _answer_overview(self, number: str, replies: Replies, now: float) -> list[Action]:
        workers = self._state.workers
        ends = ((rank, find_end(workers.outcome(rank, now))) for rank in workers.not_working)
        overview = Overview(
            time=now,
            phase=_PHASES.get(self._state.phase, "ending"),
            hosts=workers.hosts,
            live=workers.live,
            flights={rank: flight for rank, flight in flights_of(replies).items() if rank not in workers.returning},
            vitals={rank: replace(reply, flight=Flight()) for rank, reply in replies.items() if reply.number},
            ends={rank: end for rank, end in ends if end is not None},
            calls_per_step=steps_in(self._state.flights),
            straggler=self._queries.straggler(replies),
            stall=self._describe_stall(replies, now),
            awaited=self._host_wait.describe(now),
            debugged=tuple(sorted(self._state.debugged)),
            returning=tuple(rank for rank in workers.returning if rank in workers.live),
        )
        return [AnswerRequest(number, Answer(AnswerState.DONE, content=overview))]

    def _describe_stall(self, replies: Replies, now: float) -> str:
        """Write what the last notice of a stall has told, unless a rank has come to a call since; else empty."""
        stall = self._state.stall
        if stall is None:
            return ""
        ages = [reply.time - came_at for reply in replies.values() if (came_at := reply.flight.came_at)]
        if ages and min(ages) < now - stall.told_at:
            return ""
        return f"no progress for {format_seconds(now - stall.progress_at)}: {stall.finding}"


_TOO_EARLY = "not all ranks have made a cross-process call yet"
_OFF = "the job runs with --lockstep off, so its ranks' calls are unknown: start it without that option"


class _Profile(Struct):
    """The profile that is being taken, by all ranks that work."""

    number: str
    request: ProfileRequest
    round: Round[int, ProfileEnded]
    calls: tuple[ProfiledCalls, ...] = ()


class Profiles:
    """Makes all ranks profile the same calls: asks for their calls, orders the profile, and collects the answers."""

    def __init__(self, state: HeadState, queries: RankQueries) -> None:
        self._state = state
        self._queries = queries
        self._current: _Profile | None = None

    def handle_request(self, number: str, request: ProfileRequest, order: Continuation, now: float) -> list[Action]:
        """Ask all ranks for their calls; `order` is called with their replies, and continues with `order` below."""
        if self._state.lockstep == LOCKSTEP_OFF:
            return [_refuse(number, _OFF)]
        if self._current is not None:
            return [_refuse(number, "a profile of this job is already being taken; wait until it is written")]
        if self._state.phase is not JobPhase.RUNNING:
            starting = self._state.phase is JobPhase.STARTING
            return [_refuse(number, _TOO_EARLY, again=True) if starting else _refuse(number, "the job is ending")]
        ranks = tuple(self._state.workers.working)
        self._current = _Profile(number, request, Round(ranks, self._conclude))
        return self._queries.ask(ranks, RankDetail.CALLS, order, now)

    def forget(self, number: str) -> None:
        """Give up the profile of this request, if it is the current one."""
        if self._current is not None and self._current.number == number:
            self._current = None

    def order(self, replies: Replies, now: float) -> list[Action]:
        """Order the profile, now that the recorders have been read."""
        profile = self._current
        if profile is None or profile.calls:
            return []
        ranks, flights = tuple(sorted(profile.round.missing)), flights_of(replies)
        incomplete = [rank for rank in ranks if rank not in flights or not flights[rank].complete]
        calls = plan_profile(flights, ranks, profile.request.steps, profile.request.lead_s)
        if incomplete or not calls:
            self._current = None
            text = f"not every call of {format_ranks(incomplete)} is recorded" if incomplete else _TOO_EARLY
            return [_refuse(profile.number, text, again=not incomplete)]
        profile.calls = calls
        request = profile.request
        orders: list[Action] = [
            Send(part.ranks, ProfileCalls(part.group, part.first, part.last, request.directory, request.session))
            for part in calls
        ]
        return [*orders, AnswerRequest(profile.number, Answer(AnswerState.PROGRESS, _describe(calls)))]

    def handle_ended(self, event: ProfileEnded, now: float) -> list[Action]:
        profile = self._current
        if profile is None or event.session != profile.request.session:
            return []
        return profile.round.end(now) if profile.round.add(event.rank, event) else []

    def remove_rank(self, rank: int, now: float) -> list[Action]:
        profile = self._current
        return profile.round.end(now) if profile is not None and profile.round.remove(rank) else []

    def _conclude(self, answers: Mapping[int, ProfileEnded], now: float) -> list[Action]:
        profile, self._current = self._current, None
        return [AnswerRequest(profile.number, self._answer(profile, answers))] if profile is not None else []

    def _answer(self, profile: _Profile, answers: Mapping[int, ProfileEnded]) -> Answer:
        ranks = [rank for part in profile.calls for rank in part.ranks] or profile.round.asked
        reasons: dict[str, list[int]] = {}
        for rank in ranks:
            ended = answers.get(rank)
            if ended is None or ended.error:
                reasons.setdefault(ended.error if ended else "it ended before", []).append(rank)
        files = [answer for answer in answers.values() if not answer.error]
        content = {"files": len(files), "bytes": sum(answer.bytes for answer in files)}
        if not reasons:
            return Answer(AnswerState.DONE, _describe_early_end(profile.calls, answers), content)
        hosts = self._state.workers.hosts
        text = "; ".join(f"{format_ranks_on_hosts(who, hosts)}: {reason}" for reason, who in reasons.items())
        late = any(answer.is_late for answer in answers.values())
        whose = f"{plural(len(files), 'rank')} of {len(ranks)} took their profile; " if files else ""
        return Answer(AnswerState.REFUSED, f"{whose}{text}", content | {"again": late})


def _refuse(number: str, text: str, *, again: bool = False) -> AnswerRequest:
    """Refuse a request. `again`: the same request may succeed in a moment."""
    return AnswerRequest(number, Answer(AnswerState.REFUSED, text, {"again": again}))


def _describe_fault(error: Exception) -> str:
    """Describe an error that only a fault in jaxrun can have caused."""
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    place = f"{at.tb_frame.f_code.co_filename.rpartition('/')[2]}:{at.tb_lineno}" if at is not None else "?"
    return f"jaxrun failed at this request: {type(error).__name__}: {error} ({place}); please report this"


def _describe_early_end(calls: Iterable[ProfiledCalls], answers: Mapping[int, ProfileEnded]) -> str:
    """Describe the last call, if the program ended before the profile did; else return an empty text."""
    for part in calls:
        last = min(answers[rank].last for rank in part.ranks)
        if last < part.last:
            return f"the program ended after call #{last}"
    return ""


def _describe(calls: tuple[ProfiledCalls, ...]) -> str:
    """Write `calls #121-125 of ranks 0-3`."""
    spans = (f"#{part.first}" if part.first == part.last else f"#{part.first}-{part.last}" for part in calls)
    return ", ".join(
        f"call{'s' * (part.last > part.first)} {span} of {format_ranks(part.ranks)}"
        for span, part in zip(spans, calls, strict=True)
    )
