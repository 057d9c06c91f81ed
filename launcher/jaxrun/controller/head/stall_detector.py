"""Decides from successive replies of the ranks whether they hang: no progress, or they wait for finished ones."""

from __future__ import annotations

import math
from collections.abc import Mapping

from msgspec import Struct

from jaxrun.analysis.diagnosis.helpers import Helpers
from jaxrun.analysis.diagnosis.rank_state import IN_JAX, WAITING, Activity, RankState
from jaxrun.analysis.diagnosis.stacks import main_stack
from jaxrun.analysis.diagnosis.wait_graph import WaitGraph, find_wait_graph
from jaxrun.controller.head.queries import Replies, dumps_of, flights_of, kernel_waits_of
from jaxrun.protocol.flight_file import NOTHING
from jaxrun.protocol.query_messages import RankReply

IDLE_CPU_FRACTION = 0.05  # of a core: a process that uses less is waiting
_MIN_FILE_BYTES = 65536  # between two checks: a process that reads or writes less is not loading or saving anything
_CHECKS_PER_LIMIT = 4
_LEARNED_MULTIPLE = 5.0  # of the longest time between two calls, with --stall-timeout auto
_CHECKS_PER_NOTICE = 3  # the last two with stacks, which must agree
_MAX_CHECK_INTERVAL_S = 60.0  # for a job that has stood still for a long time
# So that the checks of thousands of ranks cost the head at most a hundredth of its time.
_CHECK_INTERVAL_PER_RANK_S = 0.005
# Times --stall-notice: the first notice is delayed up to this for a job that stalls now and then.
_MAX_FIRST_NOTICE = 16
# Multiples of --stall-notice that a rank may spend in this state, while others wait, before a notice is printed
# (default: _LONG_PATIENCE). None: never, because someone is already looking at the rank.
_PATIENCE: Mapping[Activity, float | None] = {
    **dict.fromkeys((*WAITING, Activity.THREAD, Activity.ASLEEP, Activity.FILE_LOCK), 1),
    **dict.fromkeys((Activity.STOPPED, Activity.INPUT, Activity.SLEEP, Activity.ENDING), 1),
    Activity.COMPILING: 10,  # counting the CPU time of other processes; its own would be progress
    Activity.PROMPT: None,
    Activity.TRACED: None,
}
_LONG_PATIENCE = 2  # it may continue by itself: it loads data, or computes
_EARLY_EXIT_CHECK_S = 10.0  # after the first rank has finished, and between checks while the job works
_EARLY_EXIT_CHECK_WITH_CALLS_S = 1.0  # after the first rank has finished, if the calls may show more
_EARLY_EXIT_CONFIRM_S = 2.0  # between the two checks that must agree
_LOCKS = {Activity.THREAD, Activity.ASLEEP, Activity.FILE_LOCK}


class StallCheck(Struct, frozen=True):
    """The result of one query.

    idle_s:   seconds since the job made progress
    is_over:  the job has made no progress for as long as --stall-timeout allows
    is_half:  the same for half of that time, set once
    is_told:  whether to print now who waits for whom
    is_in_doubt:  whether to print it only if something other than stacks and recorders shows that the job hangs
    """

    idle_s: float
    is_over: bool = False
    is_half: bool = False
    is_told: bool = False
    is_in_doubt: bool = False


