"""Replaces a fork server by a new one, by exec: same process id, same channel, same requests that wait there.

What the old one was doing is written to a file in memory, whose descriptor is an argument of the new one.
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


def start_again(
    channel: socket.socket,
    role: str,
    unfinished: UnfinishedPreload,
    environ: Mapping[str, str],
    *modules: str,
    keep: Collection[int] = (),
) -> NoReturn:
    """Become a new fork server of this role, which continues what is `unfinished`.

    The processes that a module has started end; those in `keep` are this server's own.
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
    """Take what an earlier server has left from the arguments of this one; None if there was no earlier one."""
    if not arguments or not arguments[0].startswith(_MARK):
        return None
    file = int(arguments.pop(0).removeprefix(_MARK))
    data = os.pread(file, os.fstat(file).st_size, 0)
    os.close(file)
    (unfinished,) = ForkServerMessageDecoder().feed(data)
    assert isinstance(unfinished, UnfinishedPreload)
    return unfinished
