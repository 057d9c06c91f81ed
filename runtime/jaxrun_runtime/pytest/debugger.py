"""A debugger in a rank, at the parent's terminal: for --pdb, and for breakpoint() in a test."""

from __future__ import annotations

import contextlib
import io
import pdb
from types import TracebackType
from typing import Any

from jaxrun.protocol.pytest_messages import DebuggerInput, DebuggerOutput, DebuggerReadRequest
from jaxrun_runtime import gang_worker
from jaxrun_runtime.gang_worker import ParentConnection


class RelayedPdb(pdb.Pdb):
    """A pdb that reads and writes by way of the conversation with the parent."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        talk = gang_worker.current_call()
        super().__init__(
            *arguments, **{**options, "stdin": _DebuggerStdin(talk), "stdout": _DebuggerStdout(talk), "nosigint": True}
        )


def post_mortem(error: BaseException) -> None:
    """Stand where `error` was raised, until the user goes on."""
    debugger = RelayedPdb()
    debugger.reset()
    frames = error.__traceback__
    while frames is not None and frames.tb_next is not None and _is_scaffold(frames):
        frames = frames.tb_next
    with contextlib.suppress(gang_worker.CallEnded):
        debugger.interaction(None, frames)


def _is_scaffold(frames: TracebackType) -> bool:
    """Whether it is a frame of pytest's, which stand above all that is the user's."""
    return str(frames.tb_frame.f_globals.get("__name__", "")).partition(".")[0] in ("_pytest", "pluggy")


class _DebuggerStdin(io.TextIOBase):
    """What is typed in the parent."""

    def __init__(self, talk: ParentConnection) -> None:
        self._talk = talk

    def readable(self) -> bool:
        return True

    def readline(self, size: int | None = -1) -> str:  # type: ignore[override]
        self._talk.send(DebuggerReadRequest())
        answer = self._talk.receive()
        return answer.line if isinstance(answer, DebuggerInput) else ""


class _DebuggerStdout(io.TextIOBase):
    """What is shown in the parent."""

    def __init__(self, talk: ParentConnection) -> None:
        self._talk = talk

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if text:
            self._talk.send(DebuggerOutput(text))
        return len(text)
