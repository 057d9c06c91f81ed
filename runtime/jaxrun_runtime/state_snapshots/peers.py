"""Reads and writes the snapshots' files on another host, through a connection to one of its ranks.

    {"name": …, "offset": …, "size": …, "is_write": …} + chunk    ──────────▶
                                                                  ◀──────────    {"error": …} + chunk

The messages have the format of gang_messages, with JSON in their notes: nothing is unpickled. Each end proves in a
handshake that it knows the ranks' token, and each message has a tag. The tag uses AES-GCM's hash with a key of the
ranks instead of a digest, because it takes a twentieth of the time. Only the tags are sent, so they do not reveal the
key.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import socket
import time
from collections import deque
from typing import Any

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from jaxrun.errors import ProtocolError
from jaxrun.protocol.addresses import Address, parse_addresses
from jaxrun.protocol.auth import ServerHandshake
from jaxrun.protocol.blocking_connection import BlockingConnection
from jaxrun.protocol.connect import HeadAddress, connect
from jaxrun.protocol.message_tags import ConnectionTags
from jaxrun_runtime.own_threads import start_thread
from jaxrun_runtime.state_snapshots.host_memory import Data, HostMemory

_CONNECT_TIMEOUT_S = 30.0
_HANDSHAKE_TIMEOUT_S = 10.0
_MAX_UNPROVEN = 64  # connections without a handshake; beyond that the first is dropped
_NONCE = bytes(12)


class PeerMemory:
    """The snapshots' files on the host of another rank. Methods raise OSError, ConnectionError or ProtocolError."""

    def __init__(self, rank: int, address: str, token: str, own_rank: int) -> None:
        """Connect. Raises UnavailableError."""
        where, target = HeadAddress(token, parse_addresses(address)), f"rank {rank}, a peer for snapshots,"
        found = connect(lambda: where, own_rank, _CONNECT_TIMEOUT_S, target=target)
        self._rank = rank
        self._connection = _open_connection(rank, found.connection, found.tags, token)

    def write(self, name: str, size: int, offset: int, data: Data) -> None:
        self._request({"name": name, "offset": offset, "size": size, "is_write": True}, data)

    def read(self, name: str, offset: int, nbytes: int) -> Data:
        return self._request({"name": name, "offset": offset, "size": nbytes, "is_write": False})

    def _request(self, note: dict[str, Any], chunk: Data = b"") -> Data:
        self._connection.send_bytes(chunk, json.dumps(note).encode())
        reply = self._connection.receive()
        if error := json.loads(reply.note)["error"]:
            raise OSError(f"rank {self._rank}: {error}")
        return reply.payload.body


def _open_connection(
    rank: int, connection: socket.socket, tags: ConnectionTags | None, token: str
) -> BlockingConnection:
    assert tags is not None
    cipher = AESGCM(hmac.digest(token.encode(), b"jaxrun snapshots", "sha256"))
    for each in (tags.sent, tags.received):
        each.digest = lambda *pieces: cipher.encrypt(_NONCE, b"", pieces[0] if len(pieces) == 1 else b"".join(pieces))
    return BlockingConnection(connection, tags, f"rank {rank}, for snapshots,")


class RankServer:
    """Reads and writes this host's files for other ranks, with a thread for each connection."""

    def __init__(self, memory: HostMemory, token: str, ip: str) -> None:
        """Listen at a port of `ip`. Raises OSError."""
        self._memory = memory
        self._token = token
        self._unproven: deque[socket.socket] = deque()  # some may be closed already
        self._listening = socket.create_server((ip, 0), family=socket.AF_INET6 if ":" in ip else socket.AF_INET)
        self.address = str(Address(ip, self._listening.getsockname()[1]))
        start_thread(self._accept, "jaxrun-peers")

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:  # there may be no descriptor left
                time.sleep(0.1)
                continue
            self._unproven.append(connection)
            if len(self._unproven) > _MAX_UNPROVEN:
                with contextlib.suppress(OSError):  # its thread closes it
                    self._unproven.popleft().shutdown(socket.SHUT_RDWR)
            start_thread(self._serve, "jaxrun-peer", connection)

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(EOFError, OSError, ProtocolError, ValueError):
            handshake = ServerHandshake(connection, self._token)
            connection.settimeout(_HANDSHAKE_TIMEOUT_S)
            handshake.advance()  # blocks, because the socket has a timeout
            self._unproven.remove(connection)
            peer = _open_connection(handshake.number, connection, handshake.tags, self._token)
            while True:
                request = peer.receive()
                note = json.loads(request.note)
                name, data, error = note["name"].replace("/", ""), b"", ""
                try:
                    if note["is_write"]:
                        self._memory.write(name, note["size"], note["offset"], request.payload.body)
                    else:
                        data = self._memory.read(name, note["offset"], note["size"])
                except OSError as failure:
                    error = str(failure)
                peer.send_bytes(data, json.dumps({"error": error}).encode())
