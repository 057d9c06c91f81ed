"""How a rank of a gang and its parent on another host prove to each other, over TCP, that they know the gang's token.

    parent  ──▶  a nonce
            ◀──  a nonce, and HMAC("rank", both)
    parent  ──▶  HMAC("parent", both)

On one machine they meet at a Unix socket in a directory that only their user may enter, and need no proof.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import socket
from collections.abc import Iterator

from jaxrun.errors import ProtocolError

_BYTES = 32
_PATIENCE = 10.0  # seconds that the other side may take


@contextlib.contextmanager
def short(path: str) -> Iterator[str]:
    """Another name of a Unix socket: the kernel takes 107 bytes, and temporary directories may be far down. OSError."""
    folder, name = os.path.split(path)
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/{name}"
    finally:
        os.close(descriptor)


def admit(connection: socket.socket, token: str) -> None:
    """The parent's side. OSError or ProtocolError if the other one does not know `token`."""
    connection.settimeout(_PATIENCE)
    ours = os.urandom(_BYTES)
    connection.sendall(ours)
    answer = _receive(connection, 2 * _BYTES)
    _check(answer[_BYTES:], _proof(token, b"rank", ours + answer[:_BYTES]))
    connection.sendall(_proof(token, b"parent", ours + answer[:_BYTES]))
    connection.settimeout(None)


def enter(connection: socket.socket, token: str) -> None:
    """The rank's side. OSError or ProtocolError if the other one does not know `token`."""
    connection.settimeout(_PATIENCE)
    both = _receive(connection, _BYTES) + (ours := os.urandom(_BYTES))
    connection.sendall(ours + _proof(token, b"rank", both))
    _check(_receive(connection, _BYTES), _proof(token, b"parent", both))
    connection.settimeout(None)


def _proof(token: str, role: bytes, nonces: bytes) -> bytes:
    return hmac.digest(token.encode(), b"jaxrun gang " + role + nonces, "sha256")


def _check(said: bytes, wanted: bytes) -> None:
    if not hmac.compare_digest(said, wanted):
        raise ProtocolError("the other side does not know the token of this gang")


def _receive(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = connection.recv(count - len(data))
        if not piece:
            raise ProtocolError("the other side hung up before it had proved to be of this gang")
        data += piece
    return data
