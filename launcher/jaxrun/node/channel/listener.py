"""Listens for agents, or for a gang's ranks, and authenticates them.

A peer that cannot prove that it knows the token is dropped. Strangers hold only few descriptors (see acceptor.py), so
the job has all that it needs.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable, Sequence

from msgspec import Struct

from jaxrun.errors import UnavailableError
from jaxrun.node.channel.acceptor import MAX_UNPROVEN, Acceptor
from jaxrun.node.channel.event_loop import LoopPart
from jaxrun.node.channel.host_addresses import HostAddress
from jaxrun.protocol.addresses import Address, AnyAddress, UnixAddress
from jaxrun.protocol.auth import Purpose, ServerHandshake
from jaxrun.protocol.message_tags import ConnectionTags

_BACKLOG = 4096
_HANDSHAKE_TIMEOUT_S = 10.0


class Peer(Struct, frozen=True):
    """An authenticated client: an agent or a rank, by its number; its `connection` does not block."""

    number: int
    connection: socket.socket
    tags: ConnectionTags | None
    purpose: Purpose = Purpose.JOIN


class Listener:
    """Listening sockets for peers that know a token."""

    def __init__(self, sockets: Sequence[socket.socket], addresses: Sequence[AnyAddress], token: str) -> None:
        """`addresses`: the ones to offer to clients."""
        self.sockets = sockets
        self.addresses = tuple(addresses)
        self._token = token

    def accept(
        self,
        loop: LoopPart,
        order: int,
        on_peer: Callable[[Peer], None],
        on_dropped: Callable[[str], None] = lambda text: None,
        *,
        expected: int = 0,
    ) -> Acceptor[ServerHandshake]:
        """Let `loop` accept and authenticate peers, until the acceptor is closed.

        `on_peer` is called with each peer that is let in, `on_dropped` with a log text about any other. `expected` is
        how many peers may come at the same time.
        """

        def admit(done: ServerHandshake) -> None:
            on_peer(Peer(done.number, done.connection, done.tags, done.purpose))

        def start(connection: socket.socket) -> ServerHandshake:
            return ServerHandshake(connection, self._token)

        most = MAX_UNPROVEN + expected
        timeout = _HANDSHAKE_TIMEOUT_S
        return Acceptor(loop, order, self.sockets, start, admit, on_dropped, max_pending=most, timeout_s=timeout)

    def renew(self, token: str) -> None:
        """Let in peers who know this token, and no longer those who know the previous one."""
        self._token = token

    def close(self) -> None:
        for listening in self.sockets:
            listening.close()


def listen_on_unix_socket(path: str, token: str) -> Listener:
    """Listen at `path`. Raises OSError."""
    address = UnixAddress(path)
    listening = socket.socket(socket.AF_UNIX)
    with address.short_path() as name:
        listening.bind(name)
    listening.listen(_BACKLOG)
    return Listener([listening], [address], token)


def listen_on_tcp(offered: Sequence[HostAddress], token: str, *, everywhere: bool, port: int = 0) -> Listener:
    """Listen at all addresses of this host (`everywhere`), or only at those that are `offered` to clients.

    Raises UnavailableError.
    """
    try:
        sockets, addresses = _listen_everywhere(offered, port) if everywhere else _listen_at(offered, port)
    except OSError as error:
        where = "any address" if everywhere else ", ".join(one.ip for one in offered)
        why = os.strerror(error.errno) if error.errno else str(error)
        if error.errno == errno.EADDRINUSE:
            why += "; is the head of another job, or a second one of this job, running here? Another port does as well"
        raise UnavailableError(f"cannot listen at {where}, port {port or 'any'}: {why}") from None
    return Listener(sockets, addresses, token)


def _listen_everywhere(offered: Sequence[HostAddress], port: int) -> tuple[list[socket.socket], list[Address]]:
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    listening = socket.create_server(("", port), family=family, backlog=_BACKLOG, dualstack_ipv6=dual)
    bound = listening.getsockname()[1]
    return [listening], [Address(one.ip, bound) for one in offered if dual or ":" not in one.ip]


def _listen_at(offered: Sequence[HostAddress], port: int) -> tuple[list[socket.socket], list[Address]]:
    sockets, addresses = [], []
    for one in offered:
        family = socket.AF_INET6 if ":" in one.ip else socket.AF_INET
        sockets.append(socket.create_server((one.ip, port), family=family, backlog=_BACKLOG))
        addresses.append(Address(one.ip, sockets[-1].getsockname()[1]))
    return sockets, addresses
