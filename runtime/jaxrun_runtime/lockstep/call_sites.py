"""Where in the user's program a cross-process call is made, and when it is entered.

The place is the innermost frame that is neither JAX's nor jaxrun's. JAX's C++ dispatch tells of a call only when it has
been made; Python's own monitoring (sys.monitoring, from Python 3.12.2 on) tells when a call instruction is reached. It
is on for those instructions alone at which a cross-process program has been dispatched before.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
from collections.abc import Callable
from time import time_ns
from types import CodeType, FrameType
from typing import Any

from jaxrun.protocol import frames
from jaxrun.protocol.flight_file import ENTERED_WORD
from jaxrun_runtime.interrupts import claim_monitoring_tool

# Decorators of the standard library leave their frames.
_DECORATORS = (contextlib.__file__, functools.__file__)
_MAX_FRAMES = 8  # of the user's, in a site's stack
_MAX_SITES = 10_000  # a program that makes code as it runs must not fill the memory
# Before Python 3.12.2 one call of a function cannot be left alone and another not.
_monitoring: Any = getattr(sys, "monitoring", None) if sys.version_info >= (3, 12, 2) else None


class CallSites:
    """Numbers the call sites from 1, and calls `on_new(number, stack)` for each new one.

    The stack is "file:line function" for up to 8 of the user's frames, the innermost first: that of the first call
    which a line makes.
    """

    def __init__(self, on_new: Callable[[int, list[str]], None]) -> None:
        self._on_new = on_new
        # By id(code) and f_lasti, because to hash a code object takes long; `_codes` keeps the ids from being reused.
        self.known: dict[tuple[int, int], int] = {}
        self._codes: dict[int, CodeType] = {}
        self._numbers: dict[tuple[str, ...], int] = {}
        self._places = [""]
        self._adding = threading.RLock()

    def find(self, frame: FrameType | None) -> int:
        """Return the number of the site of `frame` or the first frame above it that is the user's; 0 without one."""
        while frame is not None and _is_internal(frame.f_code.co_filename):
            frame = frame.f_back
        if frame is None:
            return 0
        known = self.known.get((id(frame.f_code), frame.f_lasti))
        if known is not None:
            return known
        with self._adding:
            return self._add(frame)

    def place(self, number: int) -> str:
        """Return a site as text, `train.py:88 train_step`; an empty text for 0."""
        return self._places[number]

    def _add(self, frame: FrameType) -> int:
        stack: list[str] = []
        at: FrameType | None = frame
        while at is not None and len(stack) < _MAX_FRAMES:
            if not _is_internal(at.f_code.co_filename):
                stack.append(f"{_absolute(at.f_code.co_filename)}:{at.f_lineno} {at.f_code.co_name}")
            at = at.f_back
        if len(self.known) >= _MAX_SITES:
            self.known.clear()
            self._codes.clear()
        code, number = frame.f_code, self._number(stack)
        self._codes[id(code)] = code
        self.known[id(code), frame.f_lasti] = number
        return number

    def _number(self, stack: list[str]) -> int:
        number = self._numbers.get(tuple(stack), 0)
        if number or len(self._places) > _MAX_SITES:
            return number
        number = self._numbers[tuple(stack)] = len(self._places)
        self._places.append(os.path.basename(stack[0]))
        self._on_new(number, stack)
        return number


def trim_to_user_frames(error: BaseException) -> None:
    """Cut JAX's and jaxrun's frames off the end of the traceback, and drop JAX's note about what it has cut."""
    last, entry = None, error.__traceback__
    while entry is not None:
        if not _is_internal(entry.tb_frame.f_code.co_filename):
            last = entry
        entry = entry.tb_next
    if last is not None:
        last.tb_next = None
    notes = getattr(error, "__notes__", None)
    if isinstance(notes, list):
        notes[:] = [note for note in notes if "JAX_TRACEBACK_FILTERING" not in str(note)]


def is_internal_source(source: str) -> bool:
    """Whether a function is JAX's or jaxrun's; `source` is "exp at /…/jax/_src/numpy/ufuncs.py:88"."""
    return _is_internal(source.rpartition(" at ")[2].rpartition(":")[0])


def _is_internal(filename: str) -> bool:
    return frames.is_ours(filename) or frames.is_jax(filename) or filename in _DECORATORS


def _absolute(filename: str) -> str:
    return filename if filename.startswith("<") else os.path.abspath(filename)


# ---- when calls are entered


class CallEntries:
    """Notes when watched call instructions are reached, in their cells and in the flight recorder's header.

    cells:  by id(code) and f_lasti the time (nanoseconds since the epoch) of a call that is being made, which whoever
            reads it sets to 0: so it is where nothing is known
    """

    def __init__(self, words: memoryview) -> None:
        """`words` are those of the flight recorder."""
        self.cells: dict[tuple[int, int], list[int]] = {}
        self._codes: dict[int, CodeType] = {}  # keeps the ids from being reused
        self._adding = threading.Lock()
        self._tool = claim_monitoring_tool("jaxrun") if _monitoring else None
        if self._tool is not None:
            _monitoring.register_callback(self._tool, _monitoring.events.CALL, self._make_callback(words))

    def watch(self, code: CodeType, instruction: int) -> None:
        """Note from now on when this instruction is reached, if Python can tell; `instruction` is its f_lasti."""
        with self._adding:
            if len(self.cells) >= _MAX_SITES:
                self.cells.clear()
                self._codes.clear()
            self._codes[id(code)] = code
            self.cells[id(code), instruction] = [0]
            if self._tool is not None:
                # Twice, because this instruction may have been left alone until now.
                _monitoring.set_local_events(self._tool, code, 0)
                _monitoring.set_local_events(self._tool, code, _monitoring.events.CALL)

    def detach(self) -> None:
        """Note nothing any more, in a process that the program has forked."""
        self.cells.clear()

    def _make_callback(self, words: memoryview) -> Callable[..., Any]:
        find, leave_alone = self.cells.get, _monitoring.DISABLE

        def on_call(code: CodeType, instruction: int, function: object, argument: object) -> Any:
            cell = find((id(code), instruction))
            if cell is None:
                return leave_alone
            cell[0] = words[ENTERED_WORD] = time_ns()
            return None

        return on_call
