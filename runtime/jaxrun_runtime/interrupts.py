"""Ctrl-C in a rank: SIGINT is raised as KeyboardInterrupt in the main thread, but never within a message.

Python raises it once C++ code returns. That code may return with an error, for example a collective whose other ranks
were ended by the same Ctrl-C. Python would then unwind the program to the next `finally` first, past every `except
KeyboardInterrupt`. So from the signal on, a monitor makes Python look for signals before it handles any exception.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from jaxrun_runtime.own_threads import start_thread

_REPEAT_S = 1.0  # the same Ctrl-C may reach a rank from the launcher and from a scheduler

_CAN_WATCH_EXCEPTIONS = hasattr(sys, "monitoring")
_POSTPONE_S = 0.05
_MAX_POSTPONED = 20
_MAX_CHAIN = 100  # a program may have linked its exceptions in a circle
_MONITORING_TOOLS = (4, 3)  # tool ids that Python reserves for no purpose
_PYTHONS_HANDLER = signal.default_int_handler

_installed: Interrupts | None = None


class Interrupts:
    """Raises KeyboardInterrupt at SIGINT while `active`.

    Its handler replaces signal.default_int_handler: asyncio and others compare with that name to find out whether the
    program handles SIGINT itself.
    """

    def __init__(self, on_raise: Callable[[], None] | None = None) -> None:
        """`on_raise` is called each time, before the exception is raised."""
        self.active = False
        self.raised_at: float | None = None  # on the monotonic clock
        self._on_raise = on_raise
        self._pending = False
        self._deferring = False
        self._postponed = 0
        self._handler = self._handle_signal

    def install(self) -> None:
        """Handle SIGINT from now on, in place of any other Interrupts. Call it in the main thread."""
        global _installed
        _installed = self
        signal.default_int_handler = self._handler  # type: ignore[assignment]
        signal.signal(signal.SIGINT, self._handler)
        os.register_at_fork(after_in_child=self._uninstall)

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Delay interrupts until the end of the block, so that no message is left half sent or received."""
        if self._deferring or threading.current_thread() is not threading.main_thread():
            yield
            return
        self._deferring = True
        try:
            yield
        finally:
            self._deferring = False
            if self._pending and self.active:
                self._report()
                raise KeyboardInterrupt

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        if not self.active or (self.raised_at is not None and time.monotonic() - self.raised_at < _REPEAT_S):
            return
        self._pending = self._deferring
        if not self._deferring and not self._postpone():
            self._report()
            raise KeyboardInterrupt

    def _postpone(self) -> bool:
        """Before Python 3.12: delay the interrupt until a `finally` or `except` block ends, at most for a second."""
        if _CAN_WATCH_EXCEPTIONS or sys.exc_info()[1] is None or self._postponed >= _MAX_POSTPONED:
            return False
        self._postponed += 1
        threading.Timer(_POSTPONE_S, os.kill, (os.getpid(), signal.SIGINT)).start()
        return True

    def _report(self) -> None:
        self._pending = False
        self.raised_at = time.monotonic()
        if self._on_raise is not None:
            self._on_raise()

    def _uninstall(self) -> None:
        """Give SIGINT back to Python in a process that the program has forked, unless the program handles it."""
        if signal.default_int_handler is self._handler:
            signal.default_int_handler = _PYTHONS_HANDLER
        if signal.getsignal(signal.SIGINT) is self._handler:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def hold() -> None:
    """Let SIGINT wait until the program begins. Call it first, in the main thread: other threads then block it, too."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})


def raise_in_program(on_raise: Callable[[], None], *, blocked: bool = False) -> None:
    """Raise KeyboardInterrupt at SIGINT from now on, and call `on_raise` before. Call it in the main thread.

    blocked:  the program finds SIGINT blocked
    """
    interrupts = Interrupts(on_raise)
    interrupts.install()
    interrupts.active = True
    _watch_exceptions()
    if not blocked:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _watch_exceptions() -> None:
    """Raise KeyboardInterrupt instead of an error with which C++ code returns after SIGINT.

    Python before 3.12 cannot watch exceptions: there KeyboardInterrupt comes after the error's `finally` blocks.
    """
    monitoring = getattr(sys, "monitoring", None)
    if monitoring is None:
        return
    reading, writing = socket.socketpair()
    writing.setblocking(False)
    signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
    start_thread(_watch, "jaxrun-interrupts", monitoring, reading)
    os.register_at_fork(after_in_child=lambda: _release_wakeup_fd(writing.fileno()))


def _watch(monitoring: Any, signals: socket.socket) -> None:
    """After SIGINT, have a function called at each exception: Python handles signals as it enters a function.

    It reads for as long as the process lives: Python would write to stderr about signals that nobody reads.
    """
    tool = None
    while data := signals.recv(64):
        if signal.SIGINT in data and not was_raised():
            tool = tool or _register_tool(monitoring)
            if tool is not None:
                monitoring.set_events(tool, monitoring.events.RAISE)


def _register_tool(monitoring: Any) -> int | None:
    """Return the id of a tool that makes Python look for signals at each exception; None if all ids are in use."""
    tool = claim_monitoring_tool("jaxrun-interrupts")
    if tool is None:
        return None

    def on_raise(*args: Any) -> None:
        if was_raised():
            monitoring.set_events(tool, 0)

    monitoring.register_callback(tool, monitoring.events.RAISE, on_raise)
    return tool


def claim_monitoring_tool(name: str) -> int | None:
    """Claim a tool id of sys.monitoring (Python 3.12 and later) and return it; None if all are in use."""
    monitoring: Any = sys.monitoring  # type: ignore[attr-defined,unused-ignore]
    tool: int | None = next((tool for tool in _MONITORING_TOOLS if monitoring.get_tool(tool) is None), None)
    if tool is not None:
        monitoring.use_tool_id(tool, name)
    return tool


def _release_wakeup_fd(ours: int) -> None:
    """Stop reporting signals to the rank's wake-up descriptor, in a process that the program has forked."""
    current = signal.set_wakeup_fd(-1)
    if current != ours:
        signal.set_wakeup_fd(current)


def deferred() -> contextlib.AbstractContextManager[None]:
    """Return Interrupts.deferred() of the installed Interrupts; does nothing if none is installed."""
    return _installed.deferred() if _installed is not None else contextlib.nullcontext()


def was_raised() -> bool:
    """Whether a KeyboardInterrupt has been raised in this process."""
    return _installed is not None and _installed.raised_at is not None


def find_in_chain(error: BaseException) -> KeyboardInterrupt | None:
    """Return the KeyboardInterrupt which is this error, or during whose handling it was raised."""
    current: BaseException | None = error
    for _ in range(_MAX_CHAIN):
        if current is None or isinstance(current, KeyboardInterrupt):
            return current
        current = current.__cause__ or current.__context__
    return None


def deactivate() -> None:
    """Ignore SIGINT from now on: the program has ended."""
    if _installed is not None:
        _installed.active = False
