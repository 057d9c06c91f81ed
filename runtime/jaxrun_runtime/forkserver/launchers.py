"""Forks launchers for the gangs of one Python process, each with its own fork server.

This process has imported jax and the launcher's modules, so that no gang has to. When the Python process ends, this
process ends, and so do the launchers and their jobs.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from msgspec import Struct
from msgspec.structs import replace

from jaxrun.files.own_files import remove_directory
from jaxrun.protocol.codec import encode
from jaxrun.protocol.forkserver_messages import (
    LAUNCHER_DESCRIPTORS,
    ForkServerMessageDecoder,
    ImportedName,
    LauncherStarted,
    Preload,
    StartLauncher,
    UnfinishedPreload,
)
from jaxrun.protocol.names import GANG_DIRECTORY_PREFIX, SHUTDOWN_BYTE
from jaxrun_runtime import linux
from jaxrun_runtime.forkserver import workers
from jaxrun_runtime.forkserver.fork_state import child_processes
from jaxrun_runtime.forkserver.preload import Preloader
from jaxrun_runtime.forkserver.reexec import reexec
from jaxrun_runtime.forkserver.workers import ImportedJax

_REAP_INTERVAL_S = 1.0
_LAUNCHER_EXIT_TIMEOUT_S = 5.0  # wait until launchers end by themselves after the Python process has died
_EXIT_POLL_S = 0.01
_PROGRAM_OF_RANKS = ("-m", "jaxrun_runtime.gang")
_LAUNCHER = "jaxrun.cli.forked_launcher"
_SHARED_WITH_RANKS = ("jaxrun.protocol", "jaxrun.errors", "jaxrun.text")
_IMPORTED_BY_RANKS = ("jaxrun_runtime.gang.calls", "jaxrun.protocol.connect", "cloudpickle")


def serve(
    channel: socket.socket, modules: Sequence[str], *, with_jax: bool, unfinished: UnfinishedPreload | None = None
) -> NoReturn:
    """Start a launcher for each StartLauncher, until the Python process at the other end ends this, or is gone.

    with_jax:    import jax and `modules`, and give each launcher a fork server
    unfinished:  the unfinished imports of the server that this one replaces
    """
    parent = linux.peer_pid(channel)  # not getppid: it may have died while this interpreter started
    jax, imports = None, _Imports(Preloader(), tuple(modules))
    if with_jax and os.getppid() == parent:
        jax = workers.import_jax(channel)
        for name in (*_IMPORTED_BY_RANKS, *modules):
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
        gc.freeze()  # like earlier imports
        imports.preloader = Preloader(jax.blas_threads, dict(unfinished.left_out) if unfinished else {})
        if unfinished is not None and not jax.obstacle:
            imports.load(channel, unfinished.order)
    launcher = _import_launcher()
    channel.settimeout(_REAP_INTERVAL_S)
    while os.getppid() == parent:
        _reap()
        request = None
        with contextlib.suppress(TimeoutError):
            request, descriptors = workers.receive_request(channel, len(LAUNCHER_DESCRIPTORS))
        if request is None:  # outside of an `except`: else TimeoutError would be the context of what the ranks raise
            continue
        if request == SHUTDOWN_BYTE:
            os._exit(0)
        if not request:
            break
        (order,) = ForkServerMessageDecoder().feed(request)
        if isinstance(order, StartLauncher):
            _start(order, descriptors, channel, jax, imports.preloader, launcher)
        elif jax is not None and not jax.obstacle:
            assert isinstance(order, Preload)
            imports.load(channel, order)
    _clean_up_after(parent)
    os._exit(0)


class _Imports(Struct):
    """Imports of this server besides jax: the `modules` in its arguments, and the `lines` of all Preloads so far."""

    preloader: Preloader
    modules: tuple[str, ...]
    lines: tuple[ImportedName, ...] = ()

    def load(self, channel: socket.socket, order: Preload) -> None:
        """Import more. If a module is unsafe, this process becomes another server, and its launchers stay."""
        whole, launchers = replace(order, imports=(*self.lines, *order.imports)), child_processes()

        def leave_out(left_out: Mapping[str, str], environ: Mapping[str, str]) -> NoReturn:
            unfinished = UnfinishedPreload((), whole, left_out)
            reexec(channel, "launchers", unfinished, environ, *self.modules, keep=launchers)

        self.preloader.load(order, _PROGRAM_OF_RANKS, leave_out)
        self.lines = whole.imports


def _import_launcher() -> dict[str, ModuleType]:
    """Import the launcher's modules, and return them for sys.modules of launchers: ranks do not see them."""
    before = set(sys.modules)
    importlib.import_module(_LAUNCHER)
    gc.freeze()
    shared = (*sys.stdlib_module_names, *_SHARED_WITH_RANKS)
    names = [name for name in sys.modules if name not in before and not _is_within(name, shared)]
    return {name: sys.modules.pop(name) for name in names}


def _is_within(name: str, packages: Sequence[str]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def _start(
    order: StartLauncher,
    descriptors: list[int],
    channel: socket.socket,
    jax: ImportedJax | None,
    preloader: Preloader,
    modules: Mapping[str, ModuleType],
) -> None:
    """Fork a launcher for this command line, and send its pidfd to the Python process."""
    server_pid = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            channel.close()
            os.setsid()
            linux.die_with_parent()
            if os.getppid() == server_pid:
                server = _fork_server(jax, preloader, descriptors) if jax is not None else None
                sys.modules.update(modules)
                modules[_LAUNCHER].run_order(order, *descriptors, server)
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    pidfd = os.pidfd_open(pid)
    with contextlib.suppress(OSError):
        socket.send_fds(channel, [encode(LauncherStarted(pid))], [pidfd])
    for descriptor in (pidfd, *descriptors):
        os.close(descriptor)


def _fork_server(jax: ImportedJax, preloader: Preloader, not_its_own: Iterable[int]) -> tuple[int, socket.socket]:
    """Fork the launcher's own fork server, without these descriptors; returns its process id and channel."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        ours.close()
        for descriptor in not_its_own:
            os.close(descriptor)
        linux.die_with_maker(theirs)
        workers.serve_inherited(theirs, jax, preloader)
    theirs.close()
    return pid, ours


def _clean_up_after(parent: int) -> None:
    """Remove the temporary directories of gangs after their Python process has died and no launcher writes there."""
    deadline = time.monotonic() + _LAUNCHER_EXIT_TIMEOUT_S
    with contextlib.suppress(ChildProcessError):
        while time.monotonic() < deadline:
            if not os.waitpid(-1, os.WNOHANG)[0]:
                time.sleep(_EXIT_POLL_S)
    if os.getppid() == parent:  # the process has only closed the channel; another server may have gangs of it
        return
    for path in Path(tempfile.gettempdir()).glob(f"{GANG_DIRECTORY_PREFIX}{parent}-*"):
        with contextlib.suppress(OSError):
            remove_directory(path)


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
