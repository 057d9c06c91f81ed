"""A debugger in a rank that is used from the parent's terminal: for --pdb, and for breakpoint() in a test."""

from __future__ import annotations

import contextlib
import io
import pdb
from types import TracebackType
from typing import Any

from jaxrun.protocol.pytest_messages import DebuggerInput, DebuggerOutput, DebuggerReadRequest
from jaxrun_runtime.gang import calls
from jaxrun_runtime.gang.calls import CallerConnection


class RelayedPdb(pdb.Pdb):
    """A pdb that reads from and writes to the parent's terminal."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        parent = calls.current_call()
        relayed = {"stdin": _DebuggerStdin(parent), "stdout": _DebuggerStdout(parent)}
        super().__init__(*arguments, **{**options, **relayed, "nosigint": True})


def post_mortem(error: BaseException) -> None:
    """Open a debugger where `error` was raised; returns when the user leaves it."""
    debugger = RelayedPdb()
    debugger.reset()
    frames = error.__traceback__
    while frames is not None and frames.tb_next is not None and _is_pytest_frame(frames):
        frames = frames.tb_next
    with contextlib.suppress(calls.CallEnded):
        debugger.interaction(None, frames)


def _is_pytest_frame(frames: TracebackType) -> bool:
    """Whether the frame is pytest's own: these are above all frames of the user's."""
    return str(frames.tb_frame.f_globals.get("__name__", "")).partition(".")[0] in ("_pytest", "pluggy")


class _DebuggerStdin(io.TextIOBase):
    """Reads lines that the user types in the parent's terminal."""

    def __init__(self, parent: CallerConnection) -> None:
        self._parent = parent

    def readable(self) -> bool:
        return True

    def readline(self, size: int | None = -1) -> str:  # type: ignore[override]
        self._parent.send(DebuggerReadRequest())
        answer = self._parent.receive()
        return answer.line if isinstance(answer, DebuggerInput) else ""


class _DebuggerStdout(io.TextIOBase):
    """Writes to the parent's terminal."""

    def __init__(self, parent: CallerConnection) -> None:
        self._parent = parent

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if text:
            self._parent.send(DebuggerOutput(text))
        return len(text)
