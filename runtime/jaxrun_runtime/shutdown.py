"""Ends a worker: does what Python does at exit, in Python's order, but without JAX's exit barrier.

A worker that fails must not wait for the others, and rank 0 must not exit before them, because they need its
coordinator. So a worker sends Done or Failed, and the head decides when it may exit.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import NoReturn

from jaxrun.errors import ProtocolError
from jaxrun.protocol.env import WorkerEnv
from jaxrun.protocol.names import COORDINATOR_ADDRESS
from jaxrun.protocol.worker_messages import Done, Exit, Failed
from jaxrun_runtime import interrupts, jax_private, linux, signal_handlers
from jaxrun_runtime.agent_channel import AgentChannel, AgentDisconnected

_BUFFERED_FILES = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)


def exit_with_success(env: WorkerEnv, channel: AgentChannel) -> NoReturn:
    """Run the program's remaining threads and exit handlers, send Done, wait for Exit, exit with status 0."""
    _join_threads()
    jax_private.remove_exit_barrier()
    _run_exit_handlers()
    signal_handlers.ignore_programs_signals()
    _finalize_program()
    _finalize_mpi()
    interrupts.deactivate()
    _release_interrupted_peers()
    with contextlib.suppress(AgentDisconnected):  # a program that closes all descriptors has still succeeded
        channel.send(Done(env.rank, time.time()))
        channel.receive(Exit)
    exit_now(0)


def exit_with_failure(
    env: WorkerEnv, failure: Failed, channel: AgentChannel, before_exit: Callable[[], None] = lambda: None
) -> NoReturn:
    """Send the failure at once, then run the exit handlers and exit with the failure's status.

    Threads are not joined: they may wait for something that this process will never send.
    """
    with contextlib.suppress(AgentDisconnected):
        channel.send(failure)
        before_exit()
    if jax_private.remove_exit_barrier():
        _run_exit_handlers()
    signal_handlers.ignore_programs_signals()
    _finalize_program()
    _release_interrupted_peers()
    if env.rank == 0 and env.size > 1:  # JAX would abort the others when the coordinator in this process ends
        with contextlib.suppress(AgentDisconnected, ProtocolError):
            channel.receive(Exit)
    exit_now(failure.status)


def exit_now(status: int) -> NoReturn:
    """Exit without tearing down the interpreter, which would take a tenth of a second."""
    _flush_standard_streams()
    os._exit(status)


def _join_threads() -> None:
    shutdown = getattr(threading, "_shutdown", None)  # Py_Finalize calls it first
    if shutdown is None:
        return
    try:
        shutdown()
    except KeyboardInterrupt:
        raise
    except BaseException:  # from a signal handler of the program: Python prints it, and ends without the threads
        traceback.print_exc()


def _run_exit_handlers() -> None:
    run = getattr(atexit, "_run_exitfuncs", None)  # Py_Finalize calls it next
    if run is not None:
        run()


def _finalize_program() -> None:
    """Flush the files that the program left open and finalize its objects, as Py_Finalize does next."""
    _flush_files()
    sys.modules.pop("__main__", None)
    gc.collect()
    _flush_standard_streams()
    linux.flush_c_output()


def _finalize_mpi() -> None:
    """Finalize MPI if the program has used mpi4py, which otherwise does this when the interpreter is torn down."""
    mpi4py, mpi = sys.modules.get("mpi4py"), sys.modules.get("mpi4py.MPI")
    if mpi is None or getattr(getattr(mpi4py, "rc", None), "finalize", None) is False:
        return
    if mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()


def _flush_files() -> None:
    # This is a separate function because its variable keeps the last object alive until it returns.
    for found in gc.get_objects():
        # isinstance would run the code of proxy objects.
        if issubclass(type(found), _BUFFERED_FILES):
            with contextlib.suppress(Exception):
                found.flush()


def _release_interrupted_peers() -> None:
    """After a Ctrl-C, close the connections to other ranks, as the end of this process would.

    A rank that waits in C++ for this rank then returns to Python, where its own KeyboardInterrupt is raised. The
    connections to the coordinator stay open, because JAX aborts a process that loses the coordinator.
    """
    if not interrupts.was_raised():
        return
    coordinator_port = int(os.environ.get(COORDINATOR_ADDRESS, "").rpartition(":")[2] or 0)
    for connection in linux.tcp_connections():
        with connection, contextlib.suppress(OSError):
            if coordinator_port not in (connection.getsockname()[1], connection.getpeername()[1]):
                connection.shutdown(socket.SHUT_RDWR)


def _flush_standard_streams() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
