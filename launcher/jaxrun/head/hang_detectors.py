"""Decide from successive snapshots whether a job hangs: it makes no progress, or waits for ranks that have finished."""

from __future__ import annotations

from collections.abc import Mapping

from jaxrun.diagnosis.stacks import is_in_jax, is_waiting_in_jax, main_stack
from jaxrun.protocol.agent_messages import SnapshotReply
from jaxrun.protocol.flight_file import NOTHING

_IDLE_CPU_FRACTION = 0.05  # of a core: a process that uses less is waiting
_EARLY_EXIT_CHECK_S = 10.0  # after the first rank has finished, and between checks of a job that works
_EARLY_EXIT_CHECK_WITH_CALLS_S = 1.0  # after the first rank has finished, where the calls may show more
_EARLY_EXIT_CONFIRM_S = 2.0  # between the two checks that must agree
_STALL_CHECKS = 4  # in the time of --stall-timeout


class EarlyExitDetector:
    """Whether ranks wait for ever for one that has finished.

    A rank may finish early as long as the others work. They wait in vain if each of them is in JAX and uses no CPU time
    in two successive snapshots. Where their calls show that they have entered one for which the finished rank is
    needed, their CPU time does not matter, as waiting for a GPU may cost some.

    next_check_s:  seconds until the next snapshot is to be taken
    """

    def __init__(self, finished_at: float, *, has_calls: bool) -> None:
        """`finished_at`: when the first rank's program ended; `has_calls`: whether flight recorders are read."""
        self._finished_at = finished_at
        self._previous: tuple[float, Mapping[int, float]] | None = None  # time, CPU seconds
        self.next_check_s = _EARLY_EXIT_CHECK_WITH_CALLS_S if has_calls else _EARLY_EXIT_CHECK_S

    def check(self, reply: SnapshotReply, now: float, *, left_behind: bool) -> bool:
        """Whether the unfinished ranks wait in vain; `left_behind`: in a call for which a finished rank is needed."""
        remaining = self._finished_at + _EARLY_EXIT_CHECK_S - now
        if remaining > 0 and not left_behind:
            self.next_check_s, self._previous = remaining, None
            return False
        is_waiting = bool(reply.stacks) and all(
            is_in_jax(dump) if left_behind else is_waiting_in_jax(dump, reply.kernel_waits[rank])
            for rank, dump in reply.stacks.items()
        )
        cpu = reply.cpu_seconds
        previous, self._previous = self._previous, (now, cpu) if is_waiting else None
        self.next_check_s = _EARLY_EXIT_CONFIRM_S if is_waiting else _EARLY_EXIT_CHECK_S
        if not is_waiting or previous is None:
            return False
        then, used = previous
        return left_behind or all(cpu[rank] - used.get(rank, 0.0) < _IDLE_CPU_FRACTION * (now - then) for rank in cpu)


class StallDetector:
    """For how long a job has made no progress.

    It makes progress as long as any rank writes output, makes a cross-process call or uses CPU time; so a long
    compilation is no stall, and a deadlock is one. As waiting for a GPU may cost CPU time, that of a rank which stays
    at the same place in JAX, and compiles nothing, does not count.
    """

    def __init__(self, limit: float, now: float) -> None:
        """`limit`: of --stall-timeout, in seconds."""
        self.limit = limit
        self.check_interval_s = limit / _STALL_CHECKS
        self.warned = False
        self._progress_at = now
        self._previous: tuple[float, SnapshotReply] | None = None

    def update(self, reply: SnapshotReply, now: float) -> float:
        """Seconds since the job made progress."""
        if self._previous is None or _made_progress(*self._previous, reply, now):
            self._progress_at = now if self._previous else self._progress_at
            self.warned = False
        self._previous = (now, reply)
        return now - self._progress_at


def _made_progress(then: float, before: SnapshotReply, after: SnapshotReply, now: float) -> bool:
    if before.cpu_seconds.keys() != after.cpu_seconds.keys():  # a rank has ended
        return True
    if dict(before.bytes_written) != dict(after.bytes_written):
        return True
    earlier = before.flights
    if any(flight.call_counts != earlier.get(rank, flight).call_counts for rank, flight in after.flights.items()):
        return True
    idle = _IDLE_CPU_FRACTION * (now - then)
    worked = [rank for rank, seconds in after.cpu_seconds.items() if seconds - before.cpu_seconds[rank] > idle]
    return not all(_only_polled(rank, before, after) for rank in worked)


def _only_polled(rank: int, before: SnapshotReply, after: SnapshotReply) -> bool:
    """Whether a rank that has used CPU time may have done nothing but wait in JAX."""
    flight = after.flights.get(rank)
    if flight is None or flight.level == NOTHING or flight.compiling is not None:
        return False
    stack = main_stack(after.stacks.get(rank, ""))
    has_not_moved = stack.frames == main_stack(before.stacks.get(rank, "")).frames
    return has_not_moved and any(frame.is_jax for frame in stack.called)
