"""`step` and `progress`: the program tells jaxrun how far it has come.

What it tells goes into the rank's flight recorder (protocol/flight_file.py), where the agent reads it now and then. So
a call sends nothing, and takes less than a microsecond.
"""

from __future__ import annotations

import operator
from time import time_ns

from jaxrun.protocol.flight_file import (
    FIRST_STEP_AT_WORD,
    FIRST_STEP_WORD,
    STEP_AT_WORD,
    STEP_TOTAL_WORD,
    STEP_WORD,
)
from jaxrun_runtime import joint_calls

_MAX_STEP = 2**62


def step(number: int) -> None:
    """Tell jaxrun that the program has finished this step of its training.

    Call it in each step, on one or more ranks. jaxrun then counts steps by these numbers, also those that a restart has
    to repeat. Without jaxrun it does nothing. Raises TypeError or ValueError if `number` is not an integer of 0 or
    more.
    """
    progress(number, 0)


def progress(number: int, total: int) -> None:
    """Tell jaxrun that the program has finished this step, and that there will be `total` steps.

    jaxrun shows the share that is done, the steps per second, and the time that is left. `total` is 0 if it is not
    known. Otherwise it is as `step`.
    """
    done, steps = operator.index(number), operator.index(total)
    if not (0 <= done < _MAX_STEP and 0 <= steps < _MAX_STEP):
        raise ValueError(f"steps must be 0 or more, not {number!r} of {total!r}")
    words = joint_calls.header()
    if words is None:
        return
    now = time_ns()
    if not words[FIRST_STEP_WORD]:
        words[FIRST_STEP_AT_WORD] = now
        words[FIRST_STEP_WORD] = done + 1
    words[STEP_WORD] = done + 1
    words[STEP_TOTAL_WORD] = steps or words[STEP_TOTAL_WORD]
    words[STEP_AT_WORD] = now
