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

from jaxrun.channel import secret
from jaxrun.channel.addresses import Address, Interface
from jaxrun.channel.line import kinds
from jaxrun.channel.messages import Answer, Challenge, HandshakeToHead, Refused, Welcome
from jaxrun.contract import Codec, encode
from jaxrun.errors import ProtocolError, UnavailableError

VERSION = 1
_BACKLOG = 4096
_HANDSHAKE_SECONDS = 10.0
_HANDSHAKE_FRAME = 4096
_BRAKE = 0.01
_ANSWERS = kinds(HandshakeToHead)


@dataclass(slots=True)
class _Guest:
    """Somebody who has connected and not proved anything yet."""

    connection: socket.socket
    codec: Codec[Answer]
    nonce: str
    deadline: float


@dataclass(frozen=True, slots=True)
class Admitted:
    """One who knows the token; `connection` carries messages from now on."""

    rank: int
    connection: socket.socket


class Door:
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
        self._welcome = welcome
        try:
            self.listeners, self.addresses = _listen(interfaces, everywhere, port)
        except OSError as error:
            where = "any address" if everywhere else ", ".join(interface.ip for interface in interfaces)
            why = os.strerror(error.errno) if error.errno else str(error)
            raise UnavailableError(f"cannot listen at {where}, port {port or 'any'}: {why}") from None
        self._guests: OrderedDict[int, _Guest] = OrderedDict()  # the first to have come is the first to be dropped
        self.dropped: list[str] = []  # what became of those who were not let in, for the log

    def accept(self, listener: socket.socket) -> list[int]:
        """Greet those who have come; returns the descriptors to listen to, with `hear`."""
        came: list[int] = []
        while True:
            try:
                connection, _ = listener.accept()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    time.sleep(_BRAKE)  # until some of the guests have been dropped; those who belong here can wait
                return came
            connection.setblocking(False)
            nonce = secret.new_nonce()
            guest = _Guest(connection, Codec(_ANSWERS, _HANDSHAKE_FRAME), nonce, time.monotonic() + _HANDSHAKE_SECONDS)
            self._guests[connection.fileno()] = guest
            came.append(connection.fileno())
            with contextlib.suppress(OSError):
                connection.send(encode(Challenge(VERSION, nonce)))

    def hear(self, fd: int) -> Admitted | None:
        """What the guest says: one who proves itself is let in. Another is dropped, or has to be heard again."""
        guest = self._guests[fd]
        try:
            data = guest.connection.recv(_HANDSHAKE_FRAME)
            answers = guest.codec.feed(data)
        except BlockingIOError:
            return None
        except (OSError, ProtocolError) as error:
            self._drop(fd, f"is no agent: {error}")
            return None
        if not data:
            self._drop(fd, "went away without a word")
        return self._examine(fd, answers[0]) if answers else None

    def _examine(self, fd: int, answer: Answer) -> Admitted | None:
        guest = self._guests[fd]
        wanted = secret.proof(self._token, "agent", answer.rank, guest.nonce, answer.nonce)
        if not secret.same(wanted, answer.proof):
            with contextlib.suppress(OSError):
                guest.connection.send(encode(Refused("it does not know the token of this job")))
            self._drop(fd, "does not know the job's token")
            return None
        proof = secret.proof(self._token, "head", answer.rank, guest.nonce, answer.nonce)
        with contextlib.suppress(OSError):
            guest.connection.send(encode(self._welcome(proof)))
        del self._guests[fd]
        return Admitted(answer.rank, guest.connection)

    def is_guest(self, fd: int) -> bool:
        return fd in self._guests

    def deadline(self) -> float | None:
        """When the first guest will have been silent for too long, on the monotonic clock."""
        first = next(iter(self._guests.values()), None)
        return first.deadline if first else None

    def drop_silent(self, forget: Callable[[int], None]) -> None:
        """Drop those who have said nothing for too long; `forget` is called with their descriptors before."""
        now = time.monotonic()
        while (deadline := self.deadline()) is not None and deadline <= now:
            fd = next(iter(self._guests))
            forget(fd)
            self._drop(fd, f"said nothing for {_HANDSHAKE_SECONDS:g} s")

    def close(self) -> None:
        for listener in self.listeners:
            listener.close()
        for guest in self._guests.values():
            guest.connection.close()
        self._guests.clear()

    def _drop(self, fd: int, why: str) -> None:
        guest = self._guests.pop(fd)
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
