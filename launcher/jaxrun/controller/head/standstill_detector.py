"""Ends a job, with --lockstep record or check, whose ranks are certainly out of step and make no call any more.

The ranks of a reported divergence made, or entered, different calls that cannot match. The job may go on all the same,
if the programs exchange the same data. It does not if a rank still waits in that call, all other ranks of the group
wait in JAX or compile, and none of them makes a call for STANDSTILL_S. Compiling does not count as progress here: the
program that is being compiled is for a call that the others do not make.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from msgspec import Struct

from jaxrun.analysis.diagnosis.job_end import Diverged
from jaxrun.analysis.diagnosis.stacks import main_stack
from jaxrun.analysis.lockstep.divergence import Divergence
from jaxrun.controller.head.divergence_detector import DivergenceDetector
from jaxrun.controller.head.head_state import HeadState, JobPhase
from jaxrun.controller.head.job_shutdown import JobShutdown
from jaxrun.controller.head.queries import RankQueries, Replies, flights_of
from jaxrun.controller.head.timers import Timer
from jaxrun.job_events.actions import Action
from jaxrun.protocol.flight import Flight, parse_group
from jaxrun.protocol.flight_file import LOCKSTEP_CHECK, LOCKSTEP_RECORD
from jaxrun.protocol.query_messages import RankDetail, RankReply

STANDSTILL_S = 10.0
_CHECK_S = 2.5
_MAX_CHECK_S = 30.0  # for a job that goes on although its ranks are out of step
_GROWTH = 1.5

_Counts = dict[int, tuple[tuple[str, int], ...]]  # by rank, the calls made in each group


class StandstillDetector(Struct):
    """Times are seconds since the epoch."""

    _state: HeadState
    _queries: RankQueries
    _divergence: DivergenceDetector
    _shutdown: JobShutdown
    _is_started: bool = False
    _pause_s: float = _CHECK_S
    _counts: _Counts | None = None
    _since: float = 0.0  # since when the counts are the same

    def start_if_diverged(self, now: float) -> list[Action]:
        """Begin to check once the first divergence was reported."""
        is_needed = self._state.lockstep in (LOCKSTEP_RECORD, LOCKSTEP_CHECK) and self._state.phase is JobPhase.RUNNING
        if is_needed and not self._is_started and self._divergence.reports.shown:
            self._is_started = True
            self._schedule(now)
        return []

    def _schedule(self, now: float) -> None:
        self._state.timers.set(Timer.STANDSTILL_CHECK, now + self._pause_s, self._read_calls)

    def _read_calls(self, now: float) -> list[Action]:
        return self._queries.ask(self._state.workers.live, RankDetail.CALLS, self._compare, now)

    def _compare(self, replies: Replies, now: float) -> list[Action]:
        if self._state.phase is not JobPhase.RUNNING:
            return []
        flights = flights_of(replies)
        counts: _Counts = {rank: tuple(sorted(flight.call_counts.items())) for rank, flight in flights.items()}
        if counts != self._counts or self._state.debugged:
            moved = self._counts is not None
            self._counts, self._since = counts, now
            self._pause_s = min(_MAX_CHECK_S, self._pause_s * _GROWTH) if moved else _CHECK_S
        else:
            self._pause_s = _CHECK_S
            if now >= self._since + STANDSTILL_S and self._find_stuck(flights):
                return self._queries.ask_stacks(self._state.workers.live, self._end_if_all_wait, now)
        self._schedule(now)
        return []

    def _end_if_all_wait(self, replies: Replies, now: float) -> list[Action]:
        if self._state.phase is not JobPhase.RUNNING:
            return []
        flights = flights_of(replies)
        graph = self._queries.wait_graph(replies, now)
        sleeping = {rank for rank, state in graph.states.items() if state.sleeps_in_jax}
        waiting = {rank for rank in sleeping if is_certainly_in_jax(replies[rank])}
        stuck, size = self._find_stuck(flights), len(self._state.workers.hosts)
        if not any(all_wait(divergence, flights, waiting, size) for divergence in stuck):
            self._schedule(now)
            return []
        text = f"and have made no call for {STANDSTILL_S:.0f} s, so the job was ended"
        return self._shutdown.abort(Diverged(text), now)

    def _find_stuck(self, flights: Mapping[int, Flight]) -> list[Divergence]:
        known = self._divergence.reports.shown
        return [one for one in known if one.number and _some_rank_waits(one, flights, len(self._state.workers.hosts))]


def _some_rank_waits(divergence: Divergence, flights: Mapping[int, Flight], size: int) -> bool:
    """Whether a rank of the group has not got beyond the call at which the ranks diverge."""
    members = parse_group(divergence.group, size)
    counts = [flight.call_counts.get(divergence.group, 0) for rank, flight in flights.items() if rank in members]
    return bool(counts) and min(counts) == divergence.number - 1


def is_certainly_in_jax(reply: RankReply) -> bool:
    """Whether a rank with these stacks is in JAX, and not in another library's native code at a line that calls JAX.

    A call of JAX's C++ dispatch has no frames; the flight recorder says whether the rank stands in one.
    """
    stack = main_stack(reply.stacks)
    is_noted = stack.waits_for_ranks or stack.coordination_wait is not None
    return is_noted or reply.flight.standing is not None or any(frame.is_jax for frame in stack.called)


def all_wait(divergence: Divergence, flights: Mapping[int, Flight], waiting: Collection[int], size: int) -> bool:
    """Whether all ranks of the group are `waiting` in JAX or compile, and one of them waits in the call."""
    members = parse_group(divergence.group, size) & flights.keys()
    if not members or not _some_rank_waits(divergence, flights, size):
        return False
    compiling = {rank for rank in members if flights[rank].compiling is not None}
    behind = {rank for rank in members if flights[rank].call_counts.get(divergence.group, 0) < divergence.number}
    return members <= compiling | {*waiting} and bool(({*waiting} - compiling) & behind)
