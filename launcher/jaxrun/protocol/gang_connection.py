"""The bytes of messages on a socket, for gangs, state snapshots and the copies of --stage."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator, Sequence

from jaxrun.errors import ProtocolError

from .gang_messages import HEADER, MAGIC, SHARED, SIZE, GangMessage, GangMessageKind
from .message_tags import Tags
from .payload import OwnedDescriptor, Payload

_MAX_BUFFERS = 2**20
_MAX_PIECES = 64  # passed to the kernel at once
_ANCILLARY_BYTES = socket.CMSG_SPACE(4)


class GangMessageReader:
    """Reads messages from a socket as they arrive; whether it blocks depends on the socket.

    tags:  the tags that must follow the messages, verified before anything is unpickled; None for no tags
    """

    def __init__(self, connection: socket.socket, tags: Tags | None) -> None:
        self._socket = connection
        self._tags = tags
        self._files: list[OwnedDescriptor] = []  # of messages that have not arrived completely
        self._parser = self._parse()
        self._missing = next(self._parser)
        self._message: GangMessage | None = None
        self.received_bytes = 0

    def receive(self) -> GangMessage:
        """Return the next message.

        Raises BlockingIOError if it has not arrived completely, EOFError if none will, ProtocolError or OSError.
        """
        while True:
            _remove_bytes(self._missing, self._fill())
            if not self._missing:
                self._missing = next(self._parser)
            if self._message is not None:
                message, self._message = self._message, None
                return message

    def _fill(self) -> int:
        pieces = self._missing[:_MAX_PIECES]
        count, ancillary, flags, _ = self._socket.recvmsg_into(pieces, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC)
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds = struct.iter_unpack("i", data[: len(data) // 4 * 4])
                self._files += [OwnedDescriptor(fd) for (fd,) in fds]
        if flags & socket.MSG_CTRUNC:
            raise ProtocolError("descriptors were lost on their way: too many files are open")
        if not count:
            raise EOFError
        self.received_bytes += count
        return count

    def _parse(self) -> Iterator[list[memoryview]]:
        """Yield the memory to fill next; put a complete message into `_message`."""
        while True:
            yield from self._parse_one()  # its variables hold the message no longer than necessary

    def _parse_one(self) -> Iterator[list[memoryview]]:
        header = bytearray(HEADER.size)
        yield from self._fill_part(header)
        magic, kind, flags, call, note_size, body_size, count = HEADER.unpack(header)
        wrong_file = flags & SHARED and not (self._files and count == 1)
        if magic != MAGIC or wrong_file or count > _MAX_BUFFERS or kind not in GangMessageKind.__members__.values():
            raise ProtocolError("what arrived is not a message of this version of jaxrun")
        (rest,) = _allocate(count * SIZE.size + note_size)
        yield from self._fill_part(rest)
        sizes = [size for (size,) in SIZE.iter_unpack(rest[: count * SIZE.size])]
        body, *buffers = _allocate(body_size, *sizes)
        yield from self._fill_part(body, *buffers)
        file = self._files.pop(0) if flags & SHARED else None
        payload = Payload(body, tuple(map(memoryview, buffers)), file)
        note = bytes(rest[count * SIZE.size :])
        self._message = GangMessage(GangMessageKind(kind), call, payload, note)

    def _fill_part(self, *pieces: bytearray) -> Iterator[list[memoryview]]:
        filled = [piece for piece in pieces if piece]
        if not filled:
            return
        tag = bytearray(self._tags.nbytes if self._tags is not None else 0)
        yield [memoryview(piece) for piece in (*filled, tag) if piece]
        if self._tags is not None:
            self._tags.verify(tag, *filled)


def _allocate(*sizes: int) -> list[bytearray]:
    try:
        return [bytearray(size) for size in sizes]
    except (MemoryError, OverflowError):
        raise ProtocolError(f"a message of {sum(sizes):,} bytes arrives, for which there is no memory") from None


class GangMessageWriter:
    """Writes messages to a socket, in order; keeps what does not fit yet. `tags` follow the messages."""

    def __init__(self, connection: socket.socket, tags: Tags | None) -> None:
        self._socket = connection
        self._tags = tags
        self._pieces: list[memoryview] = []
        self._files: dict[int, OwnedDescriptor] = {}  # by id of the piece with which they travel

    def add(self, message: GangMessage, digests: Sequence[bytes] = ()) -> None:
        """Add a message; `digests` saves computing `message.digests()` for each of many receivers."""
        pieces: list[memoryview] = []
        if self._tags is not None:
            digests = digests or [self._tags.digest(*part) for part in message.to_parts()]
        for number, part in enumerate(message.to_parts()):
            pieces += [memoryview(piece).cast("B") for piece in part]
            if self._tags is not None:
                pieces.append(memoryview(self._tags.next(digests[number])))
        if message.payload.file is not None:
            self._files[id(pieces[0])] = message.payload.file
        self._pieces += pieces

    def flush(self) -> bool:
        """Send the messages that were added; return whether nothing is left. Raises OSError."""
        while self._pieces:
            first = self._pieces[0]
            try:
                count = self._send(self._files.get(id(first)))
            except BlockingIOError:
                return False
            self._files.pop(id(first), None)
            _remove_bytes(self._pieces, count)
        return True

    def _send(self, file: OwnedDescriptor | None) -> int:
        # A piece with a file starts a packet of its own, and the next such piece is not in the same packet.
        pieces = self._pieces[:1]
        for piece in self._pieces[1:_MAX_PIECES]:
            if id(piece) in self._files:
                break
            pieces.append(piece)
        ancillary = [] if file is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", file.fd))]
        return self._socket.sendmsg(pieces, ancillary)


def _remove_bytes(pieces: list[memoryview], count: int) -> None:
    while count:
        first = pieces[0]
        if count < first.nbytes:
            pieces[0] = first[count:]
            return
        count -= first.nbytes
        del pieces[0]
