"""When cross-process calls are entered: JAX's C++ dispatch tells of a call only when it has been made.

Python's own monitoring (sys.monitoring, Python 3.12) tells when a call instruction is reached. It is switched on for
those instructions alone at which a cross-process program has been dispatched before.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from time import time_ns
from types import CodeType
from typing import Any

from jaxrun.protocol.flight_file import ENTERED_WORD

_TOOLS = (4, 3)  # the numbers that Python leaves to tools of no special kind
_monitoring: Any = getattr(sys, "monitoring", None)
_MAX_SITES = 10_000  # a program that makes code as it runs must not fill the memory


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
        self._tool = _claim_tool() if _monitoring else None
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


def _claim_tool() -> int | None:
    """Return a number of ours by which monitoring works; None if others have them, or this Python cannot."""
    for tool in _TOOLS:
        if _monitoring.get_tool(tool) is None:
            _monitoring.use_tool_id(tool, "jaxrun")
            if _tells_watched_calls(tool):
                return tool
            _monitoring.free_tool_id(tool)
            return None
    return None


def _tells_watched_calls(tool: int) -> bool:
    """Try whether one call of a function can be left alone and another not: in the first releases of 3.12 it cannot."""
    told: list[object] = []

    def watched() -> None:
        pass

    def other() -> None:
        pass

    def on_call(code: CodeType, instruction: int, function: object, argument: object) -> Any:
        told.append(function)
        return None if function is watched else _monitoring.DISABLE

    def caller() -> None:
        for _ in "two":
            other()
            watched()

    _monitoring.register_callback(tool, _monitoring.events.CALL, on_call)
    _monitoring.set_local_events(tool, caller.__code__, _monitoring.events.CALL)
    caller()
    _monitoring.set_local_events(tool, caller.__code__, 0)
    return told == [other, watched, watched, watched]
