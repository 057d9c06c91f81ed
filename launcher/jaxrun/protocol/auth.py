"""The mutual handshake of an agent with the head, and of a gang's rank with its parent.

    client                               server
                        ◀──────────      Challenge
    ChallengeResponse   ──────────▶                          proves that the client knows the token
                        ◀──────────      Welcome | Rejected  proves that the server knows it, too

A proof is an HMAC-SHA256 over both nonces, the prover's role, and the client's number (of an agent, or a rank) and
purpose. The token itself never travels, and a proof can be neither replayed nor reflected. Messages after the
handshake are authenticated (message_tags.py), but not encrypted.
"""

from __future__ import annotations

import contextlib
import enum
import hmac
import os
import socket
from collections.abc import Mapping

from jaxrun.errors import ProtocolError, UsageError

from .codec import M, Message, MessageDecoder, encode, message_types
from .message_tags import ConnectionTags, derive_tags
from .names import TOKEN

HANDSHAKE_VERSION = 1
MAX_FRAME_BYTES = 4096
_TOKEN_BYTES = 32
_MIN_GIVEN_BYTES = 16  # of a token that a person chooses: a shorter one could be guessed from one proof


_MAKE_TOKEN = f"make one, and set it on all hosts: export {TOKEN}=$(openssl rand -hex 32)"


class Challenge(Message, frozen=True):
    """The server's first message to anyone who connects; `version` is the version of the handshake."""

    version: int
    nonce: str


class Purpose(enum.StrEnum):
    """The purpose of a client's connection."""

    JOIN = "join"  # to exchange messages as an agent, or as a rank
    COPY = "copy"  # to receive staged directories, as an agent whose messages travel on another connection


class ChallengeResponse(Message, frozen=True):
    """The number of the agent or rank that connects, and its proof."""

    number: int
    nonce: str
    proof: str
    purpose: Purpose = Purpose.JOIN


class Welcome(Message, frozen=True):
    """The client is accepted; `proof` is the server's."""

    proof: str


class Rejected(Message, frozen=True):
    """The server's reason for not accepting the client."""

    reason: str


ToServer = ChallengeResponse
ToClient = Challenge | Welcome | Rejected


def new_token() -> str:
    """Return a secret for one job or gang: 64 hex digits."""
    return os.urandom(_TOKEN_BYTES).hex()


def derive_rank_token(token: str) -> str:
    """Return the secret that the ranks of a job share; it does not reveal the job's token."""
    return hmac.digest(token.encode(), b"jaxrun ranks", "sha256").hex()


def job_fingerprint(token: str) -> str:
    """Return what tells the job of this token from others; it may be seen by anyone, and does not reveal the token."""
    return hmac.digest(token.encode(), b"jaxrun job", "sha256").hex()[:32]


def peer_token(token: str) -> str:
    """Return the secret that the agents of a job prove to each other; it is not the one for the head."""
    return f"peers {token}"


def read_given_token(environ: Mapping[str, str]) -> str:
    """Return the token that people have given, the same on all hosts; empty if they have given none.

    Raises UsageError, which does not show the token, if it is too short or not text.
    """
    token = environ.get(TOKEN, "")
    try:
        size = len(token.encode())
    except UnicodeEncodeError:
        raise UsageError(f"{TOKEN} is not valid UTF-8; {_MAKE_TOKEN}") from None
    if 0 < size < _MIN_GIVEN_BYTES:
        raise UsageError(f"{TOKEN} has {size} bytes, but needs {_MIN_GIVEN_BYTES}, or it can be guessed; {_MAKE_TOKEN}")
    return token


def new_nonce() -> str:
    return os.urandom(_TOKEN_BYTES).hex()


def _check_nonce(nonce: str) -> None:
    """Raise ProtocolError unless the nonce is 64 hex digits: a proof joins nonces with spaces."""
    if len(nonce) != 2 * _TOKEN_BYTES or not set(nonce) <= set("0123456789abcdef"):
        raise ProtocolError("is not a jaxrun process: it sent no valid nonce")


def make_proof(
    token: str, role: str, number: int, server_nonce: str, client_nonce: str, purpose: Purpose = Purpose.JOIN
) -> str:
    """Return the proof that only a process with `token` can compute; `role` is "client" or "server"."""
    text = f"jaxrun {role} {number} {purpose} {server_nonce} {client_nonce}"
    return hmac.digest(token.encode(), text.encode(errors="surrogatepass"), "sha256").hex()


def proofs_equal(one: str, other: str) -> bool:
    """Compare two proofs in constant time."""
    return hmac.compare_digest(one.encode(errors="surrogatepass"), other.encode(errors="surrogatepass"))


