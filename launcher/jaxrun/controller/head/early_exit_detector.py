"""Decides from successive snapshots whether ranks wait for ever for others that have finished."""

from __future__ import annotations

from collections.abc import Mapping

from jaxrun.analysis.diagnosis.stacks import is_in_jax, is_waiting_in_jax
from jaxrun.controller.head.stall_detector import IDLE_CPU_FRACTION
from jaxrun.protocol.snapshot_messages import SnapshotReply

_EARLY_EXIT_CHECK_S = 10.0  # after the first rank has finished, and between checks of a job that works
_EARLY_EXIT_CHECK_WITH_CALLS_S = 1.0  # after the first rank has finished, where the calls may show more
_EARLY_EXIT_CONFIRM_S = 2.0  # between the two checks that must agree


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
        return left_behind or all(cpu[rank] - used.get(rank, 0.0) < IDLE_CPU_FRACTION * (now - then) for rank in cpu)
