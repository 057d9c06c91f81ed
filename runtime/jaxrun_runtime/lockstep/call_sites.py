"""Finds where in the user's program a cross-process call is made, and when it is entered.

The place is the innermost frame of the program itself. Wrappers of libraries may be below it, such as flax's nnx.jit,
in which one line makes all calls. JAX's C++ dispatch reports a call only after it was made. Python's own monitoring
(sys.monitoring, from Python 3.12.2 on) reports when a call instruction is reached, which may be in a library. It is on
only for instructions at which a cross-process program has been dispatched before.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from time import time_ns
from types import CodeType, FrameType
from typing import Any

from jaxrun import stack_frames
from jaxrun.protocol.flight_file import ENTERED_WORD
from jaxrun_runtime.interrupts import claim_monitoring_tool

_MAX_FRAMES = 8  # the most frames of the user in a site's stack
# Limits, so that a program that generates code does not fill the memory.
_MAX_FILES = 10_000
_MAX_SITES = 10_000
_MAX_DISPATCHERS = 1000
# Before Python 3.12.2 a single call instruction of a function cannot be disabled.
_monitoring: Any = getattr(sys, "monitoring", None) if sys.version_info >= (3, 12, 2) else None


class CallSites:
    """Numbers the call sites from 1, and calls `on_new(number, stack)` for each new one.

    The stack is "file:line function" for up to 8 of the user's frames, the innermost first, at the line's first call.
    """

    def __init__(self, on_new: Callable[[int, list[str]], None]) -> None:
        self._on_new = on_new
        # By id(code) and f_lasti, because hashing a code object takes long; `_codes` keeps the ids from being reused.
        # Only frames of the program are keys: a frame of a library may be below several lines of the program.
        self.known: dict[tuple[int, int], int] = {}
        self._codes: dict[int, CodeType] = {}
        self._numbers: dict[tuple[str, ...], int] = {}
        self._places = [""]
        self._adding = threading.RLock()

    def find(self, frame: FrameType | None) -> int:
        """Return the number of the site: the first frame of the program, from `frame` outwards.

        In a thread that runs only libraries, the site is the first frame that is neither JAX's nor jaxrun's. Returns 0
        if there is none.
        """
        is_programs, inner, at = _is_programs, frame, frame
        while at is not None and not is_programs[at.f_code.co_filename]:
            at = at.f_back
        if at is not None:
            number = self.known.get((id(at.f_code), at.f_lasti))
            return number if number is not None else self._add(at)
        while inner is not None and _is_internal(inner.f_code.co_filename):
            inner = inner.f_back
        return self._number(_format_stack(inner, _is_internal)) if inner is not None else 0

    def place(self, number: int) -> str:
        """Return a site as text, `train.py:88 train_step`; "" for 0."""
        return self._places[number]

    def _add(self, frame: FrameType) -> int:
        with self._adding:
            number = self._number(_format_stack(frame, lambda file: not _is_programs[file]))
            if len(self.known) >= _MAX_SITES:
                self.known.clear()
                self._codes.clear()
            self._codes[id(frame.f_code)] = frame.f_code
            self.known[id(frame.f_code), frame.f_lasti] = number
            return number

    def _number(self, stack: list[str]) -> int:
        with self._adding:
            number = self._numbers.get(tuple(stack), 0)
            if number or len(self._places) > _MAX_SITES:
                return number
            number = self._numbers[tuple(stack)] = len(self._places)
            self._places.append(os.path.basename(stack[0]))
            self._on_new(number, stack)
            return number


def trim_to_user_frames(error: BaseException) -> None:
    """Cut the frames below the program's innermost frame off the traceback.

    If the traceback has no frame of the program, cut only JAX's and jaxrun's frames off.
    """
    if not _trim(error, _is_programs.__getitem__):
        trim_internal_frames(error)


def trim_internal_frames(error: BaseException) -> None:
    """Cut JAX's and jaxrun's frames off the end of the traceback, and drop JAX's note about filtered frames."""
    _trim(error, lambda file: not _is_internal(file))


