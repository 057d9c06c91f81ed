"""The end of a worker: what Python does at exit, in Python's order, but nobody waits in JAX's exit barrier.

A process that fails must not wait for the others, and rank 0, whose coordinator the others need, must not leave before
them: so every worker says that it is done, and leaves when it is told to.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
from typing import NoReturn

from jaxrun.contract import Done, Failed, Leave, WorkerEnv

from . import jaxprivate
from .link import AgentGone, Link


def succeed(env: WorkerEnv, link: Link) -> NoReturn:
    """Run the program's remaining threads and exit handlers, say Done, wait for Leave, end with status 0."""
    _join_threads()
    free = jaxprivate.forget_exit_barrier()
    if free:
        _run_exit_handlers()
    _flush()
    link.send(Done(env.rank, time.time()))
    with contextlib.suppress(AgentGone):
        link.receive(Leave)
    if not free:
        _run_exit_handlers()
    leave(0)


def fail(words: Failed, link: Link) -> NoReturn:
    """Say the last words first, so that nobody waits; then run the exit handlers and end with the words' status.

    Threads are not waited for: they may be waiting for what this process will never send.
    """
    with contextlib.suppress(AgentGone):
        link.send(words)
    if jaxprivate.forget_exit_barrier():
        _run_exit_handlers()
    leave(words.status)


def leave(status: int) -> NoReturn:
    """End now; tearing the interpreter down would cost a tenth of a second and change nothing."""
    _flush()
    os._exit(status)


def _join_threads() -> None:
    shutdown = getattr(threading, "_shutdown", None)  # what Py_Finalize calls first
    if shutdown is not None:
        shutdown()


def _run_exit_handlers() -> None:
    run = getattr(atexit, "_run_exitfuncs", None)  # what Py_Finalize calls next
    if run is not None:
        run()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
