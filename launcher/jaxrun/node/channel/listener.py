"""Listens for agents, or for a gang's ranks, and authenticates them.

A peer that says nothing, says too much, or cannot prove that it knows the token is dropped, and delays nobody else.
Such peers can hold only few descriptors, so the job has all that it needs.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from jaxrun.errors import ProtocolError, UnavailableError
from jaxrun.node.channel.event_loop import EventLoop
from jaxrun.node.channel.host_addresses import HostAddress
from jaxrun.protocol.addresses import Address, AnyAddress, UnixAddress
from jaxrun.protocol.auth import Purpose, ServerHandshake
from jaxrun.protocol.message_tags import ConnectionTags

_BACKLOG = 4096
_HANDSHAKE_TIMEOUT_S = 10.0
_MAX_UNPROVEN = 64  # peers with an unfinished handshake, in addition to the expected ones
_ACCEPTED_AT_ONCE = 32  # before peers that have answered are served
_RESERVED_DESCRIPTORS = 32  # no peer gets these: logs, stacks and the verdict need some
_OUT_OF_DESCRIPTORS_PAUSE_S = 0.1


@dataclass(frozen=True, slots=True)
class Peer:
    """An authenticated client: an agent or a rank, by its number; its `connection` does not block."""

    number: int
    connection: socket.socket
    tags: ConnectionTags | None
    purpose: Purpose = Purpose.JOIN


class Listener:
    """Listening sockets, and the peers with an unfinished handshake."""

    def __init__(self, sockets: Sequence[socket.socket], addresses: Sequence[AnyAddress], token: str) -> None:
        """`addresses`: the ones to offer to clients."""
        for listening in sockets:
            listening.setblocking(False)
        self.sockets = sockets
        self.addresses = tuple(addresses)
        self._token = token
        # With deadlines, the oldest first.
        self._pending: OrderedDict[int, tuple[ServerHandshake, float]] = OrderedDict()
        self._loop: EventLoop | None = None
        self._paused_until: float | None = None  # accepts nobody until then, because descriptors are short

    def attach(
        self,
        loop: EventLoop,
        order: int,
        on_peer: Callable[[Peer], None],
        on_dropped: Callable[[str], None] = lambda text: None,
        *,
        expected: int = 0,
    ) -> None:
        """Let `loop` accept and authenticate peers.

        `on_peer` is called with each peer that is let in, `on_dropped` with a log text about any other. `expected` is
        how many peers may come at the same time.
        """
        self._paused_until = None
        self._loop, self._order, self._on_peer, self._on_dropped = loop, order, on_peer, on_dropped
        self._max_unproven = _MAX_UNPROVEN + expected
        loop.add_poller(self.drop_expired)
        loop.add_poller(self._end_pause)
        self._start_accepting()
        for fd in self._pending:  # left from an earlier loop
            loop.add_reader(fd, order, partial(self._advance, fd))

    def renew(self, token: str) -> None:
        """Let in peers who know this token, and no longer those who know the previous one."""
        self._token = token
        for fd in list(self._pending):
            self._drop(fd, "came for an earlier attempt")

    def drop_expired(self) -> float | None:
        """Drop the peers that have taken too long; return the seconds until the next one has, None if there is none."""
        while self._pending:
            fd, (_, deadline) = next(iter(self._pending.items()))
            left = deadline - time.monotonic()
            if left > 0:
                return left
            self._drop_unless_done(fd, f"said nothing for {_HANDSHAKE_TIMEOUT_S:g} s")
        return None

    def close(self) -> None:
        for fd in list(self._pending):
            self._remove(fd).connection.close()
        for listening in self.sockets:
            if self._loop is not None:
                self._loop.remove_reader(listening.fileno())
            listening.close()
        self._paused_until = None

    def _start_accepting(self) -> None:
        assert self._loop is not None
        for listening in self.sockets:
            self._loop.add_reader(listening.fileno(), self._order, lambda listening=listening: self._accept(listening))  # type: ignore[misc]

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            if self._paused_until is not None:
                return
            try:
                connection, _ = listening.accept()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    self._pause()
                return
            self._add(connection)
            if connection.fileno() >= descriptors_for_peers():
                self._pause()

    def _add(self, connection: socket.socket) -> None:
        assert self._loop is not None
        if connection.family != socket.AF_UNIX:
            with contextlib.suppress(OSError):  # reading notices a peer that has gone
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        fd = connection.fileno()
        self._pending[fd] = ServerHandshake(connection, self._token), time.monotonic() + _HANDSHAKE_TIMEOUT_S
        self._loop.add_reader(fd, self._order, lambda: self._advance(fd))
        if len(self._pending) > self._max_unproven:
            self._drop_oldest()

    def _pause(self) -> None:
        """Accept nobody for a moment, and drop one peer: descriptors are short."""
        assert self._loop is not None
        self._paused_until = time.monotonic() + _OUT_OF_DESCRIPTORS_PAUSE_S
        for listening in self.sockets:
            self._loop.remove_reader(listening.fileno())
        if self._pending:
            self._drop_oldest()

    def _end_pause(self) -> float | None:
        """Accept again if it is time; return the seconds until it is."""
        if self._paused_until is None:
            return None
        left = self._paused_until - time.monotonic()
        if left > 0:
            return left
        self._paused_until = None
        self._start_accepting()
        return None

    def _advance(self, fd: int) -> None:
        if fd not in self._pending:  # dropped since the loop found it ready
            return
        handshake, _ = self._pending[fd]
        try:
            if not handshake.advance():
                return
        except (OSError, ProtocolError) as error:
            self._drop(fd, str(error))
            return
        self._remove(fd)
        self._on_peer(Peer(handshake.number, handshake.connection, handshake.tags, handshake.purpose))

    def _drop_oldest(self) -> None:
        self._drop_unless_done(next(iter(self._pending)), "had proved nothing when others came")

    def _drop_unless_done(self, fd: int, why: str) -> None:
        """Drop a peer, unless its answer has come meanwhile: among thousands that are served, it may wait for long."""
        self._advance(fd)
        if fd in self._pending:
            self._drop(fd, why)

    def _drop(self, fd: int, why: str) -> None:
        connection = self._remove(fd).connection
        with contextlib.suppress(OSError, IndexError):
            self._on_dropped(f"a peer at {connection.getpeername()[0]} {why}")
        connection.close()

    def _remove(self, fd: int) -> ServerHandshake:
        assert self._loop is not None
        self._loop.remove_reader(fd)
        return self._pending.pop(fd)[0]


def descriptors_for_peers() -> int:
    """Return the first descriptor number that peers may not get; the kernel always assigns the lowest free one."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 2**31 if soft == resource.RLIM_INFINITY else soft - min(_RESERVED_DESCRIPTORS, soft // 8)


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
