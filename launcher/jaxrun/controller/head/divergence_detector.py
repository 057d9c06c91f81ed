"""Finds out whether the ranks of a job diverge: whether one makes another cross-process call than the others.

There are two sources. First, ranks send Calls before the first run of each program, and before it is compiled for that
run (in strict mode before every call); call_matcher.py compares them. Second, the head reads the flight recorders: now
and then, at the end, and while some ranks of a group compile and others do not. Calls of known programs are not sent,
and on several GPUs that compilation would never end. Differing chains of calls are only a reason to read whole
histories: divergence_reports.py reports only calls whose programs differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct, field
from msgspec.structs import replace

from jaxrun.analysis.lockstep import compare
from jaxrun.analysis.lockstep.compare import Candidate, Compilation, Lag
from jaxrun.analysis.lockstep.divergence import (
    Absence,
    CallGroup,
    Divergence,
    OtherCall,
    absent_groups,
    divergence_of_calls,
    largest_first,
)
from jaxrun.controller.head.call_matcher import CallMatcher, CallSlot, ReplicatedPrograms
from jaxrun.controller.head.divergence_reports import DivergenceReports
from jaxrun.controller.head.head_state import HeadState
from jaxrun.controller.head.queries import RankQueries, Replies, flights_of
from jaxrun.controller.head.standing_calls import StandingCalls
from jaxrun.controller.head.timers import Timer
from jaxrun.job_events.actions import Action
from jaxrun.protocol.flight import Flight, parse_group
from jaxrun.protocol.flight_file import LOCKSTEP_OFF
from jaxrun.protocol.query_messages import RankDetail
from jaxrun.protocol.worker_messages import Call
from jaxrun.text import group_alike

_FIRST_READ_S = 1.0  # after the program's start
_READ_INTERVAL_GROWTH = 1.5
_MAX_READ_INTERVAL_S = 30.0
_COMPILATION_CHECK_S = 0.7  # after a rank begins to compile for a call, and between checks while it does
_COMPILATION_CHECK_PER_RANK_S = 0.005  # so that checks of thousands of ranks cost the head little time


class _HistoryQuestion(Struct, frozen=True):
    """A candidate whose ranks were asked for their histories; `known` is reported if these show nothing.

    standing:  the sites of calls in which ranks stand, which their recorders do not show
    has_one_program:  sites count only if all their calls have had the same program
    """

    candidate: Candidate
    known: Divergence | None = None
    slot: CallSlot | None = None
    standing: Mapping[int, int] = field(default_factory=dict)
    has_one_program: bool = False


class DivergenceDetector:
    """Compares the ranks' calls. Times are seconds since the epoch.

    reports:  reports of the divergences that were found
    """

    def __init__(self, state: HeadState, queries: RankQueries, *, ends_apart: bool = False) -> None:
        """`ends_apart`: a rank may end well before the others, and they still make calls with it (--keep-survivors)."""
        self._ends_apart = ends_apart
        self._workers = state.workers
        hosts = self._workers.hosts
        self._queries = queries
        self._flights = state.flights
        self._read_interval_s = None if state.lockstep == LOCKSTEP_OFF else _FIRST_READ_S
        self._timers = state.timers
        self._matcher = CallMatcher(hosts, state.timers, self._handle_mismatch)
        self.reports = DivergenceReports(self._matcher, state.workers, state.timers)
        self._replicated = ReplicatedPrograms(hosts)
        self._all_ranks_wait = False
        self._standing = StandingCalls()
        self._announced_at = 0.0  # when a rank last sent that it compiles for a call
        self._questions: list[_HistoryQuestion] = []
        self._calls_made: list[Mapping[str, int]] = []  # by each rank, at the last regular reading

    @property
    def is_enabled(self) -> bool:
        return self._read_interval_s is not None

    @property
    def is_waiting(self) -> bool:
        """Whether answers are awaited without which the job must not be concluded."""
        return self.reports.are_asking or bool(self._questions)

    @property
    def _is_busy(self) -> bool:
        return self.reports.are_pending or bool(self._questions)

    def next_read_s(self) -> float | None:
        """Seconds until the flight recorders must be read again, more each time; None for never."""
        if self._read_interval_s is None or self.reports.are_enough:
            return None
        interval = self._read_interval_s
        self._read_interval_s = min(interval * _READ_INTERVAL_GROWTH, _MAX_READ_INTERVAL_S)
        return interval

    # ---- events

    def handle_call(self, call: Call, now: float) -> list[Action]:
        if call.number == 0:
            self._replicated.add(call)
            return []
        if self.reports.is_broken(call.group):
            return []
        actions = self._matcher.add(call, now)
        self._all_ranks_wait = len(self._matcher.waiting) >= self._workers.working_count
        if call.waits_for_answer and self._all_ranks_wait:
            self._matcher.mark_all_waiting(now)
        if not call.is_compiled and not call.waits_for_answer:
            self._announced_at = now
            if self._timers.at(Timer.COMPILATION_CHECK) is None:
                self._timers.set(Timer.COMPILATION_CHECK, now + _COMPILATION_CHECK_S, self._check_compilations)
        return actions

    def on_done(self, rank: int, now: float) -> None:
        if not self._ends_apart:
            self.remove_rank(rank, now)

    def remove_rank(self, rank: int, now: float) -> None:
        flight = self._flights.get(rank, Flight())
        self._matcher.remove_rank(rank, flight.call_counts if flight.complete else None, now)

    def restore_rank(self, rank: int) -> None:
        """Compare the calls of a rank that is back, from now on: live_devices has made all count alike."""
        self._matcher.restore_rank(rank)
        size = len(self._workers.hosts)
        self._questions = [
            replace(question, known=None) if rank in parse_group(question.candidate.group, size) else question
            for question in self._questions
        ]

    def compare(self, now: float) -> list[Action]:
        """Compare the flight recorders as they are known; if ranks of a group seem to diverge, ask for histories."""
        if self._is_busy or self.reports.are_enough:
            return []
        candidates = [one for one in compare.find_candidates(self._flights) if not self.reports.is_broken(one.group)]
        actions = self._ask([_HistoryQuestion(candidate) for candidate in candidates], now)
        for calls in self._replicated.pop_mismatches(is_last=self.reports.is_concluding):
            divergence = divergence_of_calls(calls)
            actions += self.reports.add(divergence, None, now) if divergence is not None else []
        return actions

    def compare_entered(self, now: float) -> list[Action]:
        """If no rank has made a call since the last regular reading, find out in which calls the ranks are.

        Where a program was run before, its call is not announced, and the recorder has it only once it is made.
        """
        made = [flight.call_counts for _, flight in sorted(self._flights.items())]
        stands_still, self._calls_made = made == self._calls_made, made
        if not stands_still or self.is_waiting or self.reports.are_enough or not self._find_entered():
            return []
        self._standing.clear()
        self._timers.set(Timer.ENTERED_CHECK, now + _COMPILATION_CHECK_S, self._look_at_entered)
        return self._look_at_entered(now)

    def _find_entered(self) -> tuple[Compilation, ...]:
        found = compare.find_entered(self._flights, len(self._workers.hosts))
        return tuple(call for call in found if not self.reports.has(call.group))

    def _look_at_entered(self, now: float) -> list[Action]:
        ranks = [rank for rank in self._standing.choose(self._find_entered()) if rank in self._workers.live]
        return self._queries.ask(ranks, RankDetail.STACKS, self._compare_entered, now) if ranks else []

    def _compare_entered(self, replies: Replies, now: float) -> list[Action]:
        self._standing.add(replies)
        questions = [self._question(call, has_one_program=True) for call in self._find_entered()]
        known = [question for question in questions if question and len(question.candidate.rank_sets) > 1]
        return self._ask(known, now)

    # ---- the end

    def conclude(self, now: float, *, well: bool) -> list[Action]:
        """Ask the last questions, after all ranks have ended. `well`: with status 0, so their calls should be equal."""
        self.reports.is_concluding = True
        self._timers.cancel(Timer.COMPILATION_CHECK)
        actions = [*self._timers.fire_early(Timer.MISMATCH, now), *self._timers.fire_early(Timer.CALL_ORDER, now)]
        if self._is_busy or not self.is_enabled:
            return actions
        actions += self.compare(now)
        is_unexplained = well and not self._ends_apart and not self._is_busy and not self.reports.divergences
        lags = compare.find_lags(self._flights) if is_unexplained else ()
        lag = next((lag for lag in lags if not self.reports.is_broken(lag.group)), None)
        return [*actions, *self.reports.add(self._divergence_of_lag(lag), None, now)] if lag is not None else actions

    def give_up_waiting(self, now: float) -> list[Action]:
        """Report what is known, because no more answers will come."""
        for question in self._questions:
            if question.known is not None:
                self.reports.add(question.known, question.slot, now)
        self._questions.clear()
        self.reports.report_all(now)
        return []

    # ---- while some ranks of a group compile, and others do not

    def _check_compilations(self, now: float) -> list[Action]:
        """Find out what the ranks do in groups in which some compile for a call."""
        slots = [slot for slot in self._matcher.find_compilations() if not self.reports.has(slot.key[0])]
        ranks = sorted(frozenset().union(*(slot.members for slot in slots)) & set(self._workers.working))
        if not ranks or self.reports.are_enough:
            self._standing.clear()
            return []
        interval = max(_COMPILATION_CHECK_S, _COMPILATION_CHECK_PER_RANK_S * len(ranks))
        self._timers.set(Timer.COMPILATION_CHECK, now + interval, self._check_compilations)
        return self._queries.ask(ranks, RankDetail.CALLS, self._compare_compilations, now)

    def _compare_compilations(self, replies: Replies, now: float) -> list[Action]:
        actions = self.compare(now)
        flights = flights_of(replies)
        is_over = not any(flight.compiled_for for flight in flights.values())  # some compilations have failed
        if is_over and now - self._announced_at >= _COMPILATION_CHECK_S:
            self._timers.cancel(Timer.COMPILATION_CHECK)
        compilations = compare.find_compilations(flights)
        ranks = self._standing.choose(compilations)
        if self._is_busy or not ranks:
            return actions
        return [*actions, *self._queries.ask(ranks, RankDetail.STACKS, self._compare_standing, now)]

    def _compare_standing(self, replies: Replies, now: float) -> list[Action]:
        """If a rank stands in a call for which another one compiles, ask for their histories."""
        self._standing.add(replies)
        compilations = compare.find_compilations(self._flights)
        questions = [self._question(compilation) for compilation in compilations]
        return self._ask([question for question in questions if question is not None], now)

    def _question(self, compilation: Compilation, *, has_one_program: bool = False) -> _HistoryQuestion | None:
        standing = self._standing.sites(compilation.before)
        sets = tuple(ranks for _, ranks in group_alike(standing))
        candidate = Candidate(compilation.group, compilation.number, (*compilation.compiling, *sets))
        return _HistoryQuestion(candidate, None, None, standing, has_one_program) if standing else None

    # ---- candidates and histories

    def _ask(self, questions: Sequence[_HistoryQuestion], now: float) -> list[Action]:
        """Ask for histories, one question after the other; later divergences of a group are not reported."""
        is_idle = not self._questions
        self._questions += [question for question in questions if not self.reports.has(question.candidate.group)]
        return self._ask_first(now) if is_idle else []

    def _ask_first(self, now: float) -> list[Action]:
        if not self._questions:
            return []
        ranks = self._questions[0].candidate.representatives
        return self._queries.ask(ranks, RankDetail.HISTORY, self._compare_histories, now)

    def _compare_histories(self, replies: Replies, now: float) -> list[Action]:
        if not self._questions:  # the questions were dropped
            return []
        question = self._questions.pop(0)
        flights = flights_of(replies)
        for rank in flights.keys() & question.standing.keys():
            site = question.standing[rank]
            if not question.has_one_program or compare.calls_one_program(flights[rank], site):
                flights[rank] = compare.enter_standing_call(flights[rank], question.candidate, site)
        found = compare.find_divergence(question.candidate, flights) or question.known
        actions = self.reports.add(found, question.slot, now) if found is not None else []
        return [*actions, *self._ask_first(now)]

    def _handle_mismatch(self, slot: CallSlot, now: float) -> list[Action]:
        absent = sorted(slot.members - slot.calls.keys())
        absences = {rank: absence for rank in absent if (absence := self._find_absence(rank, *slot.key))}
        divergence = divergence_of_calls(slot.calls, absences)
        if divergence is None:
            return []
        if slot.waiting:
            return self.reports.add(divergence, slot, now)
        # In record mode, ranks send only first calls, so they may have diverged earlier.
        rank_sets = tuple(group.ranks for group in divergence.call_groups)
        return self._ask([_HistoryQuestion(Candidate(*slot.key, rank_sets), divergence, slot)], now)

    def _find_absence(self, rank: int, group: str, number: int) -> Absence | None:
        """Return what a rank does instead of this call of a group; None if unknown, or if it has made the call."""
        if self._matcher.has_ended(rank):
            made = self._matcher.calls_made(rank, group)
            return Absence(made) if made is None or made < number else None
        call = self._matcher.waiting.get(rank) if self._all_ranks_wait else None
        return Absence(waits_in=OtherCall(call.number, call.group, call.name, call.source_line)) if call else None

    def _divergence_of_lag(self, lag: Lag) -> Divergence:
        """Return the divergence of ranks that have all ended well, although only some have made this call."""
        flight = self._flights[lag.ahead[0]]
        calls = (call for call in flight.calls_of(lag.group) if call.number == lag.number)
        program = next((call.program for call in calls), 0)
        ahead = CallGroup(lag.ahead, lag.name or "a call", place=lag.place, recorded_by=lag.ahead[0], program=program)
        behind = absent_groups({rank: Absence(lag.reached[rank]) for rank in lag.behind})
        return Divergence(lag.group, lag.number, largest_first([ahead, *behind]))
