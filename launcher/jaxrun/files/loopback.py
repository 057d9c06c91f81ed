"""TCP connections on this host's loopback interface that only processes of the same user may make."""

from __future__ import annotations

import os
import select
import socket
import struct
from pathlib import Path

_ADDRESS = struct.Struct("=I")  # the kernel prints an address as a number of this machine's byte order
_LOCAL, _REMOTE, _STATE, _UID = 1, 2, 3, 7  # columns
_MAX_SILENT = 16  # connections that have sent nothing yet; the oldest is closed for another one
_ESTABLISHED = "01"  # the kernel no longer knows the user of a socket that is closed, and shows root


def accept_own(listener: socket.socket) -> socket.socket:
    """Return the next connection that a process of this user has made; close those of other users."""
    while True:
        link, _ = listener.accept()
        if find_peer_user(link) == os.geteuid():
            return link
        link.close()


def accept_own_that_speaks(listener: socket.socket) -> socket.socket:
    """Return the first connection of a process of this user over which something comes, which is still to be read.

    Connections that end before, as those of a program that looks whether the port is open, are closed. Raises OSError
    if the listener is shut down.
    """
    silent: dict[int, socket.socket] = {}
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    try:
        while True:
            for fd, _ in poll.poll():
                if fd == listener.fileno():
                    link = accept_own(listener)
                    silent[link.fileno()] = link
                    poll.register(link, select.POLLIN)
                    continue
                link = silent.pop(fd)
                poll.unregister(fd)
                if _has_bytes(link):
                    return link
                link.close()
            while len(silent) > _MAX_SILENT:
                fd, link = next(iter(silent.items()))
                poll.unregister(fd)
                del silent[fd]
                link.close()
    finally:
        for link in silent.values():
            link.close()


def wait_until_closed(link: socket.socket) -> None:
    """Wait until the other end has closed or reset its connection; what it has sent before may be unread."""
    poll = select.poll()
    poll.register(link, select.POLLRDHUP)
    poll.poll()


def _has_bytes(link: socket.socket) -> bool:
    try:
        return bool(link.recv(1, socket.MSG_PEEK))
    except OSError:  # it was reset
        return False


def find_peer_user(link: socket.socket) -> int | None:
    """Return the user who made the other end of this IPv4 connection on this host; None if it is closed."""
    try:
        wanted = _format(link.getpeername()), _format(link.getsockname()), _ESTABLISHED
    except OSError:  # it was reset
        return None
    for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]:
        columns = line.split()
        if (columns[_LOCAL], columns[_REMOTE], columns[_STATE]) == wanted:
            return int(columns[_UID])
    return None


def _format(address: tuple[str, int]) -> str:
    host, port = address
    (number,) = _ADDRESS.unpack(socket.inet_aton(host))
    return f"{number:08X}:{port:04X}"
