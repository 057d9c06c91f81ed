"""Notes in the flight recorder which joint functions of jaxrun this rank calls, and when it waits for others there.

Joint functions, such as `snapshot`, are functions of jaxrun that all ranks must call, because ranks wait for each other
in them, outside of JAX. The notes (protocol/flight_file.py) tell the analysis of hangs which ranks a rank waits for.
Every wait for other ranks goes through `wait_for_ranks`, whose frame marks the wait in stacks.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from time import time_ns
from types import FrameType, TracebackType
from typing import TypeVar

from jaxrun.protocol import flight_file
from jaxrun.protocol.env import WorkerEnv
from jaxrun_runtime.lockstep.call_sites import CallSites
from jaxrun_runtime.lockstep.flight_recorder import FlightRecorder

_Result = TypeVar("_Result")
_recorder: FlightRecorder | None = None
_find_site: Callable[[FrameType | None], int] | None = None
_thread = threading.local()  # `call`: the innermost JointCall that this thread is in


def connect(recorder: FlightRecorder, find_site: Callable[[FrameType | None], int]) -> None:
    """Write to this recorder from now on. `find_site(frame)` returns the number of the program's line above a frame."""
    global _recorder, _find_site
    _recorder, _find_site = recorder, find_site


def record(env: WorkerEnv) -> None:
    """Record joint calls only, in a job with --lockstep off."""
    with contextlib.suppress(OSError, ValueError):
        recorder = FlightRecorder(env.flight_fd, env.rank)
        connect(recorder, CallSites(recorder.add_site).find)
        os.register_at_fork(after_in_child=recorder.detach)


class JointCall:
    """One call of a joint function, as a context manager. Entering it counts the call.

    number:  how many times this rank has called the function, including this call; 0 without a recorder
    """

    def __init__(self, function: str) -> None:
        self._at = _first_word(function)
        self._outer: JointCall | None = None
        self.number = 0

    def __enter__(self) -> JointCall:
        self.count()
        self._outer, _thread.call = getattr(_thread, "call", None), self
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        _thread.call = self._outer

    def count(self) -> None:
        if _recorder is not None:
            place = self._at + flight_file.JOINT_CALLED
            self.number = _recorder.words[place] = _recorder.words[place] + 1

    def wait(self, number: int, function: Callable[..., _Result], *arguments: object) -> _Result:
        """Call `function` and return its result. It must return once all ranks have made the call of this number."""
        if _recorder is None or _find_site is None or number <= 0:
            return function(*arguments)
        words, at = _recorder.words, self._at
        words[at + flight_file.JOINT_SITE] = _find_site(sys._getframe())
        words[at + flight_file.JOINT_SINCE] = time_ns()
        words[at + flight_file.JOINT_AWAITED] = number
        try:
            return function(*arguments)
        finally:
            words[at + flight_file.JOINT_AWAITED] = 0


def wait_for_ranks(function: Callable[..., _Result], *arguments: object) -> _Result:
    """Call `function`, which waits until all ranks have made this thread's current call of a joint function.

    Outside of a joint function, such as in a background thread, nothing is noted.
    """
    call: JointCall | None = getattr(_thread, "call", None)
    return function(*arguments) if call is None else call.wait(call.number, function, *arguments)


@contextlib.contextmanager
def state_stage(stage: str, name: str) -> Iterator[None]:
    """Note how long this block takes as a stage of saving or restoring: flight_file.SAVE or RESTORE_STATE."""
    began = time_ns()
    try:
        yield
    finally:
        if _recorder is not None:
            _recorder.add_stage(stage, name, (time_ns() - began) / 1e9)


def header() -> memoryview | None:
    """Return the words of the recorder's header and ring; None if there is no recorder."""
    return _recorder.words if _recorder is not None else None


def calls_made(function: str) -> int:
    """Return how many times this rank has called the function; 0 without a recorder."""
    return _recorder.words[_first_word(function) + flight_file.JOINT_CALLED] if _recorder is not None else 0


def forget(*functions: str) -> None:
    """Reset the counts of these functions to 0. All ranks must do it."""
    for function in functions:
        if _recorder is not None:
            _recorder.words[_first_word(function) + flight_file.JOINT_CALLED] = 0


def _first_word(function: str) -> int:
    place = flight_file.JOINT_FUNCTIONS.index(function)
    return flight_file.JOINT_WORD + place * flight_file.JOINT_FUNCTION_WORDS