class StallDetector:
    """Measures for how long a job has made no progress. Times are seconds since the epoch.

    It makes progress as long as any rank writes output, makes a cross-process call, reads or writes files, or uses CPU
    time; so a long compilation is no stall, and a deadlock is one. There are two exceptions for CPU time. It does not
    count for a rank that computes in Python while others wait in a call, because this may be an endless loop. If
    waiting for a device costs CPU time (`polls`), it does not count for a rank that stays at the same place in JAX,
    either.

    While a debugger holds a rank, none of this is counted.
    """

    def __init__(
        self, now: float, *, limit: float | None = None, notice: float | None = None, polls: bool = True
    ) -> None:
        """`limit`, `notice`: --stall-timeout and --stall-notice in seconds; without either, nothing is checked."""
        self.limit = limit or math.inf
        self.longest_s: float | None = None  # the longest time between two calls, if the limit was learned from it
        self._notice = notice or math.inf
        self._polls = polls
        self._progress_at = now
        self._next_notice_s = self._notice
        self._said_half = False
        self._previous: tuple[float, Replies, bool] = (now, {}, False)  # (time, replies, whether there were stacks)
        self.next_check_s = min(self.limit / _CHECKS_PER_LIMIT, self._notice / _CHECKS_PER_NOTICE)
        self.wants_stacks = False

    @property
    def is_needed(self) -> bool:
        return math.isfinite(self.next_check_s)

    def learn_limit(self, longest_s: float, least_s: float) -> None:
        """Set the limit by the longest time between two calls that was seen, but not below `least_s` seconds."""
        self.longest_s, self.limit = longest_s, max(least_s, _LEARNED_MULTIPLE * longest_s)
        self.next_check_s = min(self.next_check_s, self.limit / _CHECKS_PER_LIMIT)

    def discount(self, seconds: float) -> None:
        """Discount a time in which someone suspended the whole job."""
        self._progress_at += seconds
        taken_at, replies, had_stacks = self._previous
        self._previous = (taken_at + seconds, replies, had_stacks)

    def update(
        self, replies: Replies, now: float, helpers: Mapping[int, Helpers] | None = None, *, is_held: bool = False
    ) -> StallCheck:
        """Evaluate the replies to one query and update `wants_stacks` and `next_check_s` for the next.

        is_held:  a debugger holds a rank, which counts as progress
        """
        then, before, had_stacks = self._previous
        has_stacks = self.wants_stacks
        self._previous = (now, replies, has_stacks)
        graph = WaitGraph({})
        if has_stacks:
            graph = find_wait_graph(flights_of(replies), dumps_of(replies), kernel_waits_of(replies), helpers)
        if _made_progress(before, replies, graph.states, now - then, polls=self._polls) or is_held:
            self._progress_at = now
            self._said_half = False
            self._next_notice_s = min(self._next_notice_s, _MAX_FIRST_NOTICE * self._notice)
        idle = now - self._progress_at
        self._schedule(idle, len(replies))
        if not has_stacks:
            return StallCheck(idle)
        half = not self._said_half and self.limit / 2 <= idle < self.limit
        self._said_half |= half
        # A single reply does not show whether a rank moves.
        due = had_stacks and self._is_due(idle, graph)
        in_doubt = due and not half and _may_wait_for_a_result(graph, polls=self._polls)
        return StallCheck(idle, idle >= self.limit, half, due and not in_doubt, in_doubt)

    def _schedule(self, idle: float, ranks: int) -> None:
        """Ask for stacks only if the job seems to stand still, because ranks receive a signal for them."""
        pauses = [_until(self.limit, idle, self.limit / _CHECKS_PER_LIMIT)]
        if math.isfinite(self._notice):
            least = max(self._notice / _CHECKS_PER_NOTICE, ranks * _CHECK_INTERVAL_PER_RANK_S)
            pause = max(least, min(idle / _CHECKS_PER_LIMIT, _MAX_CHECK_INTERVAL_S))
            pauses.append(_until(self._next_notice_s, idle, pause))
        self.next_check_s = min(pauses)
        self.wants_stacks = idle > 0

    def _is_due(self, idle: float, graph: WaitGraph) -> bool:
        """Whether to print a notice now; each time it takes twice as long until the next one."""
        if idle < self._next_notice_s:
            return False
        patience = _patience(graph, polls=self._polls)
        if patience is None or idle < patience * self._notice:
            return False
        self._next_notice_s = 2 * idle
        return True


class EarlyExitDetector:
    """Whether ranks wait forever for one that has finished.

    A rank may finish early as long as the others work. They wait in vain if each of them is in JAX and uses no CPU time
    in two successive queries. If their calls show that they have entered one that needs the finished rank, their CPU
    time does not matter, because waiting for a GPU may cost some.

    next_check_s:  seconds until the next query
    """

    def __init__(self, finished_at: float, *, has_calls: bool) -> None:
        """`finished_at`: when the first rank's program ended; `has_calls`: whether flight recorders are read."""
        self._finished_at = finished_at
        self._previous: tuple[float, Mapping[int, float]] | None = None  # time, CPU seconds
        self.next_check_s = _EARLY_EXIT_CHECK_WITH_CALLS_S if has_calls else _EARLY_EXIT_CHECK_S

    def discount(self, seconds: float) -> None:
        """Discount a time in which someone suspended the whole job."""
        self._finished_at += seconds
        if self._previous is not None:
            taken_at, cpu = self._previous
            self._previous = (taken_at + seconds, cpu)

    def check(self, replies: Replies, graph: WaitGraph, now: float) -> bool:
        """Whether the unfinished ranks, which have replied, wait in vain for finished ones."""
        left_behind = any(graph.abandoned())
        remaining = self._finished_at + _EARLY_EXIT_CHECK_S - now
        if remaining > 0 and not left_behind:
            self.next_check_s, self._previous = remaining, None
            return False
        states = [graph.states[rank] for rank in replies]
        is_waiting = bool(states) and all(s.is_in_jax if left_behind else s.sleeps_in_jax for s in states)
        cpu = {rank: reply.cpu_seconds for rank, reply in replies.items()}
        previous, self._previous = self._previous, (now, cpu) if is_waiting else None
        self.next_check_s = _EARLY_EXIT_CONFIRM_S if is_waiting else _EARLY_EXIT_CHECK_S
        if not is_waiting or previous is None:
            return False
        then, used = previous
        return left_behind or all(cpu[rank] - used.get(rank, 0.0) < IDLE_CPU_FRACTION * (now - then) for rank in cpu)


