"""Writes the stacks of this process's threads into a file when the agent asks for them, or at a fatal signal.

One of jaxrun's threads waits for STACKS_SIGNAL. All other threads block this signal, so that no system call of the
program is interrupted. While the thread writes, it holds the GIL, so no frame changes. If C++ code holds the GIL for
long, the agent sends FAULT_HANDLER_SIGNAL. Python's fault handler needs no GIL, but reads frames that may be changing.
This can crash a rank before Python 3.12.8 and 3.13.1 (https://github.com/python/cpython/issues/123967).

Below the frames of a thread stand lines about the exception that it handles and what it waits for in JAX's coordination
service (protocol/error_chain.py). The fault handler does not write them.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from types import FrameType

from jaxrun.protocol.env import FAULT_HANDLER_SIGNAL, STACKS_SIGNAL
from jaxrun.protocol.error_chain import ErrorChain, ThreadNotes, format_notes
from jaxrun_runtime import background_saves, coordination_waits, error_chains, future_errors
from jaxrun_runtime.own_threads import start_thread

# The limits of Python's fault handler.
_MAX_THREADS = 100
_MAX_FRAMES = 100
_MAX_NAME_LENGTH = 80  # characters

_observers: list[Callable[[FrameType | None], None]] = []


def write_on_signal(fd: int) -> None:
    """Write stacks to `fd` from now on. Call it in the main thread, before there are others."""
    os.set_inheritable(fd, False)
    faulthandler.enable(fd, all_threads=True)
    faulthandler.register(FAULT_HANDLER_SIGNAL, fd, all_threads=True)
    faulthandler.register(STACKS_SIGNAL, fd, all_threads=True)  # in case a thread of the program unblocks the signal
    signal.pthread_sigmask(signal.SIG_BLOCK, {STACKS_SIGNAL})
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {FAULT_HANDLER_SIGNAL})  # as whoever started jaxrun may have blocked it
    start_thread(_serve, "jaxrun-stacks", fd)


def observe_main_thread(observer: Callable[[FrameType | None], None]) -> None:
    """Call `observer` with the main thread's innermost frame before each time that stacks are written."""
    _observers.append(observer)


def give_up_in_fork() -> None:
    """Stop writing stacks, in a process that the program has forked."""
    faulthandler.unregister(STACKS_SIGNAL)
    faulthandler.unregister(FAULT_HANDLER_SIGNAL)


def _serve(fd: int) -> None:
    while signal.sigwait({STACKS_SIGNAL}):
        while signal.sigtimedwait({STACKS_SIGNAL}, 0):
            pass  # one answer serves all requests so far
        for observer in _observers:
            with contextlib.suppress(Exception):
                observer(sys._current_frames().get(threading.main_thread().ident or 0))
        os.write(fd, describe_threads().encode("ascii", "backslashreplace"))


def describe_threads() -> str:
    """Return the stacks of all threads except the caller's, in the fault handler's format, the main thread's last."""
    # Keep only text: frames would keep the objects of the program's functions alive.
    found = sys._current_frames()
    found.pop(threading.get_ident(), None)
    main = found.pop(threading.main_thread().ident or 0, None)
    main_ident = threading.main_thread().ident or 0
    names, notes = _thread_names(), _thread_notes(main_ident)
    shown = list(found.items())[: _MAX_THREADS - 1]
    blocks = [_describe("Thread", ident, names.get(ident, ""), frame, notes(ident)) for ident, frame in shown]
    if main is not None:
        blocks.append(_describe("Current thread", main_ident, "", main, notes(main_ident)))
    return "\n".join(blocks)


def _thread_notes(main: int) -> Callable[[int], list[str]]:
    """Return a function that returns the lines about the thread with an identifier."""
    handled: Mapping[int, ErrorChain] = {}
    kept: ErrorChain = ()
    with contextlib.suppress(Exception):  # whatever the program has made of its exceptions, its frames are shown
        handled = error_chains.handled_errors()
    with contextlib.suppress(Exception):
        if (error := future_errors.oldest_error()) is not None:
            kept = error_chains.describe_chain(error, error_chains.plain_text)
    waits = coordination_waits.current_waits()

    def lines(ident: int) -> list[str]:
        save = background_saves.last_save() if ident == main else None
        return format_notes(ThreadNotes(handled.get(ident, ()), waits.get(ident), save, kept if ident == main else ()))

    return lines


def _thread_names() -> dict[int, str]:
    """Return the names of threads by identifier, such as `[Loader-1] `, or `[Loader-1, daemon] ` for a daemon."""
    # threading.enumerate would wait for a lock.
    threads = dict(getattr(threading, "_active", {}))
    return {ident: f"[{_clip(thread.name)}{', daemon' * thread.daemon}] " for ident, thread in threads.items()}


def _clip(name: object) -> str:
    return "".join(c if c.isprintable() and c not in "[]" else "?" for c in str(name)[:_MAX_NAME_LENGTH])


def _describe(title: str, ident: int, name: str, frame: FrameType | None, notes: list[str]) -> str:
    lines = [f"{title} {ident:#018x} {name}(most recent call first):"]
    while frame is not None and len(lines) <= _MAX_FRAMES:
        code = frame.f_code
        line = "???" if frame.f_lineno is None else frame.f_lineno
        lines.append(f'  File "{code.co_filename}", line {line} in {code.co_name}')
        frame = frame.f_back
    return "\n".join([*lines, *(["  ..."] if frame is not None else []), *notes, ""])
