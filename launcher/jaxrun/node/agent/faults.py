"""Injects faults into workers as if they came from outside: a kill, a stop, a cut network. None counts as our own stop.

To cut the network, the worker's sockets are duplicated (pidfd_getfd) and shut down, so that both ends see each
connection closed. The worker may make new ones, as after a network has come back. Sockets that it has inherited from
its agent stay: MPICH's control connection is one, by whose end the whole job would end.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
from collections.abc import Iterator

from jaxrun.node.agent.worker_process import WorkerProcess
from jaxrun.spec.job.fault_spec import CUT, KILL

_PIDFD_GETFD = 438  # the same on all architectures
_FORBIDDEN = (
    "the kernel does not let its connections be taken ({}); it takes the right to trace processes, which a container "
    "gets by --cap-add SYS_PTRACE, and Linux 5.6"
)


def inject(child: WorkerProcess, kind: str) -> str:
    """Inject a fault of this kind (see job/fault_spec.py); returns why that was not possible, else nothing."""
    if not child.live:
        return "it has no process"
    if kind == CUT:
        return cut_connections(child.pid)
    if kind == KILL:
        child.killed = True
    with contextlib.suppress(ProcessLookupError):  # its exit is noticed elsewhere
        os.kill(child.pid, signal.SIGKILL if kind == KILL else signal.SIGSTOP)
    return ""


def cut_connections(pid: int) -> str:
    """Break all TCP connections of a process that we may trace; returns why that was not possible, else nothing."""
    try:
        with contextlib.ExitStack() as stack:
            found = [stack.enter_context(copy) for copy in _sockets(pid)]
            connections = [copy for copy in found if _is_connection(copy)]
            for connection in connections:
                with contextlib.suppress(OSError):  # the other end of one that was just cut
                    connection.shutdown(socket.SHUT_RDWR)
    except ProcessLookupError:
        return "it has no process"
    except OSError as error:
        return _FORBIDDEN.format(error.strerror)
    return "" if connections else "it has no connections"


def _sockets(pid: int) -> Iterator[socket.socket]:
    """Duplicate a process's own sockets. Raises OSError where the kernel does not allow that."""
    process = os.pidfd_open(pid)
    inherited = set(_socket_names("self").values())
    try:
        for descriptor, name in _socket_names(str(pid)).items():
            copy = _copy_descriptor(process, descriptor) if name not in inherited else -1
            if copy >= 0:
                yield socket.socket(fileno=copy)
    finally:
        os.close(process)


def _socket_names(pid: str) -> dict[int, str]:
    """By descriptor, what the kernel calls each socket of a process: the same for copies in other processes."""
    names = {}
    for descriptor in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            name = os.readlink(f"/proc/{pid}/fd/{descriptor}")
            if name.startswith("socket:"):
                names[int(descriptor)] = name
    return names


def _copy_descriptor(process: int, descriptor: int) -> int:
    """Duplicate a descriptor of that process; returns -1 if it has been closed meanwhile. Raises OSError."""
    import ctypes  # rarely wanted

    libc = ctypes.CDLL(None, use_errno=True)
    copy: int = libc.syscall(_PIDFD_GETFD, process, descriptor, 0)
    number = ctypes.get_errno()
    if copy < 0 and number != errno.EBADF:
        raise OSError(number, os.strerror(number))
    return copy


def _is_connection(copy: socket.socket) -> bool:
    """Whether this is a TCP connection; not a listening socket, which no network failure ends."""
    internet = copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == socket.SOCK_STREAM
    return internet and not copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
