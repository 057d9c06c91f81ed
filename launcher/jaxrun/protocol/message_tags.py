"""Authenticates the messages after the handshake, so that nobody between two hosts can change them.

Each message carries a tag that only the two ends of its connection can make: BLAKE2b, with a key for the connection and
the direction, over the number of the message and the digest of its bytes. Nobody can change, drop, repeat or reorder
a message, or send it back to its sender, without being noticed. The contents are not encrypted.

The keys come from the job's token and both nonces of the handshake. On a Unix socket nobody is between the two ends,
so messages have no tags.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable

from msgspec import Struct

from jaxrun.errors import ProtocolError

_TAG_BYTES = 16


def digest(*pieces: bytes | bytearray | memoryview) -> bytes:
    """Return the digest of a message, which may be computed once for all who receive the same bytes."""
    total = hashlib.blake2b(digest_size=32)
    for piece in pieces:
        total.update(piece)
    return total.digest()


class Tags:
    """The tags of the messages in one direction of a connection, in order; each end has its own with the same key.

    nbytes:  size of a tag
    digest:  digest of a message's bytes, the same at both ends
    """

    nbytes = _TAG_BYTES

    def __init__(self, key: bytes) -> None:
        self.digest: Callable[..., bytes] = digest
        self._key = key
        self._count = 0

    def next(self, message_digest: bytes) -> bytes:
        """Return the tag of the next message."""
        number = self._count.to_bytes(8)
        self._count += 1
        return hashlib.blake2b(number + message_digest, digest_size=_TAG_BYTES, key=self._key).digest()

    def verify(self, tag: bytes | bytearray, *pieces: bytes | bytearray | memoryview) -> None:
        """Raise ProtocolError if `tag` does not belong to the next message, whose bytes are `pieces`."""
        if not hmac.compare_digest(tag, self.next(self.digest(*pieces))):
            raise ProtocolError("a message was changed, repeated or left out on its way, or comes from someone else")


class ConnectionTags(Struct, frozen=True):
    """The tags of one end of a connection, by direction."""

    sent: Tags
    received: Tags


def derive_tags(token: str, number: int, server_nonce: str, client_nonce: str, *, is_server: bool) -> ConnectionTags:
    """Return the tags of this end; both ends know everything that they depend on, and nobody else knows `token`."""

    def key(direction: str) -> bytes:
        text = f"jaxrun messages {direction} {number} {server_nonce} {client_nonce}"
        return hmac.digest(token.encode(), text.encode(errors="surrogatepass"), "sha256")

    to_server, to_client = Tags(key("to server")), Tags(key("to client"))
    return ConnectionTags(to_client, to_server) if is_server else ConnectionTags(to_server, to_client)
