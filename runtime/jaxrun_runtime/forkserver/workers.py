"""Forks the workers of one job: ConfigureForkServer names the job, then each ForkWorker makes one worker.

Forking is safe only before any thread or JAX backend exists. Where something has started a thread during the import, or
opened a GPU, the server declines, and the agent starts a fresh interpreter for each worker instead.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from jaxrun.protocol.codec import encode
from jaxrun.protocol.env import WorkerEnv
from jaxrun.protocol.forkserver_messages import (
    FORK_DESCRIPTORS,
    ConfigureForkServer,
    ForkDeclined,
    ForkServerMessageDecoder,
    ForkSuccessor,
    ForkWorker,
    SuccessorForked,
    WorkerForked,
)
from jaxrun_runtime import failure_report, worker
from jaxrun_runtime.forkserver.parent import die_with_adopter

_MAX_REQUEST_BYTES = 2**18
_MAX_REASON_CHARS = 500
_MAX_TRACEBACK_CHARS = 8_000  # an answer is one packet, which the agent reads in one piece of 64 KiB
# Modules that JAX imports, and that no setting changes: imported while the launcher still reads its command line.
_STDLIB_OF_JAX = (
    "csv",
    "decimal",
    "difflib",
    "email.parser",
    "gzip",
    "http.server",
    "importlib.metadata",
    "importlib.resources",
    "logging",
    "pickle",
    "pprint",
    "sysconfig",
    "zipfile",
)
# Modules that JAX imports at the first compilation and Python at the first connection: 14 ms and more in each worker.
_IMPORTED_AT_FIRST_USE = (
    "jaxlib.mlir.dialects.builtin",
    "jaxlib.mlir.dialects.mhlo",
    "jaxlib.mlir._mlir_libs._mlirHlo",
    "encodings.idna",
)
_CUDA_DEVICES = ("/dev/nvidia-uvm", "/dev/dxg")  # on Linux, and under Windows
# Variables that JAX has turned into options when it was imported.
_OPTION_OF_VARIABLE: dict[str, tuple[str, Callable[[str], Any]]] = {
    "JAX_NUM_CPU_DEVICES": ("jax_num_cpu_devices", int),
    "JAX_PLATFORMS": ("jax_platforms", str),
}


def import_stdlib() -> None:
    """Import what JAX needs of the standard library."""
    for name in _STDLIB_OF_JAX:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def configure(channel: socket.socket) -> Sequence[str]:
    """Wait for the job and adopt its environment and directory; returns the program and its arguments.

    Ends this process if the channel is closed first, because the launcher needs no fork server. jax may have been
    imported already.
    """
    frame = channel.recv(_MAX_REQUEST_BYTES)
    if not frame:
        os._exit(0)
    (order,) = ForkServerMessageDecoder().feed(frame)
    assert isinstance(order, ConfigureForkServer)
    os.environ.update(order.environment)
    for name in order.unset:
        os.environ.pop(name, None)
    if order.directory:
        os.chdir(order.directory)
    jax = sys.modules.get("jax")
    for name, (option, parse) in _OPTION_OF_VARIABLE.items():
        if jax is not None and name in order.environment:
            jax.config.update(option, parse(order.environment[name]))
    return order.program


def import_jax(channel: socket.socket) -> str:
    """Import all that the workers need; returns why forking would not be safe, empty if it is.

    If jax cannot be imported, reports that on `channel` and ends this process.
    """
    threads_before = _count_threads() - 1
    gc.disable()  # 60 ms less for the import
    try:
        import numpy  # noqa: F401

        threads_of_numpy = _count_threads()  # OpenBLAS's are among them; they stop themselves around a fork
        import jax.numpy  # noqa: F401

        from jaxrun_runtime import env_watch  # noqa: F401
        from jaxrun_runtime.compile_cache import compile_once  # noqa: F401
        from jaxrun_runtime.lockstep import call_recorder  # noqa: F401

        for name in _IMPORTED_AT_FIRST_USE:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
    except BaseException as error:
        reason = failure_report.clip_text(f"{type(error).__name__}: {error}", _MAX_REASON_CHARS)
        traceback = failure_report.clip_text(failure_report.format_traceback(error), _MAX_TRACEBACK_CHARS)
        channel.send(encode(ForkDeclined(reason, traceback)))
        os._exit(1)
    gc.freeze()  # what is imported stays in pages that the workers share; a collection first would cost 60 ms
    gc.enable()
    started = threads_before + _count_threads() - threads_of_numpy
    if started:
        return f"{started} thread{'s' if started > 1 else ''} ran before the fork"
    return "something opened a GPU before the fork" if _has_opened_gpu() else ""


def serve(channel: socket.socket, program: Sequence[str], obstacle: str) -> NoReturn:
    """Fork a worker that runs `program` for each request, until `channel` is closed; with an `obstacle`, decline.

    A successor, which is forked on request, serves another channel in the same way.
    """
    server_pid = os.getpid()
    while True:
        request, descriptors, _, _ = socket.recv_fds(channel, _MAX_REQUEST_BYTES, len(FORK_DESCRIPTORS))
        if not request:
            os._exit(0)
        if obstacle:
            channel.send(encode(ForkDeclined(obstacle, "")))
            os._exit(0)
        (order,) = ForkServerMessageDecoder().feed(request)
        assert isinstance(order, (ForkWorker, ForkSuccessor))
        try:
            pid = os.fork()
        except OSError as error:
            channel.send(encode(ForkDeclined(f"no process can be forked: {error.strerror}", "")))
            os._exit(1)
        if pid == 0 and isinstance(order, ForkWorker):
            channel.close()
            _become_worker(order, dict(zip(FORK_DESCRIPTORS, descriptors, strict=True)), program, server_pid)
        if pid == 0:
            channel.close()
            channel, first_parent, server_pid = socket.socket(fileno=descriptors[0]), server_pid, os.getpid()
            os.setsid()
            die_with_adopter(channel, first_parent)
            continue
        for descriptor in descriptors:
            os.close(descriptor)
        answer = WorkerForked(order.rank, pid) if isinstance(order, ForkWorker) else SuccessorForked(pid)
        channel.send(encode(answer))


def _become_worker(order: ForkWorker, descriptors: dict[str, int], program: Sequence[str], server_pid: int) -> NoReturn:
    started_at = time.time()
    os.setsid()
    for target, name in enumerate(("stdin", "stdout", "stderr")):
        os.dup2(descriptors[name], target)
        os.close(descriptors[name])
    channel, stacks, flight = (descriptors[name] for name in ("channel", "stacks", "flight"))
    env = WorkerEnv.from_env(order.environment)
    env = replace(env, channel_fd=channel, stacks_fd=stacks, flight_fd=flight)
    os.environ.update({**order.environment, **env.to_env()})
    # Python reseeds `random` after a fork; numpy's legacy generator would give every rank the same numbers.
    sys.modules["numpy"].random.seed()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    worker.run_worker(env, list(program), started_at, forked_by=server_pid)


def _has_opened_gpu() -> bool:
    """Whether this process may have called cuInit, after which CUDA works in no fork. NVML opens the same files."""
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            if os.readlink(f"/proc/self/fd/{descriptor}") in _CUDA_DEVICES:
                return True
    return False


def _count_threads() -> int:
    return len(os.listdir("/proc/self/task"))
