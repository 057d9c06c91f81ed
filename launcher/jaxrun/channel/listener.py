"""Where the head listens: lets in who proves that it knows the job's token, and nobody else.

A peer that says nothing, says too much, or cannot prove itself is dropped, and costs nobody anything else.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxrun.channel.addresses import Address, Interface
from jaxrun.errors import ProtocolError, UnavailableError
from jaxrun.protocol import auth
from jaxrun.protocol.agent_messages import AgentHandshake, Challenge, ChallengeResponse, Rejected, Welcome
from jaxrun.protocol.codec import MessageDecoder, encode, message_types

CHANNEL_VERSION = 1
_BACKLOG = 4096
_HANDSHAKE_TIMEOUT_S = 10.0
_MAX_HANDSHAKE_FRAME_BYTES = 4096
_OUT_OF_DESCRIPTORS_PAUSE_S = 0.01
_ANSWERS = message_types(AgentHandshake)


@dataclass(slots=True)
class PendingPeer:
    """Somebody who has connected and not proved anything yet."""

    connection: socket.socket
    codec: MessageDecoder[ChallengeResponse]
    nonce: str
    deadline: float


@dataclass(frozen=True, slots=True)
class Peer:
    """One who knows the token; `connection` carries messages from now on."""

    rank: int
    connection: socket.socket


class Listener:
    """Listening sockets, and the guests at them. `fileno`s to listen to: those of `listeners` and of `guests`."""

    def __init__(
        self,
        interfaces: Sequence[Interface],
        token: str,
        welcome: Callable[[str], Welcome],
        *,
        everywhere: bool,
        port: int = 0,
    ) -> None:
        """Listen at all addresses of this host (`everywhere`), or only at those of `interfaces`. UnavailableError.

        `interfaces` are those that are offered to the others; `welcome` makes a Welcome of the head's proof.
        """
        self._token = token
        self._make_welcome = welcome
        try:
            self.sockets, self.addresses = _listen(interfaces, everywhere, port)
        except OSError as error:
            where = "any address" if everywhere else ", ".join(interface.ip for interface in interfaces)
            why = os.strerror(error.errno) if error.errno else str(error)
            raise UnavailableError(f"cannot listen at {where}, port {port or 'any'}: {why}") from None
        self._pending: OrderedDict[int, PendingPeer] = (
            OrderedDict()
        )  # the first to have come is the first to be dropped
        self.dropped: list[str] = []  # what became of those who were not let in, for the log

    def accept(self, listener: socket.socket) -> list[int]:
        """Greet those who have come; returns the descriptors to listen to, with `hear`."""
        came: list[int] = []
        while True:
            try:
                connection, _ = listener.accept()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    time.sleep(
                        _OUT_OF_DESCRIPTORS_PAUSE_S
                    )  # until some of the guests have been dropped; those who belong here can wait
                return came
            connection.setblocking(False)
            nonce = auth.new_nonce()
            guest = PendingPeer(
                connection,
                MessageDecoder(_ANSWERS, _MAX_HANDSHAKE_FRAME_BYTES),
                nonce,
                time.monotonic() + _HANDSHAKE_TIMEOUT_S,
            )
            self._pending[connection.fileno()] = guest
            came.append(connection.fileno())
            with contextlib.suppress(OSError):
                connection.send(encode(Challenge(CHANNEL_VERSION, nonce)))

    def receive(self, fd: int) -> Peer | None:
        """What the guest says: one who proves itself is let in. Another is dropped, or has to be heard again."""
        guest = self._pending[fd]
        try:
            data = guest.connection.recv(_MAX_HANDSHAKE_FRAME_BYTES)
            answers = guest.codec.feed(data)
        except BlockingIOError:
            return None
        except (OSError, ProtocolError) as error:
            self._drop(fd, f"is no agent: {error}")
            return None
        if not data:
            self._drop(fd, "went away without a word")
        return self._authenticate(fd, answers[0]) if answers else None

    def _authenticate(self, fd: int, answer: ChallengeResponse) -> Peer | None:
        guest = self._pending[fd]
        wanted = auth.make_proof(self._token, "agent", answer.rank, guest.nonce, answer.nonce)
        if not auth.proofs_equal(wanted, answer.proof):
            with contextlib.suppress(OSError):
                guest.connection.send(encode(Rejected("it does not know the token of this job")))
            self._drop(fd, "does not know the job's token")
            return None
        proof = auth.make_proof(self._token, "head", answer.rank, guest.nonce, answer.nonce)
        with contextlib.suppress(OSError):
            guest.connection.send(encode(self._make_welcome(proof)))
        del self._pending[fd]
        return Peer(answer.rank, guest.connection)

    def is_pending(self, fd: int) -> bool:
        return fd in self._pending

    def deadline(self) -> float | None:
        """When the first guest will have been silent for too long, on the monotonic clock."""
        first = next(iter(self._pending.values()), None)
        return first.deadline if first else None

    def drop_expired(self, forget: Callable[[int], None]) -> None:
        """Drop those who have said nothing for too long; `forget` is called with their descriptors before."""
        now = time.monotonic()
        while (deadline := self.deadline()) is not None and deadline <= now:
            fd = next(iter(self._pending))
            forget(fd)
            self._drop(fd, f"said nothing for {_HANDSHAKE_TIMEOUT_S:g} s")

    def close(self) -> None:
        for listener in self.sockets:
            listener.close()
        for guest in self._pending.values():
            guest.connection.close()
        self._pending.clear()

    def _drop(self, fd: int, why: str) -> None:
        guest = self._pending.pop(fd)
        with contextlib.suppress(OSError):
            self.dropped.append(f"a peer at {guest.connection.getpeername()[0]} {why}")
        guest.connection.close()


def _listen(
    interfaces: Sequence[Interface], everywhere: bool, port: int
) -> tuple[list[socket.socket], tuple[Address, ...]]:
    if everywhere:
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        listener = socket.create_server(("", port), family=family, backlog=_BACKLOG, dualstack_ipv6=dual)
        listener.setblocking(False)
        taken = listener.getsockname()[1]
        reachable = [interface for interface in interfaces if dual or ":" not in interface.ip]
        return [listener], tuple(Address(interface.ip, taken) for interface in reachable)
    listeners = []
    for interface in interfaces:
        family = socket.AF_INET6 if ":" in interface.ip else socket.AF_INET
        listener = socket.create_server((interface.ip, port), family=family, backlog=_BACKLOG)
        listener.setblocking(False)
        listeners.append(listener)
    pairs = zip(interfaces, listeners, strict=True)
    return listeners, tuple(Address(interface.ip, listener.getsockname()[1]) for interface, listener in pairs)
