"""Decides from successive snapshots whether a job stalls: for how long it has made no progress, and who waits."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from jaxrun.analysis.diagnosis.rank_state import WAITING, Activity, RankState, find_rank_states
from jaxrun.analysis.diagnosis.stacks import main_stack
from jaxrun.analysis.lockstep.compare import find_lags
from jaxrun.protocol.flight_file import NOTHING
from jaxrun.protocol.snapshot_messages import SnapshotPurpose, SnapshotReply

IDLE_CPU_FRACTION = 0.05  # of a core: a process that uses less is waiting
_MIN_FILE_BYTES = 65536  # between two checks: a process that reads or writes less loads and saves nothing
_CHECKS_PER_LIMIT = 4
_CHECKS_PER_NOTICE = 3  # the last two with stacks, which must agree
_MAX_CHECK_INTERVAL_S = 60.0  # of a job that has stood still for long
_CHECK_INTERVAL_PER_RANK_S = 0.005  # so that the checks of thousands of ranks take the head a hundredth of its time
_MAX_FIRST_NOTICE = 16  # times --stall-notice: a job that stalls now and then is told of less often, up to that
# For how many times --stall-notice a rank may do this while others wait for it, before that is told; else it is
# _LONG_PATIENCE. None: a person looks at the rank, and knows.
_PATIENCE: Mapping[Activity, float | None] = {
    **dict.fromkeys((*WAITING, Activity.THREAD, Activity.ASLEEP, Activity.FILE_LOCK), 1),
    **dict.fromkeys((Activity.STOPPED, Activity.INPUT, Activity.SLEEP, Activity.ENDING), 1),
    Activity.COMPILING: 10,  # with the CPU time of other processes, or it would be progress
    Activity.PROMPT: None,
    Activity.TRACED: None,
}
_LONG_PATIENCE = 2  # it may go on by itself: it loads data, or computes
_LOCKS = {Activity.THREAD, Activity.ASLEEP, Activity.FILE_LOCK}


@dataclass(frozen=True, slots=True)
class StallCheck:
    """What one snapshot has shown.

    idle_s:   seconds since the job made progress
    is_over:  for as long as --stall-timeout allows
    is_half:  for half of that, said once
    is_told:  whether people are to be told now who waits for whom
    """

    idle_s: float
    is_over: bool = False
    is_half: bool = False
    is_told: bool = False


class StallDetector:
    """For how long a job has made no progress. Times are seconds since the epoch.

    It makes progress as long as any rank writes output, makes a cross-process call, reads or writes files, or uses CPU
    time; so a long compilation is no stall, and a deadlock is one. CPU time does not count of a rank that computes in
    Python while others wait in a call: it may be an endless loop. Where waiting for a device costs CPU time (`polls`),
    that of a rank which stays at the same place in JAX does not count either.

    While a debugger holds a rank, nothing of this is counted.
    """

    def __init__(
        self, now: float, *, limit: float | None = None, notice: float | None = None, polls: bool = True
    ) -> None:
        """`limit`, `notice`: of --stall-timeout and --stall-notice, in seconds; without either nothing is checked."""
        self.limit = limit or math.inf
        self._notice = notice or math.inf
        self._polls = polls
        self._progress_at = now
        self._next_notice_s = self._notice
        self._said_half = False
        self._held: set[int] = set()
        self._previous = (now, SnapshotReply(SnapshotPurpose.PROGRESS, {}, {}, {}))  # at the start nothing is done
        self.next_check_s = min(self.limit / _CHECKS_PER_LIMIT, self._notice / _CHECKS_PER_NOTICE)
        self.purpose = SnapshotPurpose.PROGRESS

    @property
    def is_needed(self) -> bool:
        return math.isfinite(self.next_check_s)

    def hold(self, rank: int) -> None:
        """A person debugs this rank: until `release`, the clock stands still."""
        self._held.add(rank)

    def release(self, rank: int) -> None:
        """The rank goes on."""
        self._held.discard(rank)

    def update(self, reply: SnapshotReply, now: float) -> StallCheck:
        """Judge the next snapshot; afterwards `next_check_s` and `purpose` say when the one after it is due."""
        then, before = self._previous
        self._previous = (now, reply)
        states = find_rank_states(reply.stacks, reply.kernel_waits, reply.flights)
        if _made_progress(before, reply, states, now - then, polls=self._polls) or not self._held.isdisjoint(
            reply.cpu_seconds
        ):
            self._restart(now)
        idle = now - self._progress_at
        self._schedule(idle, len(reply.cpu_seconds))
        if reply.purpose is not SnapshotPurpose.STALL:
            return StallCheck(idle)
        half = not self._said_half and self.limit / 2 <= idle < self.limit
        self._said_half |= half
        # One snapshot does not show whether a rank moves.
        told = bool(before.stacks) and self._is_due(idle, states, reply)
        return StallCheck(idle, idle >= self.limit, half, told)

    def _restart(self, now: float) -> None:
        self._progress_at = now
        self._said_half = False
        self._next_notice_s = min(self._next_notice_s, _MAX_FIRST_NOTICE * self._notice)

    def _schedule(self, idle: float, ranks: int) -> None:
        """Only of a job that seems to stand still are stacks asked for, as ranks receive a signal for that."""
        pauses = [_until(self.limit, idle, self.limit / _CHECKS_PER_LIMIT)]
        if math.isfinite(self._notice):
            least = max(self._notice / _CHECKS_PER_NOTICE, ranks * _CHECK_INTERVAL_PER_RANK_S)
            pause = max(least, min(idle / _CHECKS_PER_LIMIT, _MAX_CHECK_INTERVAL_S))
            pauses.append(_until(self._next_notice_s, idle, pause))
        self.next_check_s = min(pauses)
        self.purpose = SnapshotPurpose.STALL if idle > 0 else SnapshotPurpose.PROGRESS

    def _is_due(self, idle: float, states: Mapping[int, RankState], reply: SnapshotReply) -> bool:
        """Whether people are to be told now; each time it takes twice as long until they are told again."""
        if idle < self._next_notice_s:
            return False
        patience = _patience(states, reply, polls=self._polls)
        if patience is None or idle < patience * self._notice:
            return False
        self._next_notice_s = 2 * idle
        return True


def _until(goal: float, idle: float, pause: float) -> float:
    """The pause, or what is left until the goal; not much less, as the kernel counts CPU time in steps of 10 ms."""
    return min(pause, max(goal - idle, pause / 4)) if goal > idle else pause


def _made_progress(
    before: SnapshotReply, after: SnapshotReply, states: Mapping[int, RankState], seconds: float, *, polls: bool
) -> bool:
    """Whether any rank did something within these seconds; without stacks, CPU time is not judged."""
    if not before.cpu_seconds.keys() <= after.cpu_seconds.keys():  # a rank has ended
        return True
    if any(count != before.bytes_written.get(rank, 0) for rank, count in after.bytes_written.items()):
        return True
    if any(any(counts) and counts != before.call_counters.get(rank) for rank, counts in after.call_counters.items()):
        return True
    files = (count - before.file_bytes.get(rank, count) for rank, count in after.file_bytes.items())
    if any(count >= _MIN_FILE_BYTES for count in files):
        return True
    idle = IDLE_CPU_FRACTION * seconds
    worked = {rank for rank, used in after.cpu_seconds.items() if used - before.cpu_seconds.get(rank, used) > idle}
    worked = {rank for rank in worked & states.keys() if not (polls and _only_polled(rank, before, after))}
    waiting = {rank for rank, state in states.items() if state.activity in WAITING} - worked
    return any(not waiting or not _may_loop(rank, states[rank], after) for rank in worked)


def _only_polled(rank: int, before: SnapshotReply, after: SnapshotReply) -> bool:
    """Whether a rank that has used CPU time may have done nothing but wait in JAX."""
    flight = after.flights.get(rank)
    if flight is None or flight.level == NOTHING or flight.compiling is not None:
        return False
    stack = main_stack(after.stacks.get(rank, ""))
    earlier = before.stacks.get(rank)
    has_not_moved = earlier is None or stack.frames == main_stack(earlier).frames
    return has_not_moved and any(frame.is_jax for frame in stack.called)


def _may_loop(rank: int, state: RankState, reply: SnapshotReply) -> bool:
    """Whether the main thread runs the program's own Python code, or polls something: what JAX calls is not meant."""
    if any(frame.is_jax for frame in main_stack(reply.stacks[rank]).frames):
        return False
    runs = reply.kernel_waits.get(rank, "") in ("", "0")
    return state.activity is Activity.SLEEP or (state.activity is Activity.ELSEWHERE and runs)


def _patience(states: Mapping[int, RankState], reply: SnapshotReply, *, polls: bool) -> float | None:
    """For how many times --stall-notice the ranks may do this, until people are told; None for ever.

    All are to wait in JAX or for locks, or some in JAX for others. Where all wait in the same call of a device that
    computes by itself, they may as well wait for its result.
    """
    busy = [state for state in states.values() if state.activity is not Activity.IDLE]
    kinds = {state.activity for state in busy}
    if not (kinds & set(WAITING) or (kinds and kinds <= _LOCKS)):
        return None
    if polls and kinds <= set(WAITING) and _is_one_place(busy) and not find_lags(reply.flights):
        return None
    factors = [_PATIENCE.get(kind, _LONG_PATIENCE) for kind in kinds]
    known = [factor for factor in factors if factor is not None]
    return max(known) * (_LONG_PATIENCE if polls else 1) if len(known) == len(factors) else None


def _is_one_place(states: Collection[RankState]) -> bool:
    return len({(state.activity, state.place) for state in states}) == 1
