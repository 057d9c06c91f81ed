"""Replaces a fork server by a new one, by exec: with the same process id, channel, and requests that wait there.

The unfinished work of the old server is written to a file in memory. Its descriptor is an argument of the new server.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from collections.abc import Collection, Mapping
from typing import NoReturn

from jaxrun.protocol.codec import encode
from jaxrun.protocol.forkserver_messages import ForkServerMessageDecoder, UnfinishedPreload
from jaxrun_runtime.forkserver.fork_state import child_processes

_MARK = "unfinished="  # before the file's descriptor, among the arguments


def reexec(
    channel: socket.socket,
    role: str,
    unfinished: UnfinishedPreload,
    environ: Mapping[str, str],
    *modules: str,
    keep: Collection[int] = (),
) -> NoReturn:
    """Become a new fork server of this role, which continues the work in `unfinished`.

    Kills processes that modules have started: all children except `keep`.
    """
    for pid in set(child_processes()) - set(keep):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    file = os.memfd_create("unfinished")
    os.write(file, encode(unfinished))
    for descriptor in (file, channel.fileno()):
        os.set_inheritable(descriptor, True)
    package = os.path.dirname(os.path.abspath(__file__))
    argv = [sys.executable, package, str(channel.fileno()), role, f"{_MARK}{file}", *modules]
    os.execve(sys.executable, argv, dict(environ))


def take_unfinished(arguments: list[str]) -> UnfinishedPreload | None:
    """Remove the unfinished work of an earlier server from the arguments, and return it; None if there is none."""
    if not arguments or not arguments[0].startswith(_MARK):
        return None
    file = int(arguments.pop(0).removeprefix(_MARK))
    data = os.pread(file, os.fstat(file).st_size, 0)
    os.close(file)
    (unfinished,) = ForkServerMessageDecoder().feed(data)
    assert isinstance(unfinished, UnfinishedPreload)
    return unfinished
