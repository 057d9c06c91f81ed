"""A debugger in a rank that is used from a terminal elsewhere: that of jaxrun, or of the process that runs pytest."""

from __future__ import annotations

import io
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import pdb


class LineTerminal(Protocol):
    """Where somebody uses the debugger."""

    def write(self, text: str) -> None: ...

    def read_line(self) -> str:
        """A line with its newline; empty at the end of the input."""


def relayed(terminal: LineTerminal) -> dict[str, Any]:
    """Arguments of a pdb.Pdb that reads from and writes to `terminal`."""
    return {"stdin": _DebuggerStdin(terminal), "stdout": _DebuggerStdout(terminal), "nosigint": True}


def inspect_error(
    debugger: pdb.Pdb, error: BaseException, is_hidden: Callable[[TracebackType], bool] = lambda _: False
) -> None:
    """Open the debugger where `error` was raised; outer frames for which `is_hidden` is true are left out."""
    debugger.reset()
    frames = error.__traceback__
    while frames is not None and frames.tb_next is not None and is_hidden(frames):
        frames = frames.tb_next
    debugger.interaction(None, frames)


class _DebuggerStdin(io.TextIOBase):
    def __init__(self, terminal: LineTerminal) -> None:
        self._terminal = terminal

    def readable(self) -> bool:
        return True

    def readline(self, size: int | None = -1) -> str:  # type: ignore[override]
        return self._terminal.read_line()


class _DebuggerStdout(io.TextIOBase):
    def __init__(self, terminal: LineTerminal) -> None:
        self._terminal = terminal

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if text:
            self._terminal.write(text)
        return len(text)
