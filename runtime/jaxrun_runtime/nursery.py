"""Imports jax once for all gangs of a Python process, and has a launcher ready for the next of them.

`python -m jaxrun_runtime.nursery FD [bare | MODULE...]`, FD being the channel to that process; `bare`: without jax, for
gangs whose workers cannot be forked; MODULE: what the ranks will want, too. For each launcher this process forks
itself; the child forks once more, which becomes the fork server of the job, jax in it, and then turns into the launcher
by exec. So the launcher has no jax, and is the parent of its fork server all the same. When the Python process ends,
this one does, and takes the launchers along; those take their jobs along.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from jaxrun.protocol import LAUNCHER_DESCRIPTORS, LauncherStarted, encode
from jaxrun.protocol.names import GANG_DIRECTORY_PREFIX, SHUTDOWN_BYTE
from jaxrun_runtime import forkserver, linux

_MAX_REQUEST = 2**18
_LOOK_ROUND = 1.0  # seconds between two looks at what has ended
_LEISURE = 0.2  # seconds without a request, after which the next launcher is made ready
_PARTING = 0.5  # seconds that launchers have for ending by themselves, after the parent has died
_WANTED_BY_RANKS = (f"{__package__}.gang_worker", "cloudpickle")


@dataclass(frozen=True, slots=True)
class _Spare:
    """A launcher that waits for its order; `process` is a descriptor of it."""

    pid: int
    process: int
    channel: socket.socket


def main() -> None:
    os.environ.pop("PYTHONSAFEPATH", None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # srun sends it to all processes of a step; ours end with the parent
    parent = os.getppid()
    channel = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(channel.fileno(), False)
    obstacle = None
    if "bare" not in sys.argv[2:]:
        obstacle = forkserver.import_jax(channel)
        for name in (*_WANTED_BY_RANKS, *sys.argv[2:]):
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
        gc.freeze()  # as what was imported before
    spare: _Spare | None = _make_spare(channel, obstacle)
    while os.getppid() == parent:
        channel.settimeout(_LOOK_ROUND if spare else _LEISURE)
        request = None
        with contextlib.suppress(TimeoutError):
            request, descriptors, _, _ = socket.recv_fds(channel, _MAX_REQUEST, len(LAUNCHER_DESCRIPTORS))
        if request is None:
            # Not within an except: to what a rank raises, the exception here would be its context.
            spare = spare or _make_spare(channel, obstacle)
            _reap()
            continue
        if request == SHUTDOWN_BYTE:
            os._exit(0)
        if not request:
            break
        _hand_over(request, descriptors, spare or _make_spare(channel, obstacle), channel)
        spare = None
    _clean_up_after(parent)
    os._exit(0)


def _clean_up_after(parent: int) -> None:
    """What a parent has left that has died."""
    time.sleep(_PARTING)
    if os.getppid() == parent:  # it has only let go of us, and may have gangs by another
        return
    for path in Path(tempfile.gettempdir()).glob(f"{GANG_DIRECTORY_PREFIX}{parent}-*"):
        shutil.rmtree(path, ignore_errors=True)


def _hand_over(request: bytes, descriptors: list[int], spare: _Spare, channel: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it has died, which its process tells
        socket.send_fds(spare.channel, [request], descriptors)
    with contextlib.suppress(OSError):
        socket.send_fds(channel, [encode(LauncherStarted(spare.pid))], [spare.process])
    spare.channel.close()
    for descriptor in (spare.process, *descriptors):
        os.close(descriptor)


def _make_spare(channel: socket.socket, obstacle: str | None) -> _Spare:
    nursery = os.getpid()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        try:
            channel.close()
            ours.close()
            _become_launcher(theirs, nursery, obstacle)
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    theirs.close()
    return _Spare(pid, os.pidfd_open(pid), ours)


def _become_launcher(channel: socket.socket, nursery: int, obstacle: str | None) -> NoReturn:
    os.setsid()
    linux.die_with_parent()
    if os.getppid() != nursery:
        os._exit(0)
    argv = [sys.executable, "-P", "-m", "jaxrun.standby", str(channel.fileno())]
    if obstacle is not None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        server = os.fork()
        if server == 0:
            ours.close()
            channel.close()
            forkserver.set_up(theirs)
            forkserver.serve(theirs, obstacle)
        os.set_inheritable(ours.fileno(), True)
        argv.append(f"{ours.fileno()}:{server}")
    os.set_inheritable(channel.fileno(), True)
    os.execv(sys.executable, argv)


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


if __name__ == "__main__":
    main()
