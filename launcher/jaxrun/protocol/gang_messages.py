"""The messages between a rank of a gang and the parent, and their bytes.

    parent                       rank
                 ◀──────────     READY            (after the handshake, see auth.py)
    CALL         ──────────▶                      (run this function)
    VALUE        ◀─────────▶     VALUE            (any number, both ways, while the function runs)
                 ◀──────────     STDOUT, STDERR   (what it prints)
    END_CALL     ──────────▶                      (the parent needs nothing more from this call)
                 ◀──────────     ENDED            (the function has ended; its result is pickled next)
                 ◀──────────     RESULT | EXCEPTION
    SHUTDOWN     ──────────▶

jaxrun's own functions that run in such calls have messages of their own: map_messages.py, pytest_messages.py.

A message has three parts: a header; the sizes of the buffers and a note; a pickle and the buffers (see payload.py). If
the buffers are in a memory file, its descriptor travels with the first byte. Each part that is not empty is followed by
its tag, so the sizes for which memory is allocated are known to come from the other end.

    header = magic, kind, flags, call, lengths of note and pickle, number of buffers
    flags  = 1 with a memory file, else 0
"""

from __future__ import annotations

import enum
import struct
from typing import Any, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from .message_tags import digest
from .payload import OwnedDescriptor, Payload, Reduce, dump

MAGIC = b"JXP2"
HEADER = struct.Struct("<4sBBxxIIQIxxxx")
SIZE = struct.Struct("<Q")
SHARED = 1


class GangMessageKind(enum.IntEnum):
    CALL = 1
    VALUE = 2
    END_CALL = 3
    SHUTDOWN = 4
    READY = 5
    STDOUT = 6
    STDERR = 7
    RESULT = 8
    EXCEPTION = 9
    ENDED = 10


class GangMessage(Struct, frozen=True, eq=False):
    """One message.

    call:  the number of the call that it belongs to
    note:  JSON for the receiver, who can read it without loading the payload
    """

    kind: GangMessageKind
    call: int
    payload: Payload = Payload()
    note: bytes = b""

    def load(self) -> Any:
        return self.payload.load()

    def with_copied_buffers(self) -> GangMessage:
        """Return a copy with copies of the arrays' memory, which may change before the message has been sent."""
        return replace(self, payload=self.payload.copy_buffers())

    def digests(self) -> tuple[bytes, ...]:
        return tuple(digest(*part) for part in self.to_parts())

    def to_parts(self) -> list[list[bytes | bytearray | memoryview]]:
        """Return its bytes: parts in pieces, the empty ones left out."""
        payload = self.payload
        flags = SHARED if payload.file is not None else 0
        counts = (len(self.note), len(payload.body), len(payload.buffers))
        header = HEADER.pack(MAGIC, self.kind, flags, self.call, *counts)
        sizes = b"".join(SIZE.pack(buffer.nbytes) for buffer in payload.buffers)
        parts: list[list[bytes | bytearray | memoryview]]
        parts = [[header], [sizes + self.note], [payload.body, *payload.buffers]]
        parts = [[piece for piece in part if len(piece)] for part in parts]
        return [part for part in parts if part]


def pack(
    kind: GangMessageKind,
    call: int,
    value: Any,
    *,
    share: bool,
    note: bytes = b"",
    reduce: Reduce | None = None,
    file: OwnedDescriptor | None = None,
) -> GangMessage:
    """Return a message with `value`; see payload.dump."""
    return GangMessage(kind, call, dump(value, share=share, reduce=reduce, file=file), note)


class CellOutput(NamedTuple):
    """The result of a notebook's cell on a rank: displays, by MIME type; values that are not text are in base64.

    result:    of the cell's last expression; empty if there is none, or it is None
    displays:  what else the cell has shown, such as figures, in order
    """

    result: dict[str, str] = {}  # noqa: RUF012
    displays: tuple[dict[str, str], ...] = ()
