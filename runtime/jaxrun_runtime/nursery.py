"""Imports jax once for all gangs of a Python process, and starts their launchers.

`python -m jaxrun_runtime.nursery FD [bare]`, FD being the channel to that process; `bare`: without jax, for gangs whose
workers cannot be forked. For each launcher this process forks itself: the child forks once more, which becomes the
fork server of the job, jax in it, and then turns into the launcher by exec. So the launcher has no jax, and is the
parent of its fork server all the same. When the Python process ends, this one does, and takes the launchers along;
those take their jobs along.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import traceback
from typing import NoReturn

from jaxrun.contract import LAUNCHER_DESCRIPTORS, Decoder, LauncherStarted, StartLauncher, encode
from jaxrun.contract.names import CONTROL_FD, FORK_SERVER

from . import forkserver, kernel

_MAX_REQUEST = 2**18
_LOOK_ROUND = 1.0  # seconds between two looks at what has ended


def main() -> None:
    os.environ.pop("PYTHONSAFEPATH", None)
    parent = os.getppid()
    channel = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(channel.fileno(), False)
    obstacle = None if sys.argv[2:] == ["bare"] else forkserver.import_jax(channel)
    channel.settimeout(_LOOK_ROUND)
    while os.getppid() == parent:
        with contextlib.suppress(TimeoutError):
            request, descriptors, _, _ = socket.recv_fds(channel, _MAX_REQUEST, len(LAUNCHER_DESCRIPTORS))
            if not request:
                break
            (order,) = Decoder().feed(request)
            assert isinstance(order, StartLauncher)
            _start(order, descriptors, channel, obstacle)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
    os._exit(0)


def _start(order: StartLauncher, descriptors: list[int], channel: socket.socket, obstacle: str | None) -> None:
    nursery = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            channel.close()
            _become_launcher(order, descriptors, nursery, obstacle)
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    for descriptor in descriptors:
        os.close(descriptor)
    process = os.pidfd_open(pid)
    with contextlib.suppress(ConnectionError):
        socket.send_fds(channel, [encode(LauncherStarted(pid))], [process])
    os.close(process)


def _become_launcher(order: StartLauncher, descriptors: list[int], nursery: int, obstacle: str | None) -> NoReturn:
    stderr, control = descriptors
    os.setsid()
    kernel.die_with_parent()
    if os.getppid() != nursery:
        os._exit(0)
    os.dup2(stderr, 2)
    os.close(stderr)
    os.chdir(order.directory)
    os.environ.update(order.environment)
    for name in order.unset:
        os.environ.pop(name, None)
    environ = {**os.environ, CONTROL_FD: str(control)}
    if obstacle is not None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        server = os.fork()
        if server == 0:
            ours.close()
            os.close(control)
            forkserver.set_up(theirs)
            forkserver.serve(theirs, obstacle)
        theirs.close()
        os.set_inheritable(ours.fileno(), True)
        environ[FORK_SERVER] = f"{ours.fileno()}:{server}"
    os.set_inheritable(control, True)
    os.execve(order.argv[0], order.argv, environ)


if __name__ == "__main__":
    main()
