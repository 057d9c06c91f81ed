"""Ranks that keep a copy for a rank of another host, and what they send each other.

    writer                                   keeper of the copy
    {"keep": bytes}          ──────────▶
    {"at": offset} + chunk   ──────────▶     (any number)
    {"manifest": …}          ──────────▶
                             ◀──────────     {}        (the copy is whole)

    reader                                   any rank of the host that has the file
    {"read": name, …}        ──────────▶
                             ◀──────────     {} + chunk

The messages are those of gang_messages, with JSON in their notes: nothing is unpickled. Each end proves in a handshake
that it knows the ranks' token, and each message has a tag.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

from jaxrun.errors import ProtocolError
from jaxrun.protocol.addresses import Address, parse_addresses
from jaxrun.protocol.auth import ServerHandshake
from jaxrun.protocol.codec import from_content, to_content
from jaxrun.protocol.connect import HeadAddress, connect
from jaxrun.protocol.gang_messages import GangMessage, GangMessageKind, GangMessageReader, GangMessageWriter
from jaxrun.protocol.message_tags import ConnectionTags, digest
from jaxrun.protocol.payload import Payload
from jaxrun_runtime.state_snapshots.host_memory import COPY, HostMemory
from jaxrun_runtime.state_snapshots.layout import Manifest

_CONNECT_TIMEOUT_S = 30.0
_HANDSHAKE_TIMEOUT_S = 10.0
_MAX_UNPROVEN = 64  # connections whose handshake is under way


class PeerConnection:
    """An authenticated connection to the rank `rank`, which blocks."""

    def __init__(self, rank: int, connection: socket.socket, tags: ConnectionTags | None) -> None:
        assert tags is not None
        connection.setblocking(True)
        self.rank = rank
        self.connection = connection
        self._reader = GangMessageReader(connection, tags.received)
        self._writer = GangMessageWriter(connection, tags.sent)

    def send(self, note: dict[str, Any], chunk: bytes = b"", checksum: bytes = b"") -> None:
        """Send a note, and a chunk whose digest is `checksum`. Raises ConnectionError."""
        payload = Payload(buffers=(memoryview(chunk),) if chunk else ())
        message = GangMessage(GangMessageKind.VALUE, 0, payload, json.dumps(note, default=to_content).encode())
        parts = message.to_parts()
        known = [checksum] if chunk else []
        self._writer.add(message, [*(digest(*part) for part in parts[: len(parts) - len(known)]), *known])
        with self._says_who():
            self._writer.flush()

    def receive(self) -> tuple[dict[str, Any], memoryview]:
        """Return a note, and a chunk, which may be empty. Raises ConnectionError or ProtocolError."""
        with self._says_who():
            message = self._reader.receive()
        note: dict[str, Any] = json.loads(message.note)
        return note, message.payload.buffers[0] if message.payload.buffers else memoryview(b"")

    @contextlib.contextmanager
    def _says_who(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, OSError):  # the other end's fault, by this text: see diagnosis/consequences.py
            raise ConnectionError(f"the connection to rank {self.rank}, for snapshots, was lost") from None


def connect_to_rank(rank: int, address: str, token: str, own_rank: int) -> PeerConnection:
    """Raises UnavailableError."""
    where = HeadAddress(token, parse_addresses(address))
    found = connect(lambda: where, own_rank, _CONNECT_TIMEOUT_S, target=f"rank {rank}, a peer for snapshots,")
    return PeerConnection(rank, found.connection, found.tags)


class RankServer:
    """Keeps copies for other ranks, and reads for them what is on this host; a thread for each connection.

    failure:  why it could not keep a copy
    """

    def __init__(self, memory: HostMemory, token: str, ip: str) -> None:
        """Listen at a port of `ip`. Raises OSError."""
        self._memory = memory
        self._token = token
        self._unproven: deque[socket.socket] = deque()
        self.failure: BaseException | None = None
        self._listening = socket.create_server((ip, 0), family=socket.AF_INET6 if ":" in ip else socket.AF_INET)
        self.address = str(Address(ip, self._listening.getsockname()[1]))
        threading.Thread(target=self._accept, name="jaxrun-peers", daemon=True).start()

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
            threading.Thread(target=self._serve, args=(connection,), name="jaxrun-peer", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(EOFError, OSError, ProtocolError):
            peer = self._authenticate(connection)
            while peer is not None:
                note, _ = peer.receive()
                if "keep" in note:
                    self._keep(peer, note["keep"])
                else:
                    data = self._memory.read(note["read"].replace("/", ""), note["offset"], note["nbytes"])
                    peer.send({}, data, digest(data))

    def _authenticate(self, connection: socket.socket) -> PeerConnection | None:
        """The rank that has connected; None for one that says nothing. Raises ProtocolError for a stranger."""
        try:
            handshake, until = ServerHandshake(connection, self._token), time.monotonic() + _HANDSHAKE_TIMEOUT_S
            poll = select.poll()
            poll.register(connection, select.POLLIN)
            while not handshake.advance():
                if not poll.poll(max(0.0, until - time.monotonic()) * 1000):
                    return None
            return PeerConnection(handshake.rank, connection, handshake.tags)
        finally:
            with contextlib.suppress(ValueError):
                self._unproven.remove(connection)

    def _keep(self, peer: PeerConnection, nbytes: int) -> None:
        try:
            draft = self._memory.begin(peer.rank, COPY, nbytes)
            while "at" in (received := peer.receive())[0]:
                draft.write(received[1], received[0]["at"])
            self._memory.commit(draft, from_content(Manifest, received[0]["manifest"]))
        except OSError as error:
            if not isinstance(error, ConnectionError):
                self.failure = error
            raise
        peer.send({})
