"""Accepts connections, and holds each until its handshake is complete: few of them, for a short time, without threads.

A peer that says nothing, says too much, or cannot prove what it must is dropped, and delays nobody else. Such peers
can hold only few descriptors.
"""

from __future__ import annotations

import contextlib
import errno
import resource
import socket
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Generic, Protocol, TypeVar

from jaxrun.errors import ProtocolError
from jaxrun.node.channel.event_loop import LoopPart

MAX_UNPROVEN = 64  # peers with an unfinished handshake
_ACCEPTED_AT_ONCE = 32  # before peers that have answered are served
_RESERVED_DESCRIPTORS = 32  # no peer gets these: logs, stacks and the verdict need some
_OUT_OF_DESCRIPTORS_PAUSE_S = 0.1


class Handshake(Protocol):
    """The first messages on a connection, which does not block."""

    @property
    def connection(self) -> socket.socket: ...

    def advance(self) -> bool:
        """Handle what has arrived; return whether the handshake is complete.

        Raises OSError or ProtocolError if it never will be; the text completes "the peer …".
        """


HandshakeT = TypeVar("HandshakeT", bound=Handshake)


class Acceptor(Generic[HandshakeT]):
    """Accepts peers at listening sockets, and keeps those with an unfinished handshake."""

    def __init__(
        self,
        loop: LoopPart,
        order: int,
        sockets: Sequence[socket.socket],
        start_handshake: Callable[[socket.socket], HandshakeT],
        on_done: Callable[[HandshakeT], None],
        on_dropped: Callable[[str], None] = lambda text: None,
        *,
        max_pending: int = MAX_UNPROVEN,
        timeout_s: float,
    ) -> None:
        """Let `loop` accept peers at these sockets, and continue their handshakes.

        on_done:      is called with each handshake that is complete
        on_dropped:   is called with a log text about any other
        max_pending:  unfinished handshakes; one more drops the oldest
        timeout_s:    from the connection until its handshake must be complete
        """
        self._loop, self._order, self._sockets = loop, order, sockets
        self._start_handshake = start_handshake
        self._on_done, self._on_dropped = on_done, on_dropped
        self._max_pending, self._timeout_s = max_pending, timeout_s
        # With deadlines, the oldest first.
        self._pending: OrderedDict[int, tuple[HandshakeT, float]] = OrderedDict()
        self._paused_until: float | None = None  # accepts nobody until then, because descriptors are short
        for listening in sockets:
            listening.setblocking(False)
        loop.add_poller(self.drop_expired)
        loop.add_poller(self._end_pause)
        self._start_accepting()

    def drop_all(self, why: str) -> None:
        """Drop all peers with an unfinished handshake."""
        for fd in list(self._pending):
            self._drop(fd, why)

    def drop_expired(self) -> float | None:
        """Drop the peers that have taken too long; return the seconds until the next one has, None if there is none."""
        while self._pending:
            fd, (_, deadline) = next(iter(self._pending.items()))
            left = deadline - time.monotonic()
            if left > 0:
                return left
            self._drop_unless_done(fd, f"said nothing for {self._timeout_s:g} s")
        return None

    def close(self) -> None:
        """Accept no more peers, and drop those with an unfinished handshake; the sockets stay open."""
        for fd in list(self._pending):
            self._remove(fd).connection.close()
        for listening in self._sockets:
            self._loop.remove_reader(listening.fileno())
        self._paused_until = None

    def _start_accepting(self) -> None:
        for listening in self._sockets:
            self._loop.add_reader(listening.fileno(), self._order, partial(self._accept, listening))

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
        if connection.family != socket.AF_UNIX:
            with contextlib.suppress(OSError):  # reading notices a peer that has gone
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        fd = connection.fileno()
        self._pending[fd] = self._start_handshake(connection), time.monotonic() + self._timeout_s
        self._loop.add_reader(fd, self._order, partial(self._advance, fd))
        if len(self._pending) > self._max_pending:
            self._drop_oldest()

    def _pause(self) -> None:
        """Accept nobody for a moment, and drop one peer: descriptors are short."""
        self._paused_until = time.monotonic() + _OUT_OF_DESCRIPTORS_PAUSE_S
        for listening in self._sockets:
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
        self._on_done(self._remove(fd))

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

    def _remove(self, fd: int) -> HandshakeT:
        self._loop.remove_reader(fd)
        return self._pending.pop(fd)[0]


def descriptors_for_peers() -> int:
    """Return the first descriptor number that peers may not get; the kernel always assigns the lowest free one."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 2**31 if soft == resource.RLIM_INFINITY else soft - min(_RESERVED_DESCRIPTORS, soft // 8)
