"""Has a rank left the others waiting for it for ever?

A rank that finishes early is legal as long as the others work. They wait in vain when each of them stands in
JAX and uses no CPU, in two looks in a row. Where the calls show that they have gone on to one that the finished rank
was needed for, their CPU time says nothing: waiting for a GPU may cost some.
"""

from __future__ import annotations

from collections.abc import Mapping

from jaxrun.diagnosis import stacks
from jaxrun.protocol.agent_messages import SnapshotReply

_FIRST_CHECK_S = 10.0  # seconds after the first rank has finished
_FIRST_CHECK_WITH_CALLS_S = 1.0  # the same where calls may show more
_CONFIRM_AFTER_S = 2.0  # seconds between the two looks that must agree
IDLE_CPU_FRACTION = 0.05  # of a core: a process that uses less is waiting


class EarlyExitDetector:
    """Remembers the last look. `next_look` says in how many seconds to look again."""

    def __init__(self, finished: float, *, sees_calls: bool) -> None:
        """`finished`: when the first rank's program ended, seconds since the epoch."""
        self._finished = finished
        self.next_check_s = _FIRST_CHECK_WITH_CALLS_S if sees_calls else _FIRST_CHECK_S
        self._before: tuple[float, Mapping[int, float]] | None = None

    def check(self, taken: SnapshotReply, now: float, *, left_behind: bool) -> bool:
        """Whether the unfinished ranks wait in vain; `left_behind`: in a call that needs one that has finished."""
        patience = self._finished + _FIRST_CHECK_S - now
        if patience > 0 and not left_behind:
            self.next_check_s, self._before = patience, None
            return False
        dumps, waits, cpu = taken.stacks, taken.kernel_waits, taken.cpu_seconds
        waiting = bool(dumps) and all(
            stacks.is_in_jax(dump) if left_behind else stacks.is_waiting_in_jax(dump, waits[rank])
            for rank, dump in dumps.items()
        )
        before, self._before = self._before, (now, cpu) if waiting else None
        self.next_check_s = _CONFIRM_AFTER_S if waiting else _FIRST_CHECK_S
        if not waiting or before is None:
            return False
        then, used = before
        return left_behind or all(cpu[rank] - used.get(rank, 0.0) < IDLE_CPU_FRACTION * (now - then) for rank in cpu)
