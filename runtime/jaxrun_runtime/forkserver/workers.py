"""Forks the workers of one job: ConfigureForkServer names the job, then each ForkWorker makes one worker.

Forking is safe only before any thread or JAX backend exists. If the import has started a thread or opened a GPU, the
server declines, and the agent starts a fresh interpreter for each worker instead.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import math
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from msgspec import Struct
from msgspec.structs import replace

from jaxrun.protocol.codec import encode
from jaxrun.protocol.env import WorkerEnv
from jaxrun.protocol.forkserver_messages import (
    FORK_DESCRIPTORS,
    BeginAttempt,
    ConfigureForkServer,
    ForkDeclined,
    ForkServerMessageDecoder,
    ForkWorker,
    Preload,
    Preloaded,
    UnfinishedPreload,
    WorkerForked,
)
from jaxrun.protocol.names import RESERVED_PREFIX
from jaxrun_runtime import failure_report, linux, worker
from jaxrun_runtime.forkserver.fork_state import CUDA_DEVICES, count_threads, open_files
from jaxrun_runtime.forkserver.preload import Preloader
from jaxrun_runtime.forkserver.reexec import reexec

_MAX_REQUEST_BYTES = 2**18
_WITH_AUTHKEY = ("multiprocessing.process", "multiprocess.process")  # Python's module, and the one of dill and datasets
_AUTHKEY_BYTES = 32
_MAX_REASON_CHARS = 500
_MAX_TRACEBACK_CHARS = 8_000  # an answer is one packet, which the agent reads in one piece of 64 KiB
# Modules that JAX imports and that do not depend on settings: imported while the launcher still reads its command line.
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
# Variables from which JAX sets options when it is imported.
_OPTION_OF_VARIABLE: dict[str, tuple[str, Callable[[str], Any]]] = {
    "JAX_NUM_CPU_DEVICES": ("jax_num_cpu_devices", int),
    "JAX_PLATFORMS": ("jax_platforms", str),
}


# Variables that the launcher chooses; if they change, no module must be imported again.
_SET_BY_LAUNCHER = frozenset(
    (
        *(*_OPTION_OF_VARIABLE, "NPROC", "no_grpc_proxy"),
        *("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS"),
    )
)


def import_stdlib() -> None:
    """Import modules of the standard library that JAX needs."""
    for name in _STDLIB_OF_JAX:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def configure(channel: socket.socket) -> ConfigureForkServer:
    """Wait for the job, and adopt its environment and directory. Returns the order.

    Ends this process if the channel is closed first, because the launcher then needs no fork server. jax may be
    imported already.
    """
    frame, _ = receive_request(channel, 0)
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
    return order


class ImportedJax(Struct, frozen=True):
    """The state of this process after importing jax.

    obstacle:      why forking is not safe; empty if it is
    blas_threads:  number of threads of numpy's BLAS
    """

    obstacle: str = ""
    blas_threads: int = 0


def import_jax(channel: socket.socket) -> ImportedJax:
    """Import everything that workers need. If jax cannot be imported, report that on `channel` and end this process."""
    threads_before = count_threads() - 1
    gc.disable()  # 60 ms less for the import
    try:
        import numpy  # noqa: F401

        threads_of_numpy = count_threads()  # OpenBLAS's are among them; they stop themselves around a fork
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
        answer(channel, ForkDeclined(reason, traceback))
        os._exit(1)
    gc.freeze()  # imported objects stay in pages that the workers share; collecting first would take 60 ms
    gc.enable()
    started = threads_before + count_threads() - threads_of_numpy
    obstacle = "something opened a GPU before the fork" if _has_opened_gpu() else ""
    if started:
        obstacle = f"{started} thread{'s' if started > 1 else ''} ran before the fork"
    return ImportedJax(obstacle, threads_of_numpy - threads_before - 1)


def answer(channel: socket.socket, message: Preloaded | WorkerForked | ForkDeclined) -> None:
    """Send a message to the launcher; ends this process if nobody reads it any more, as after a Ctrl-C."""
    try:
        channel.send(encode(message))
    except (BrokenPipeError, ConnectionResetError):
        os._exit(0)


def receive_request(channel: socket.socket, max_descriptors: int) -> tuple[bytes, list[int]]:
    """Receive a request with its descriptors; an empty request if the other side is gone. Raises TimeoutError."""
    try:
        return socket.recv_fds(channel, _MAX_REQUEST_BYTES, max_descriptors)[:2]
    except ConnectionResetError:  # the other side was killed before it had read all answers
        return b"", []


def serve(channel: socket.socket, program: Sequence[str], jax: ImportedJax, preloader: Preloader) -> NoReturn:
    """Fork a worker that runs `program` for each request, until `channel` is closed. Decline if `jax` has an obstacle.

    If another attempt may follow, a copy of this process forks the workers of each attempt and ends. So the workers
    become children of the launcher, and this process stays as it is.
    """
    left: float = math.inf  # workers to fork
    while left:
        request, descriptors = receive_request(channel, len(FORK_DESCRIPTORS))
        if not request:
            os._exit(0)
        (order,) = ForkServerMessageDecoder().feed(request)
        if isinstance(order, Preload):
            if not jax.obstacle:
                _preload(channel, program, order, preloader)
            continue
        if jax.obstacle:
            answer(channel, ForkDeclined(jax.obstacle, ""))
            os._exit(0)
        if isinstance(order, BeginAttempt):
            if _fork_copy(channel):
                left = order.workers
            continue
        assert isinstance(order, ForkWorker)
        server_pid = os.getpid()
        pid = _fork(channel)
        if pid == 0:
            channel.close()
            ends = dict(zip(FORK_DESCRIPTORS, descriptors, strict=True))
            _become_worker(order, ends, program, server_pid, preloader)
        for descriptor in descriptors:
            os.close(descriptor)
        answer(channel, WorkerForked(order.rank, pid))
        left -= 1
    os._exit(0)


def _fork(channel: socket.socket) -> int:
    """Fork. If that is impossible, decline and end this process."""
    try:
        return os.fork()
    except OSError as error:
        answer(channel, ForkDeclined(f"no process can be forked: {error.strerror}", ""))
        os._exit(1)


def _fork_copy(channel: socket.socket) -> bool:
    """Fork a copy of this process, and let it alone read the channel until it ends. Returns True in the copy.

    If the copy fails, requests for its workers may be left: this process ends, too.
    """
    server_pid = os.getpid()
    if pid := _fork(channel):
        _, status = os.waitpid(pid, 0)
        if status:
            os._exit(1)
        return False
    linux.die_with_parent()
    if os.getppid() != server_pid:
        os._exit(0)
    return True


def serve_inherited(channel: socket.socket, jax: ImportedJax, preloader: Preloader) -> NoReturn:
    """Serve the next job with the imports of another process.

    If these imports have read variables that the job sets to other values, this process becomes a server that imports
    again.
    """
    order = configure(channel)
    changed = {name for name in (*order.environment, *order.unset) if not name.startswith(RESERVED_PREFIX)}
    if (changed - _SET_BY_LAUNCHER) & preloader.reads:
        reexec(channel, "workers", UnfinishedPreload(order.program, Preload(()), {}), os.environ)
    serve(channel, order.program, jax, preloader)


def continue_preload(channel: socket.socket, unfinished: UnfinishedPreload, jax: ImportedJax) -> NoReturn:
    """Continue the work of the fork server that this one replaces: import the rest of its modules, then serve."""
    preloader = Preloader(jax.blas_threads, dict(unfinished.left_out))
    if unfinished.order.imports and not jax.obstacle:
        _preload(channel, unfinished.program, unfinished.order, preloader)
    serve(channel, unfinished.program, jax, preloader)


def _preload(channel: socket.socket, program: Sequence[str], order: Preload, preloader: Preloader) -> None:
    def leave_out(left_out: Mapping[str, str], environ: Mapping[str, str]) -> NoReturn:
        reexec(channel, "workers", UnfinishedPreload(tuple(program), order, left_out), environ)

    answer(channel, preloader.load(order, program, leave_out))


def _become_worker(
    order: ForkWorker, descriptors: dict[str, int], program: Sequence[str], server_pid: int, preloader: Preloader
) -> NoReturn:
    started_at = time.time()
    os.setsid()
    for target, name in enumerate(("stdin", "stdout", "stderr")):
        os.dup2(descriptors[name], target)
        os.close(descriptors[name])
    channel, stacks, flight = (descriptors[name] for name in ("channel", "stacks", "flight"))
    env = WorkerEnv.from_env(order.environment)
    env = replace(env, channel_fd=channel, stacks_fd=stacks, flight_fd=flight)
    os.environ.update({**order.environment, **env.to_env()})
    _draw_random_numbers_again()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    worker.run_worker(env, list(program), started_at, forked_by=server_pid, preloader=preloader)


def _draw_random_numbers_again() -> None:
    """Seed numpy again and draw new keys, which ranks would otherwise share. (Python reseeds `random` after a fork.)"""
    sys.modules["numpy"].random.seed()
    for name in _WITH_AUTHKEY:
        if (process := sys.modules.get(name)) is not None:
            process.current_process().authkey = os.urandom(_AUTHKEY_BYTES)


def _has_opened_gpu() -> bool:
    """Whether this process may have called cuInit, after which CUDA fails in forks. (NVML opens the same files.)"""
    return any(file.partition(" ")[2] in CUDA_DEVICES for file in open_files())
