"""TCP connections on this host's loopback interface that only processes of the same user may make."""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path

_ADDRESS = struct.Struct("=I")  # the kernel prints an address as a number of this machine's byte order
_LOCAL, _REMOTE, _STATE, _UID = 1, 2, 3, 7  # columns
_ESTABLISHED = "01"  # the kernel no longer knows the user of a socket that is closed, and shows root


def accept_own(listener: socket.socket) -> socket.socket:
    """Return the next connection that a process of this user has made; close those of other users."""
    while True:
        link, _ = listener.accept()
        if find_peer_user(link) == os.geteuid():
            return link
        link.close()


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
