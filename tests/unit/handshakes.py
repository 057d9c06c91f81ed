"""The other end of a handshake: what it receives, and answers that it may send."""

import struct

from jaxrun.protocol import auth
from jaxrun.protocol.auth import ChallengeResponse
from jaxrun.protocol.codec import MessageDecoder, encode_message_pack, message_types

TOKEN = auth.new_token()


def read(peer):
    """The next message of the handshake."""
    codec = MessageDecoder(message_types(auth.ToClient | auth.ToServer))
    while not (found := codec.feed(data := peer.recv(codec.missing_bytes))):
        assert data, "the other side has closed the connection"
    return found[0]


def frame(content):
    body = content if isinstance(content, bytes) else encode_message_pack(content)
    return struct.pack("!I", len(body)) + body


def answer_to(challenge, rank=0, token=TOKEN):
    nonce = auth.new_nonce()
    return ChallengeResponse(rank, nonce, auth.make_proof(token, "client", rank, challenge.nonce, nonce))
