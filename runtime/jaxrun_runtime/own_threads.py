"""Starts jaxrun's own threads in a rank, which block the signals that are meant for the program.

Use it for threads that run jaxrun's code only. Threads that the code of a library starts there would block them, too.

The kernel gives a signal to any thread that does not block it, often to one that wakes at that moment. Python runs the
program's handler in the main thread, which does not wake for a signal that another thread took: with SIGTERM during a
time.sleep(600), the handler would run after ten minutes.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any

from jaxrun.protocol.env import FAULT_HANDLER_SIGNAL

# A thread that has caused one of these signals gets it itself.
_CAUSED_BY_THREAD = frozenset(
    {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT, signal.SIGTRAP, signal.SIGSYS}
)


def start_thread(target: Callable[..., Any], name: str, *args: Any) -> None:
    """Start a daemon thread that calls `target` with these arguments, and blocks the program's signals."""
    thread = threading.Thread(target=target, args=args, name=name, daemon=True)
    blocked = signal.valid_signals() - _CAUSED_BY_THREAD - {FAULT_HANDLER_SIGNAL}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)  # the new thread inherits it
    try:
        thread.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
