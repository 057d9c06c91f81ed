"""Debuggers in a rank that read from and write to a terminal of another process.

In a job, breakpoint(), pdb.set_trace() and --pdb use the terminal of jaxrun, one rank after another. In a test they use
the terminal of the process that runs pytest (pytest/rank_gang.py).
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import sys
import threading
from collections.abc import Callable, Sequence
from types import FrameType, ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from jaxrun.protocol.debugger_messages import (
    DebuggerClosed,
    DebuggerDecision,
    DebuggerOutput,
    DebuggerReadRequest,
    DebuggerRequest,
    TerminalDecision,
)
from jaxrun_runtime import jax_private
from jaxrun_runtime.agent_channel import AgentChannel, AgentDisconnected
from jaxrun_runtime.import_watch import call_after_import

if TYPE_CHECKING:
    import pdb

_QUIT = "BdbQuit"  # the exception that the command q raises


class LineTerminal(Protocol):
    """A terminal for a debugger."""

    def write(self, text: str) -> None: ...

    def read_line(self) -> str:
        """Return a line with its newline; empty at the end of the input."""


def relayed(terminal: LineTerminal) -> dict[str, Any]:
    """Return arguments for a pdb.Pdb that reads from and writes to `terminal`."""
    stream = _DebuggerStream(terminal)
    return {"stdin": stream, "stdout": stream, "nosigint": True}


def inspect_error(
    debugger: pdb.Pdb, error: BaseException, is_hidden: Callable[[TracebackType], bool] = lambda _: False
) -> None:
    """Open the debugger where `error` was raised; outer frames for which `is_hidden` is true are left out."""
    debugger.reset()
    frames = error.__traceback__
    while frames is not None and frames.tb_next is not None and is_hidden(frames):
        frames = frames.tb_next
    debugger.interaction(None, frames)


class _DebuggerStream(io.TextIOBase):
    def __init__(self, terminal: LineTerminal) -> None:
        self._terminal = terminal

    def readable(self) -> bool:
        return True

    def readline(self, size: int | None = -1) -> str:  # type: ignore[override]
        return self._terminal.read_line()

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if text:
            self._terminal.write(text)
        return len(text)


# ---- in a job


class NoTerminalError(RuntimeError):
    """Raised at a breakpoint for which there is no terminal, with the reason."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(f"nobody can use this breakpoint: {reason}; PYTHONBREAKPOINT=0 skips each breakpoint()")


def relay_debuggers(channel: AgentChannel, rank: int) -> None:
    """Let every pdb.Pdb of this process, and jax.debug.breakpoint, use jaxrun's terminal."""
    terminal = ChannelTerminal(channel, rank)
    jax_private.replace_breakpoint_debugger(lambda original: _relay_breakpoints(original, terminal))
    call_after_import("pdb", lambda module: _replace_pdb(module, terminal))  # importing pdb takes 10 ms


def can_debug(error: BaseException) -> bool:
    """Whether --pdb opens a debugger for a program that ended by this error."""
    return isinstance(error, Exception) and type(error).__name__ not in (_QUIT, NoTerminalError.__name__)


def trim_debugger_frames(error: BaseException) -> None:
    """Remove pdb's frames from the traceback of an exception that pdb itself raised."""
    if type(error).__name__ not in (_QUIT, NoTerminalError.__name__):
        return
    frames = error.__traceback__
    while frames is not None and frames.tb_next is not None:
        if frames.tb_next.tb_frame.f_globals.get("__name__") in ("pdb", "bdb"):
            frames.tb_next = None
        frames = frames.tb_next
    if type(error).__name__ == _QUIT:
        error.add_note("q left the debugger and ended the program; c continues the program")


def post_mortem(error: BaseException, channel: AgentChannel) -> None:
    """Wait for the head's decision about a failure that was reported; open a debugger if this rank is the culprit."""
    if channel.receive(DebuggerDecision).granted:
        import pdb

        inspect_error(pdb.Pdb(), error)


