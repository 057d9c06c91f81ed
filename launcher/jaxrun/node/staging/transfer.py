"""Copies go from host to host: each takes a content from one that has it, or still gets it, and gives it to others.

    taker                                     giver
    name of a content     ──────────▶                           (after the handshake, see protocol/auth.py)
                          ◀──────────    manifest
                          ◀──────────    the bytes of all files, in pieces

A piece is given on as soon as it is written, so that all hosts of a tree write at the same time. What has come is
compared with its hash.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress

from jaxrun.errors import ProtocolError, UnavailableError
from jaxrun.node.channel.listener import Peer
from jaxrun.node.staging.content import CHUNK_BYTES, Entry, name_of, read_manifest, write_file
from jaxrun.node.staging.copies import Copies, Copy
from jaxrun.protocol.addresses import parse_addresses
from jaxrun.protocol.connect import HeadAddress, connect
from jaxrun.protocol.gang_messages import GangMessage, GangMessageKind, GangMessageReader, GangMessageWriter
from jaxrun.protocol.message_tags import ConnectionTags
from jaxrun.protocol.payload import Payload
from jaxrun.protocol.stage_messages import StagedContent

_SILENCE_S = 60.0  # after which another host is asked
_CONNECT_S = 10.0


class _Stream:
    """Pieces of bytes, each a message of a gang's (protocol/gang_messages.py). Raises ProtocolError for any failure."""

    def __init__(self, connection: socket.socket, tags: ConnectionTags | None) -> None:
        assert tags is not None
        connection.settimeout(_SILENCE_S)
        self._socket = connection
        self._reader = GangMessageReader(connection, tags.received)
        self._writer = GangMessageWriter(connection, tags.sent)

    def close(self) -> None:
        """Close the connection, also while another thread uses it."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def send(self, piece: bytes) -> None:
        try:
            self._writer.add(GangMessage(GangMessageKind.VALUE, 0, Payload(piece)))
            self._writer.flush()
        except OSError as error:
            raise ProtocolError(f"takes nothing more: {error}") from None

    def receive(self) -> bytes | bytearray | memoryview:
        try:
            return self._reader.receive().payload.body
        except (OSError, EOFError) as error:
            raise ProtocolError(f"gives nothing more: {error or 'it has closed the connection'}") from None


class Supply:
    """What this host has of each content, for others. Threads use it."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._copies: dict[str, tuple[Copy, int]] = {}  # and how many bytes of its files are there
        self._is_closed = False

    def add(self, name: str, nbytes: int, make: Callable[[], Copy]) -> Copy:
        """From now on so many bytes of the files are there, in their order, in what `make` returns; it may move it."""
        with self._condition:
            self._copies[name] = copy, _ = make(), nbytes
            self._condition.notify_all()
        return copy

    def serve(self, peer: Peer) -> None:
        """Give contents, in a thread, to a peer that has proved to know the token."""
        threading.Thread(target=self._serve, args=(peer,), name="jaxrun-stage", daemon=True).start()

    def close(self) -> None:
        """End the threads that wait for something to give."""
        with self._condition:
            self._is_closed = True
            self._condition.notify_all()

    def _serve(self, peer: Peer) -> None:
        with suppress(ProtocolError, OSError), closing(_Stream(peer.connection, peer.tags)) as stream:
            while True:
                name, position = bytes(stream.receive()).decode(errors="replace"), 0
                entries = self._wait(name, 0).entries
                stream.send(json.dumps(entries).encode())
                for entry in entries:
                    for begin, end in _pieces(entry):
                        stream.send(self._read(name, position + end, entry, begin, end))
                    position += entry.size

    def _wait(self, name: str, nbytes: int) -> Copy:
        """Wait for so many bytes. Raises ProtocolError once there will be no more."""
        with self._condition:
            self._condition.wait_for(lambda: self._is_closed or self._copies.get(name, ("", -1))[1] >= nbytes)
            if self._is_closed:
                raise ProtocolError("nothing more is given")
            return self._copies[name][0]

    def _read(self, name: str, nbytes: int, entry: Entry, begin: int, end: int) -> bytes:
        """A piece of a file, once so many bytes of all files are there."""
        with self._condition:  # so that the copy is not moved meanwhile
            file = open(f"{self._wait(name, nbytes).path}/{entry.path}", "rb")  # noqa: SIM115
        with file:
            file.seek(begin)
            return file.read(end - begin)


def _pieces(entry: Entry) -> Iterator[tuple[int, int]]:
    """Where the pieces of a file begin and end."""
    for begin in range(0, entry.size, CHUNK_BYTES):
        yield begin, min(begin + CHUNK_BYTES, entry.size)


class Taker:
    """Takes contents from other hosts; `received` bytes so far."""

    def __init__(self, supply: Supply, number: int, token: str) -> None:
        """`number` is that of the agent."""
        self._supply, self._number, self._token = supply, number, token
        self._stream: _Stream | None = None
        self._is_stopped = False
        self.received = 0

    def stop(self) -> None:
        """Let `take` fail, in another thread."""
        self._is_stopped = True
        if self._stream is not None:
            self._stream.close()

    def take(self, copies: Copies, content: StagedContent, givers: Sequence[str]) -> Copy:
        """This host's copy of a content, taken from the first of these addresses that gives it where there is none.

        Raises OSError if it cannot be written, UnavailableError if nobody gives it.
        """
        failures = []
        copy = copies.find(content.name)
        for giver in givers if copy is None else ():
            try:
                copy = self._take_from(giver, copies, content)
                break
            except ProtocolError as error:
                failures.append(f"{giver} {error}")
            except UnavailableError as error:
                failures.append(str(error))
        if copy is None:
            raise UnavailableError("; ".join(failures))
        found = copy
        return self._supply.add(content.name, content.nbytes, lambda: found)

    def _take_from(self, giver: str, copies: Copies, content: StagedContent) -> Copy:
        address, name = HeadAddress(self._token, parse_addresses(giver)), content.name
        found = connect(lambda: address, self._number, _CONNECT_S, target="giver of a copy", check=self._check)
        with closing(_Stream(found.connection, found.tags)) as self._stream:
            self._stream.send(name.encode())
            try:
                entries = read_manifest(bytes(self._stream.receive()))
            except (ValueError, TypeError) as error:
                raise ProtocolError(f"sends no manifest: {error}") from None
            if name_of(entries) != name:
                raise ProtocolError("sends another content")
            with copies.begin(entries) as draft:
                self._take_files(self._stream, name, draft)
                return self._supply.add(name, content.nbytes, lambda: copies.finish(draft, name, entries))

    def _take_files(self, stream: _Stream, name: str, draft: Copy) -> None:
        """Write the files as they come. Raises ProtocolError if one is not what it should be."""
        position = 0

        def receive(entry: Entry) -> Iterator[bytes | bytearray | memoryview]:
            for begin, _ in _pieces(entry):
                self._supply.add(name, position + begin, lambda: draft)
                yield (piece := stream.receive())
                self.received += len(piece)

        for entry in draft.entries:
            if entry.is_file:
                if write_file(f"{draft.path}/{entry.path}", entry, receive(entry)) != entry.digest:
                    raise ProtocolError(f"sends {entry.path} with another content than it had when it was read")
                position += entry.size
                self._supply.add(name, position, lambda: draft)

    def _check(self) -> None:
        if self._is_stopped:
            raise UnavailableError("it is no longer wanted")
