"""How long a rank waits for another one that compiles the same program.

It waits as long as the other one works: runs, or would run if it had a core, as the waiting rank would not have one
either. It stops waiting when the other one has ended, or when that has stood still (stopped, swapped out, blocked) for
longer than `IDLE_S` and `IDLE_SHARE` of the time for which it has worked. A rank that works needs no longer than the
waiting one would have needed itself, so waiting in vain costs at most `IDLE_S` and 1 + `IDLE_SHARE` times that.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable

IDLE_S = 0.25
IDLE_SHARE = 0.25
_LOOK_EVERY_S = 0.1  # or, of a longer wait, after this share of it: a look costs about half a millisecond
_LOOK_SHARE = 0.1
_CPU_CLOCK = 2  # of a whole process, in the number that the kernel makes of a process id


class CompilingRank:
    """The rank whose process is `pid`, as one sees it that waits for its program.

    worked:  returns for how many seconds all its threads have run, or waited for a core; None if it has ended
    clock:   returns seconds
    """

    def __init__(
        self,
        pid: int,
        worked: Callable[[int], float | None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pid = pid
        self._worked = worked or seconds_worked
        self._clock = clock
        self._looked_at = clock()
        self._before: float | None = None
        self._busy_s = self._idle_s = 0.0

    def is_worth_waiting_for(self) -> bool:
        """Whether to wait on."""
        passed = self._clock() - self._looked_at
        if passed < max(_LOOK_EVERY_S, _LOOK_SHARE * (self._busy_s + self._idle_s)):
            return True
        now = self._worked(self._pid)
        if now is None:
            return False
        # Several threads do not work faster than the clock goes. What it did before the first look is not known.
        busy = 0.0 if self._before is None else min(passed, max(0.0, now - self._before))
        self._busy_s += busy
        self._idle_s += passed - busy
        self._looked_at += passed
        self._before = now
        return self._idle_s <= IDLE_S + IDLE_SHARE * self._busy_s


def seconds_worked(pid: int) -> float | None:
    """For how long the process's threads have run, or waited for a core, all together; None if it has ended."""
    nanoseconds = 0
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/schedstat") as file:
                nanoseconds += sum(map(int, file.read().split()[:2]))
    except OSError:
        return None
    return nanoseconds / 1e9 or _cpu_seconds(pid)


def _cpu_seconds(pid: int) -> float | None:
    """For kernels without statistics of the scheduler."""
    try:
        return time.clock_gettime(~pid << 3 | _CPU_CLOCK)
    except OSError:
        return None