class ChannelTerminal:
    """jaxrun's terminal, reached through the agent."""

    def __init__(self, channel: AgentChannel, rank: int) -> None:
        self._channel = channel
        self._rank = rank
        self._held = False
        self._numbers = itertools.count(1)
        self._opening = threading.RLock()  # held by the one thread that waits for the terminal, for all

    def open(self, place: str) -> None:
        """Wait until this rank has the terminal. Raises NoTerminalError if it cannot get one."""
        with self._opening:
            if self._held:
                return
            decision = self._request(DebuggerRequest(self._rank, place, next(self._numbers)))
        if not decision.granted:
            raise NoTerminalError(decision.reason)

    def _request(self, request: DebuggerRequest) -> TerminalDecision:
        try:
            self._channel.send(request)
            decision = self._channel.receive_terminal_decision(request.number)
            self._held = decision.granted
        except BaseException:
            self.abandon()
            raise
        return decision

    def close(self) -> None:
        """Give the terminal up, so that other ranks can get it."""
        self._held = False
        self._channel.send(DebuggerClosed(self._rank))

    def abandon(self) -> None:
        """Give the terminal up, or the wait for it, because of an exception, which a signal handler may have raised."""
        with contextlib.suppress(AgentDisconnected):
            self.close()

    def write(self, text: str) -> None:
        self._channel.send(DebuggerOutput(self._rank, text))

    def read_line(self) -> str:
        number = next(self._numbers)
        self._channel.send(DebuggerReadRequest(self._rank, number))
        return self._channel.receive_terminal_line(number)

    @property
    def is_usable(self) -> bool:
        """Whether this process is the rank itself, not a process that the program has forked."""
        return self._channel.in_owner_process()


def _relay_breakpoints(original: Callable[..., None], terminal: ChannelTerminal) -> Callable[..., None]:
    """Return what JAX calls at each jax.debug.breakpoint that is reached, also from threads of its own.

    An exception would become an error of the computation, with many lines of JAX's: a breakpoint that nobody can use is
    passed, with one line.
    """

    def debug(frames: Sequence[Any], thread_id: int | None, **options: Any) -> None:
        if not terminal.is_usable or options.get("stdin") or options.get("stdout"):
            original(frames, thread_id, **options)
            return
        place = f"{os.path.basename(frames[0].filename)}:{frames[0].lineno}" if frames else ""
        try:
            terminal.open(place)
        except NoTerminalError as error:
            print(f"jaxrun: jax.debug.breakpoint at {place} is passed: {error.reason}", file=sys.stderr)
            return
        stream = _DebuggerStream(terminal)
        try:
            original(frames, thread_id, **options, stdin=stream, stdout=stream)
        finally:
            terminal.close()

    return debug


def _replace_pdb(module: ModuleType, terminal: ChannelTerminal) -> None:
    original: Any = module.Pdb

    class JobPdb(original):  # type: ignore[misc]
        """A Pdb that holds the terminal from a breakpoint until the program continues.

        It behaves like any Pdb if it gets its own streams, or in a process that the program has forked.
        """

        def __init__(self, *arguments: Any, **options: Any) -> None:
            has_streams = len(arguments) > 1 or options.get("stdin") or options.get("stdout")
            self._relays = terminal.is_usable and not has_streams
            self._leaves = False
            super().__init__(*arguments, **({**options, **relayed(terminal)} if self._relays else options))

        def set_trace(self, frame: FrameType | None = None, **more: Any) -> None:
            frame = frame or sys._getframe().f_back
            self._open(frame)
            super().set_trace(frame, **more)

        def interaction(self, frame: FrameType | None, *more: Any) -> None:
            self._open(frame)
            self._leaves = frame is None  # a post mortem ends with its one interaction
            try:
                super().interaction(frame, *more)
            except BaseException:
                if self._relays:
                    terminal.abandon()
                raise
            if self._relays and self._leaves:
                terminal.close()

        def set_continue(self) -> None:
            self._leaves = True
            super().set_continue()

        def set_quit(self) -> None:
            self._leaves = True
            super().set_quit()

        def _open(self, frame: FrameType | None) -> None:
            if self._relays:
                terminal.open(_place(frame))

    JobPdb.__name__ = JobPdb.__qualname__ = original.__name__
    module.Pdb = JobPdb  # type: ignore[attr-defined]


def _place(frame: FrameType | None) -> str:
    if frame is None:
        return ""
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} {frame.f_code.co_name}"
