"""Forks launchers for the gangs of one Python process, each with a fork server of its own.

A launcher is made ahead of time and waits for its command line. When the Python process ends, this process ends, and
so do the launchers and their jobs.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from jaxrun.files.own_files import remove_directory
from jaxrun.protocol.codec import encode
from jaxrun.protocol.forkserver_messages import (
    LAUNCHER_DESCRIPTORS,
    ForkServerMessageDecoder,
    ImportedName,
    LauncherStarted,
    Preload,
    UnfinishedPreload,
)
from jaxrun.protocol.names import GANG_DIRECTORY_PREFIX, SHUTDOWN_BYTE
from jaxrun_runtime import linux
from jaxrun_runtime.forkserver import workers
from jaxrun_runtime.forkserver.again import start_again
from jaxrun_runtime.forkserver.fork_state import child_processes
from jaxrun_runtime.forkserver.preload import Preloader
from jaxrun_runtime.forkserver.workers import ImportedJax
from jaxrun_runtime.linux import die_with_maker

_REAP_INTERVAL_S = 1.0
_PRESTART_DELAY_S = 0.2  # without a request, after which the next launcher is started ahead of time
_LAUNCHER_EXIT_TIMEOUT_S = 5.0  # for launchers to end by themselves once the Python process has died
_EXIT_POLL_S = 0.01
_PROGRAM_OF_RANKS = ("-m", "jaxrun_runtime.gang")
_IMPORTED_BY_RANKS = ("jaxrun_runtime.gang.calls", "jaxrun.protocol.connect", "cloudpickle")


@dataclass(frozen=True, slots=True)
class _IdleLauncher:
    """A launcher that waits for its command line on `channel`."""

    pid: int
    pidfd: int
    channel: socket.socket


def serve(
    channel: socket.socket, modules: Sequence[str], *, with_jax: bool, unfinished: UnfinishedPreload | None = None
) -> NoReturn:
    """Start a launcher for each StartLauncher, until the Python process at the other end says so or is gone.

    with_jax:    import jax and `modules`, and give each launcher a fork server
    unfinished:  what a server was to import whose place this one has taken
    """
    parent = linux.peer_pid(channel)  # not getppid: it may have died while this interpreter started
    jax, imports = None, _Imports(Preloader(), tuple(modules))
    if with_jax and os.getppid() == parent:
        jax = workers.import_jax(channel)
        for name in (*_IMPORTED_BY_RANKS, *modules):
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
        gc.freeze()  # as what was imported before
        imports.preloader = Preloader(jax.blas_threads, dict(unfinished.left_out) if unfinished else {})
        if unfinished is not None and not jax.obstacle:
            imports.load(channel, unfinished.order)
    idle = None
    if os.getppid() == parent and not _has_arrived(channel):
        idle = _fork_launcher(channel, jax, imports.preloader)
    while os.getppid() == parent:
        channel.settimeout(_REAP_INTERVAL_S if idle else _PRESTART_DELAY_S)
        request = None
        with contextlib.suppress(TimeoutError):
            request, descriptors = workers.receive_request(channel, len(LAUNCHER_DESCRIPTORS))
        if request is None:
            # Outside of an `except`: else TimeoutError would be the context of what the ranks raise.
            idle = idle or _fork_launcher(channel, jax, imports.preloader)
            _reap()
            continue
        if request == SHUTDOWN_BYTE:
            os._exit(0)
        if not request:
            break
        (order,) = ForkServerMessageDecoder().feed(request)
        if isinstance(order, Preload):
            _drop(idle)  # its fork server lacks these modules
            if jax is not None and not jax.obstacle:
                imports.load(channel, order)
        else:
            _start(idle or _fork_launcher(channel, jax, imports.preloader), request, descriptors, channel)
        idle = None
    _drop(idle)
    _clean_up_after(parent)
    os._exit(0)


@dataclass(slots=True)
class _Imports:
    """What this server imports besides jax: the `modules` among its arguments, and the `lines` of Preload so far."""

    preloader: Preloader
    modules: tuple[str, ...]
    lines: tuple[ImportedName, ...] = ()

    def load(self, channel: socket.socket, order: Preload) -> None:
        """Import more. Where a module is unsafe, this process becomes another server, and its launchers stay."""
        whole, launchers = replace(order, imports=(*self.lines, *order.imports)), child_processes()

        def leave_out(left_out: Mapping[str, str], environ: Mapping[str, str]) -> NoReturn:
            unfinished = UnfinishedPreload((), whole, left_out)
            start_again(channel, "launchers", unfinished, environ, *self.modules, keep=launchers)

        self.preloader.load(order, _PROGRAM_OF_RANKS, leave_out)
        self.lines = whole.imports


def _has_arrived(channel: socket.socket) -> bool:
    arrival = select.poll()
    arrival.register(channel, select.POLLIN)
    return bool(arrival.poll(0))


def _drop(idle: _IdleLauncher | None) -> None:
    """Have a launcher that waits end."""
    if idle is not None:
        idle.channel.close()
        os.close(idle.pidfd)


def _start(idle: _IdleLauncher, request: bytes, descriptors: list[int], channel: socket.socket) -> None:
    """Give the launcher its command line, and the Python process a pidfd of the launcher."""
    with contextlib.suppress(OSError):  # it has died, which the pidfd shows
        socket.send_fds(idle.channel, [request], descriptors)
    with contextlib.suppress(OSError):
        socket.send_fds(channel, [encode(LauncherStarted(idle.pid))], [idle.pidfd])
    idle.channel.close()
    for descriptor in (idle.pidfd, *descriptors):
        os.close(descriptor)


def _fork_launcher(channel: socket.socket, jax: ImportedJax | None, preloader: Preloader) -> _IdleLauncher:
    server_pid = os.getpid()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        try:
            channel.close()
            ours.close()
            _become_launcher(theirs, server_pid, jax, preloader)
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    theirs.close()
    return _IdleLauncher(pid, os.pidfd_open(pid), ours)


def _become_launcher(
    channel: socket.socket, server_pid: int, jax: ImportedJax | None, preloader: Preloader
) -> NoReturn:
    """Fork the launcher's own fork server (unless jax is not there), then exec the launcher."""
    os.setsid()
    linux.die_with_parent()
    if os.getppid() != server_pid:
        os._exit(0)
    argv = [sys.executable, "-P", "-m", "jaxrun.cli.idle_launcher", str(channel.fileno())]
    if jax is not None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        fork_server = os.fork()
        if fork_server == 0:
            ours.close()
            channel.close()
            die_with_maker(theirs)
            workers.serve_inherited(theirs, jax, preloader)
        os.set_inheritable(ours.fileno(), True)
        argv.append(f"{ours.fileno()}:{fork_server}")
    os.set_inheritable(channel.fileno(), True)
    os.execv(sys.executable, argv)


def _clean_up_after(parent: int) -> None:
    """Remove the temporary directories of gangs whose Python process has died, as soon as no launcher writes there."""
    deadline = time.monotonic() + _LAUNCHER_EXIT_TIMEOUT_S
    with contextlib.suppress(ChildProcessError):
        while time.monotonic() < deadline:
            if not os.waitpid(-1, os.WNOHANG)[0]:
                time.sleep(_EXIT_POLL_S)
    if os.getppid() == parent:  # it has only closed the channel, and may have gangs by another server
        return
    for path in Path(tempfile.gettempdir()).glob(f"{GANG_DIRECTORY_PREFIX}{parent}-*"):
        with contextlib.suppress(OSError):
            remove_directory(path)


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
