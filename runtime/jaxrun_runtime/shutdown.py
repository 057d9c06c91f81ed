"""The end of a worker: what Python does at exit, in Python's order, but nobody waits in JAX's exit barrier.

A process that fails must not wait for the others, and rank 0, whose coordinator the others need, must not
leave before them: so every worker says that it is done, and leaves when it is told to.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import os
import sys
import threading
import time
from typing import NoReturn

from jaxrun.errors import ProtocolError
from jaxrun.protocol.env import WorkerEnv
from jaxrun.protocol.worker_messages import Done, Exit, Failed
from jaxrun_runtime import jax_private, linux
from jaxrun_runtime.agent_channel import AgentChannel, AgentDisconnected

_WITH_BUFFER = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)


def exit_with_success(env: WorkerEnv, link: AgentChannel) -> NoReturn:
    """Run the program's remaining threads and exit handlers, say Done, wait for Leave, end with status 0."""
    _join_threads()
    jax_private.remove_exit_barrier()
    _run_exit_handlers()
    _finalize_program()
    _finalize_mpi()
    with contextlib.suppress(AgentDisconnected):  # a program may close all descriptors, and has still succeeded
        link.send(Done(env.rank, time.time()))
        link.receive(Exit)
    exit_now(0)


def exit_with_failure(env: WorkerEnv, words: Failed, link: AgentChannel) -> NoReturn:
    """Say the last words, so that nobody waits, then run the exit handlers and end with the words' status.

    Threads are not waited for: they may be waiting for what this process will never send.
    """
    with contextlib.suppress(AgentDisconnected):
        link.send(words)
    if jax_private.remove_exit_barrier():
        _run_exit_handlers()
    _finalize_program()
    if env.rank == 0 and env.size > 1:  # it holds the coordinator, and without it JAX aborts the others
        with contextlib.suppress(AgentDisconnected, ProtocolError):
            link.receive(Exit)
    exit_now(words.status)


def exit_now(status: int) -> NoReturn:
    """End now; what tearing the interpreter down does besides takes a tenth of a second for nothing."""
    _flush_standard_streams()
    os._exit(status)


def _join_threads() -> None:
    shutdown = getattr(threading, "_shutdown", None)  # what Py_Finalize calls first
    if shutdown is not None:
        shutdown()


def _run_exit_handlers() -> None:
    run = getattr(atexit, "_run_exitfuncs", None)  # what Py_Finalize calls next
    if run is not None:
        run()


def _finalize_mpi() -> None:
    """What mpi4py leaves to the interpreter's very end, if the program has used it and all its ranks end well."""
    mpi4py, mpi = sys.modules.get("mpi4py"), sys.modules.get("mpi4py.MPI")
    if mpi is None or getattr(getattr(mpi4py, "rc", None), "finalize", None) is False:
        return
    if mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()


def _finalize_program() -> None:
    """Write out the files that the program left open and finalize its objects, as Py_Finalize does next."""
    for found in gc.get_objects():
        # Not isinstance, which runs the code of objects that pose as others.
        if issubclass(type(found), _WITH_BUFFER):
            with contextlib.suppress(Exception):
                found.flush()
    sys.modules.pop("__main__", None)
    gc.collect()
    _flush_standard_streams()
    linux.flush_c_output()


def _flush_standard_streams() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