def _until(goal: float, idle: float, pause: float) -> float:
    """Return the pause, or the time left until the goal if not much shorter: the kernel counts CPU time in 10 ms."""
    return min(pause, max(goal - idle, pause / 4)) if goal > idle else pause


def _made_progress(
    before: Replies, after: Replies, states: Mapping[int, RankState], seconds: float, *, polls: bool
) -> bool:
    """Whether any rank did something between two queries; without stacks, CPU time is not evaluated."""
    if not before.keys() <= after.keys():  # a rank has ended
        return True
    pairs = {rank: (before.get(rank), reply) for rank, reply in after.items() if reply.number}
    if any(_wrote_or_called(*pair) for pair in pairs.values()):
        return True
    worked = set()
    for rank in pairs.keys() & states.keys():
        then, now = pairs[rank]
        used_cpu = then is not None and now.cpu_seconds - then.cpu_seconds > IDLE_CPU_FRACTION * seconds
        if used_cpu and not (polls and _only_polled(then, now)):
            worked.add(rank)
    waiting = {rank for rank, state in states.items() if state.activity in WAITING} - worked
    return any(not waiting or not _may_loop(states[rank], after[rank]) for rank in worked)


def _wrote_or_called(before: RankReply | None, after: RankReply) -> bool:
    """Whether a rank has written output, made a call, or read or written files."""
    if after.bytes_written != (before.bytes_written if before is not None else 0):
        return True
    if any(after.call_counters) and (before is None or after.call_counters != before.call_counters):
        return True
    return before is not None and after.file_bytes - before.file_bytes >= _MIN_FILE_BYTES


def _only_polled(before: RankReply | None, after: RankReply) -> bool:
    """Whether a rank that has used CPU time may have done nothing except wait in JAX."""
    if after.flight.level == NOTHING or after.flight.compiling is not None:
        return False
    stack = main_stack(after.stacks)
    has_moved = before is not None and before.stacks and stack.frames != main_stack(before.stacks).frames
    return not has_moved and any(frame.is_jax for frame in stack.called)


def _may_loop(state: RankState, reply: RankReply) -> bool:
    """Whether the main thread runs the program's own Python code (not called by JAX), or polls something."""
    if any(frame.is_jax for frame in main_stack(reply.stacks).frames):
        return False
    runs = reply.kernel_wait in ("", "0")
    return state.activity is Activity.SLEEP or (state.activity is Activity.ELSEWHERE and runs)


def _patience(graph: WaitGraph, *, polls: bool) -> float | None:
    """Return the multiples of --stall-notice that the ranks may spend like this before a notice; None for no limit.

    A notice requires that all wait in JAX, for locks or for something that has ended; or some in JAX for others; or
    that some are at their end. A rank that waits for a device which computes by itself may only seem to wait for
    others, unless recorders show that some have come to a call that others have not.
    """
    busy = graph.busy_states.values()
    kinds = {state.activity for state in busy}
    goes_on_by_itself = any(not (state.activity in _LOCKS or state.waits_for_the_dead) for state in busy)
    if not busy or (goes_on_by_itself and not kinds & {*WAITING, Activity.ENDING}):
        return None
    in_doubt = polls and bool(kinds & set(IN_JAX)) and not graph.some_are_behind
    factors = [1 if s.waits_for_the_dead else _PATIENCE.get(s.activity, _LONG_PATIENCE) for s in busy]
    known = [factor for factor in factors if factor is not None]
    return max(known) * (_LONG_PATIENCE if in_doubt else 1) if len(known) == len(factors) else None


def _may_wait_for_a_result(graph: WaitGraph, *, polls: bool) -> bool:
    """Whether all ranks wait in the same call of a device that computes by itself: it may be a long computation."""
    places = {(state.activity, state.place) for state in graph.busy_states.values()}
    return polls and graph.all_in_one_call and len(places) == 1
