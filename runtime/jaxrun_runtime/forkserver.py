"""Import jax once, then fork the workers: N processes pay one import instead of N.

`python -m jaxrun_runtime.forkserver FD [PROGRAM [ARGS]...]`, FD being the channel to the agent. Without a program it
was started before the command line was read: it imports what no setting changes, and waits for a ForkSetUp. The agent
sends a Fork for each worker, with the worker's descriptors, and learns its process id; when the agent closes its
end the server leaves, and the agent, a subreaper, becomes the workers' parent. Forking comes before any thread
or backend exists; where something has started one, the server declines and says so, and the agent starts
fresh interpreters.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn

from jaxrun.protocol import (
    FORK_DESCRIPTORS,
    ConfigureForkServer,
    ForkDeclined,
    ForkWorker,
    WorkerEnv,
    WorkerForked,
    WorkerMessageDecoder,
    encode,
)
from jaxrun_runtime import failure_report, worker

_MAX_REQUEST = 2**18
# What JAX imports at the first compilation, and Python at the first connection: 14 ms and more in each worker.
_WANTED_LATER = (
    "jaxlib.mlir.dialects.builtin",
    "jaxlib.mlir.dialects.mhlo",
    "jaxlib.mlir._mlir_libs._mlirHlo",
    "encodings.idna",
)
_JAX_WILL_IMPORT = (
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
# What JAX has made options of when it was imported.
_READ_BY_JAX: dict[str, tuple[str, Callable[[str], Any]]] = {
    "JAX_NUM_CPU_DEVICES": ("jax_num_cpu_devices", int),
    "JAX_PLATFORMS": ("jax_platforms", str),
}
_REASON_LIMIT = 500
_TRACEBACK_LIMIT = 8_000  # an answer is one packet, which the agent reads in one piece of 64 KiB


def main() -> None:
    os.environ.pop("PYTHONSAFEPATH", None)
    channel = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(channel.fileno(), False)
    if len(sys.argv) == 2:
        for name in _JAX_WILL_IMPORT:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
        set_up(channel)
    serve(channel, import_jax(channel))


def serve(channel: socket.socket, obstacle: str) -> NoReturn:
    """Fork what is asked for on `channel`, until its other end is closed; with an `obstacle`, decline."""
    server = os.getpid()
    while True:
        request, descriptors, _, _ = socket.recv_fds(channel, _MAX_REQUEST, len(FORK_DESCRIPTORS))
        if not request:
            os._exit(0)
        if obstacle:
            channel.send(encode(ForkDeclined(obstacle, "")))
            os._exit(0)
        (order,) = WorkerMessageDecoder().feed(request)
        assert isinstance(order, ForkWorker)
        pid = os.fork()
        if pid == 0:
            channel.close()
            _become_worker(order, dict(zip(FORK_DESCRIPTORS, descriptors, strict=True)), server)
        for descriptor in descriptors:
            os.close(descriptor)
        channel.send(encode(WorkerForked(order.rank, pid)))


def set_up(channel: socket.socket) -> None:
    """Learn for which job this is; jax may have been imported."""
    frame = channel.recv(_MAX_REQUEST)
    if not frame:
        os._exit(0)  # the launcher needs none
    (order,) = WorkerMessageDecoder().feed(frame)
    assert isinstance(order, ConfigureForkServer)
    os.environ.update(order.environment)
    for name in order.unset:
        os.environ.pop(name, None)
    if order.directory:
        os.chdir(order.directory)
    sys.argv[2:] = order.program
    jax = sys.modules.get("jax")
    for name, (option, kind) in _READ_BY_JAX.items():
        if jax is not None and name in order.environment:
            jax.config.update(option, kind(order.environment[name]))


def import_jax(channel: socket.socket) -> str:
    """Import all that the workers need; returns why forking would not be safe, empty if it is."""
    before = _threads() - 1
    gc.disable()  # 60 ms less for the import
    try:
        import numpy  # noqa: F401

        own = _threads()  # with OpenBLAS's, which stop themselves around a fork
        import jax.numpy  # noqa: F401

        from jaxrun_runtime import hello, join  # noqa: F401

        for name in _WANTED_LATER:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
    except BaseException as error:
        reason = failure_report.clip_text(f"{type(error).__name__}: {error}", _REASON_LIMIT)
        frames = failure_report.clip_text(failure_report.format_traceback(error), _TRACEBACK_LIMIT)
        channel.send(encode(ForkDeclined(reason, frames)))
        os._exit(1)
    gc.freeze()  # what is imported stays in pages that the workers share; a collection first would cost 60 ms
    gc.enable()
    started = before + _threads() - own
    return f"{started} thread{'s' if started > 1 else ''} ran before the fork" if started else ""


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _become_worker(order: ForkWorker, descriptors: dict[str, int], server: int) -> NoReturn:
    started = time.time()
    os.setsid()
    for target, name in enumerate(("stdin", "stdout", "stderr")):
        os.dup2(descriptors[name], target)
        os.close(descriptors[name])
    told = WorkerEnv.from_env(order.environment)
    channel, stacks, flight = (descriptors[name] for name in ("channel", "stacks", "flight"))
    env = replace(told, channel_fd=channel, stacks_fd=stacks, flight_fd=flight)
    os.environ.update({**order.environment, **env.to_env()})
    # Python reseeds `random` after a fork; numpy's legacy generator would give every rank the same numbers.
    sys.modules["numpy"].random.seed()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    worker.run_worker(env, sys.argv[2:], started, forked_by=server)


if __name__ == "__main__":
    main()
