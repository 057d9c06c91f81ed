"""A debugger in a test that is used from the terminal of the process that runs pytest: for --pdb and breakpoint()."""

from __future__ import annotations

import contextlib
import pdb
from types import TracebackType
from typing import Any

from jaxrun.protocol.debugger_messages import DebuggerInput, DebuggerOutput, DebuggerReadRequest
from jaxrun_runtime import debugger
from jaxrun_runtime.gang import calls
from jaxrun_runtime.gang.calls import CallerConnection


class RelayedPdb(pdb.Pdb):
    """A pdb that reads from and writes to the parent's terminal."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{**options, **debugger.relayed(_ParentTerminal(calls.current_call()))})


def post_mortem(error: BaseException) -> None:
    """Open a debugger where `error` was raised; returns when the user leaves it."""
    with contextlib.suppress(calls.CallEnded):
        debugger.inspect_error(RelayedPdb(), error, _is_pytest_frame)


def _is_pytest_frame(frames: TracebackType) -> bool:
    """Whether the frame is pytest's own: these are above all frames of the user's."""
    return str(frames.tb_frame.f_globals.get("__name__", "")).partition(".")[0] in ("_pytest", "pluggy")


class _ParentTerminal:
    def __init__(self, parent: CallerConnection) -> None:
        self._parent = parent

    def write(self, text: str) -> None:
        self._parent.send(DebuggerOutput(self._parent.rank, text))

    def read_line(self) -> str:
        self._parent.send(DebuggerReadRequest(self._parent.rank))
        answer = self._parent.receive()
        return answer.line if isinstance(answer, DebuggerInput) else ""