class ServerHandshake:
    """The server's side, on a connection that was just accepted; the connection becomes non-blocking.

    number, purpose:  the client's, once it is authenticated
    tags:             for the messages after the handshake, once the client is authenticated; None on a Unix socket
    """

    def __init__(self, connection: socket.socket, token: str) -> None:
        connection.setblocking(False)
        self.connection = connection
        self.number = -1
        self.purpose = Purpose.JOIN
        self.tags: ConnectionTags | None = None
        self._token = token
        self._nonce = new_nonce()
        self._decoder = MessageDecoder(message_types(ToServer), MAX_FRAME_BYTES)
        with contextlib.suppress(OSError):  # `advance` notices a client that has gone
            connection.send(encode(Challenge(HANDSHAKE_VERSION, self._nonce)))

    def advance(self) -> bool:
        """Handle what has arrived; return whether the client is authenticated now.

        Raises OSError or ProtocolError if it never will be; the text completes "the peer …".
        """
        try:
            response = _receive(self.connection, self._decoder)
        except EOFError:
            raise ProtocolError("closed the connection before it proved anything") from None
        except ProtocolError as error:
            raise ProtocolError(f"is not a jaxrun process: {error}") from None
        if response is None:
            return False
        _check_nonce(response.nonce)
        nonces = self._nonce, response.nonce
        number, purpose = response.number, response.purpose
        if not proofs_equal(response.proof, make_proof(self._token, "client", number, *nonces, purpose)):
            with contextlib.suppress(OSError):
                self.connection.send(encode(Rejected("it does not know the token of this job")))
            raise ProtocolError("does not know the job's token")
        with contextlib.suppress(OSError):
            self.connection.send(encode(Welcome(make_proof(self._token, "server", number, *nonces, purpose))))
        self.number, self.purpose = number, purpose
        if self.connection.family != socket.AF_UNIX:
            self.tags = derive_tags(self._token, number, *nonces, is_server=True)
        return True


class ClientHandshake:
    """The client's side, on a non-blocking connection that may still be connecting.

    tags:  for the messages after the handshake, once the server is authenticated; None on a Unix socket
    """

    def __init__(self, connection: socket.socket, token: str, number: int, purpose: Purpose = Purpose.JOIN) -> None:
        self.connection = connection
        self._token = token
        self._number = number
        self._purpose = purpose
        self._nonce = new_nonce()
        self._server_nonce = ""
        self.tags: ConnectionTags | None = None
        self._decoder = MessageDecoder(message_types(ToClient), MAX_FRAME_BYTES)

    def advance(self) -> bool:
        """Handle what has arrived; return whether the server has proved itself.

        Raises OSError or ProtocolError if it never will; the text of the latter completes "ADDRESS …".
        """
        while True:
            try:
                message = _receive(self.connection, self._decoder)
            except EOFError:
                raise ProtocolError("closed the connection: it serves another job, or is not a jaxrun head") from None
            except ProtocolError:
                raise ProtocolError("answers, but is not a jaxrun head") from None
            match message:
                case None:
                    return False
                case Challenge():
                    self._respond(message)
                case Welcome():
                    self._accept(message)
                    return True
                case Rejected():
                    raise ProtocolError(f"refuses: {message.reason}")

    def _accept(self, welcome: Welcome) -> None:
        nonces = self._server_nonce, self._nonce
        proof = make_proof(self._token, "server", self._number, *nonces, self._purpose)
        if not self._server_nonce or not proofs_equal(welcome.proof, proof):
            raise ProtocolError("answers, but does not know this job's token")
        if self.connection.family != socket.AF_UNIX:
            self.tags = derive_tags(self._token, self._number, *nonces, is_server=False)

    def _respond(self, challenge: Challenge) -> None:
        if challenge.version != HANDSHAKE_VERSION:
            version = f"version {challenge.version} of the channel, this agent {HANDSHAKE_VERSION}"
            raise ProtocolError(f"speaks {version}")
        _check_nonce(challenge.nonce)
        self._server_nonce = challenge.nonce
        proof = make_proof(self._token, "client", self._number, challenge.nonce, self._nonce, self._purpose)
        self.connection.send(encode(ChallengeResponse(self._number, self._nonce, proof, self._purpose)))


def _receive(connection: socket.socket, decoder: MessageDecoder[M]) -> M | None:
    """Return the next message, None if it has not arrived yet. Reads no byte beyond it: later bytes are not ours.

    Raises EOFError, OSError or ProtocolError.
    """
    while True:
        try:
            data = connection.recv(decoder.missing_bytes)
        except BlockingIOError:
            return None
        if not data:
            raise EOFError
        messages = decoder.feed(data)
        if messages:
            return messages[0]