def _trim(error: BaseException, is_kept: Callable[[str], bool]) -> bool:
    """Cut the traceback after the last frame whose file `is_kept`. Returns whether there is such a frame."""
    last, entry = None, error.__traceback__
    while entry is not None:
        if is_kept(entry.tb_frame.f_code.co_filename):
            last = entry
        entry = entry.tb_next
    if last is not None:
        last.tb_next = None
    notes = getattr(error, "__notes__", None)
    if isinstance(notes, list):
        notes[:] = [note for note in notes if "JAX_TRACEBACK_FILTERING" not in str(note)]
    return last is not None


def is_internal_source(source: str) -> bool:
    """Whether a function is JAX's or jaxrun's; `source` is "exp at /…/jax/_src/numpy/ufuncs.py:88"."""
    return _is_internal(source.rpartition(" at ")[2].rpartition(":")[0])


def _format_stack(frame: FrameType | None, is_left_out: Callable[[str], bool]) -> list[str]:
    stack: list[str] = []
    while frame is not None and len(stack) < _MAX_FRAMES:
        if not is_left_out(frame.f_code.co_filename):
            stack.append(f"{_absolute(frame.f_code.co_filename)}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return stack


class _ProgramFiles(dict[str, bool]):
    """A cache of whether a file is the program's, which may itself be an installed package. Calls look it up often."""

    def __missing__(self, file: str) -> bool:
        if len(self) >= _MAX_FILES:
            self.clear()
        package = stack_frames.find_package(getattr(sys.modules.get("__main__"), "__file__", None) or "")
        self[file] = stack_frames.is_programs(file) or (bool(package) and file.startswith(package))
        return self[file]


_is_programs = _ProgramFiles()


def _is_internal(filename: str) -> bool:
    return stack_frames.is_ours(filename) or stack_frames.is_jax(filename)


def _absolute(filename: str) -> str:
    return filename if filename.startswith("<") else os.path.abspath(filename)


# ---- when calls are entered


class EntryCell:
    """The latest entry of one call instruction, which may also make calls that are not cross-process.

    entered:     nanoseconds since the epoch; 0 if unknown. A reader resets it to 0
    is_shared:   whether the instruction also makes other calls; the next two fields are used only then
    function:    id of the function that was called last
    dispatchers: ids of the functions that have made cross-process calls from here
    """

    __slots__ = ("dispatchers", "entered", "function", "is_shared")

    def __init__(self, *, is_shared: bool) -> None:
        self.is_shared = is_shared
        self.entered = self.function = 0
        self.dispatchers: set[int] = set()

    def note_shared(self, function: int, words: memoryview) -> None:
        """Note an entry that may not be a cross-process call."""
        self.is_shared = True
        self.function, self.entered = function, time_ns()
        if function in self.dispatchers:
            words[ENTERED_WORD] = self.entered

    def add_dispatcher(self) -> None:
        """Note that the function that was called last has made a cross-process call."""
        if len(self.dispatchers) >= _MAX_DISPATCHERS:
            self.dispatchers.clear()
        self.dispatchers.add(self.function)


class CallEntries:
    """Notes when watched call instructions are reached, in their cells and in the flight recorder's header.

    The header says that a rank has come to its next cross-process call. The same line, in a library's wrapper or in the
    program, may make local calls, too. So only functions that have made a cross-process call from there count.

    cells:  by id(code) and f_lasti
    """

    def __init__(self, words: memoryview) -> None:
        """`words`: the flight recorder's."""
        self.cells: dict[tuple[int, int], EntryCell] = {}
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
            self.cells[id(code), instruction] = EntryCell(is_shared=not _is_programs[code.co_filename])
            if self._tool is not None:
                # Set twice, because this instruction may have been disabled until now.
                _monitoring.set_local_events(self._tool, code, 0)
                _monitoring.set_local_events(self._tool, code, _monitoring.events.CALL)

    def detach(self) -> None:
        """Stop noting entries, in a process that the program has forked."""
        self.cells.clear()

    def _make_callback(self, words: memoryview) -> Callable[..., Any]:
        find, leave_alone = self.cells.get, _monitoring.DISABLE

        def on_call(code: CodeType, instruction: int, function: object, argument: object) -> Any:
            cell = find((id(code), instruction))
            if cell is None:
                return leave_alone
            if cell.is_shared or cell.entered:  # no cross-process call followed the last entry
                cell.note_shared(id(function), words)
            else:
                cell.entered = words[ENTERED_WORD] = time_ns()
            return None

        return on_call
