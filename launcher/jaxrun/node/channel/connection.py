"""One connection between an agent and the head: typed messages in both directions, without ever blocking."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
import sys
import termios
from collections.abc import Mapping
from typing import Any

from jaxrun.node.channel.framed_connection import FramedConnection, M
from jaxrun.protocol import agent_messages
from jaxrun.protocol.agent_messages import BEAT
from jaxrun.protocol.codec import MessageDecoder, encode, message_types
from jaxrun.protocol.message_tags import ConnectionTags, digest

_RETRY_S = 0.01
_KEEPALIVE_IDLE_S = 3  # an agent sends nothing that early to a head that may be cut off (silence.py)
_KEEPALIVE_INTERVAL_S = 1
_KEEPALIVE_PROBES = 127  # the maximum: silence.py decides earlier
_HEARD = struct.Struct("52xII")  # tcp_info.tcpi_last_data_recv and tcpi_last_ack_recv, in ms
_WINDOW = slice(228, 232)  # bytes of room at the other host: tcp_info.tcpi_snd_wnd, since Linux 5.4
_LEAST_WINDOW = 2**14

AGENT_TO_HEAD = message_types(agent_messages.AgentToHead)
HEAD_TO_AGENT = message_types(agent_messages.HeadToAgent)
_BEAT = encode(BEAT)


class Connection(FramedConnection[M]):
    """Sends any message; receives messages of the types `received`. `tags` come from its handshake.

    peer:       the address of the other end, unless that has gone already
    is_silent:  whether it is lost because of a long silence
    """

    def __init__(self, connection: socket.socket, received: Mapping[str, type[M]], tags: ConnectionTags | None) -> None:
        super().__init__(connection, MessageDecoder(received, tags=tags.received if tags is not None else None))
        enable_keepalive(connection)
        self._tags = tags.sent if tags is not None else None
        self.peer: tuple[Any, ...] = ("", 0)
        with contextlib.suppress(OSError):
            self.peer = connection.getpeername()
        self.is_silent = False

    def send(self, message: object) -> None:
        """Send a message; keep what cannot be sent now for `flush`. Does nothing once the peer is lost."""
        self.send_frame(encode(message))

    def send_frame(self, frame: bytes) -> None:
        if not self.lost_reason:
            self._unsent.add(frame)
            if self._tags is not None:
                self._unsent.add(self._tags.next(digest(frame)))
            self.flush()

    def flush_due(self) -> float | None:
        """Send waiting bytes; return the seconds until the next call, None if nothing waits any more."""
        self.flush()
        return _RETRY_S if self._unsent else None

    def receive(self) -> list[M]:
        """Return new messages; afterwards `lost_reason` says whether they were the last. Raises ProtocolError."""
        try:
            return [message for message in super().receive() if message != BEAT]
        finally:
            if self.has_ended:
                self.lost_reason = self.lost_reason or "the connection to its agent was closed"

    @property
    def queued_bytes(self) -> int:
        """Return how many bytes were queued for sending so far."""
        return self._unsent.sent_bytes + len(self._unsent)

    def acknowledged_bytes(self) -> int:
        """Return how many of those the other host's kernel has confirmed; all of them once the connection is closed."""
        with contextlib.suppress(OSError):
            waiting = fcntl.ioctl(self._socket, termios.TIOCOUTQ, bytes(4))
            return self._unsent.sent_bytes - int.from_bytes(waiting, sys.byteorder)
        return self.queued_bytes

    def silence_s(self, *, only_data: bool = False) -> float:
        """Return how long the other host's kernel has been silent, in seconds; 0 once the connection is closed.

        only_data:  acknowledgements do not count, since a tunnel acknowledges what it cannot deliver
        """
        with contextlib.suppress(OSError):
            info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _HEARD.size)
            data_ms, acknowledgement_ms = _HEARD.unpack(info)
            return float(data_ms if only_data else min(data_ms, acknowledgement_ms)) / 1000
        return 0.0

    def send_beat(self) -> bool:
        """Send a message for the other kernel to acknowledge, unless one is pending or its process has stopped reading.

        Returns whether the other kernel has anything to acknowledge.
        """
        if self.acknowledged_bytes() != self.queued_bytes:
            return True
        window = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _WINDOW.stop)[_WINDOW]
        has_room = not window or int.from_bytes(window, sys.byteorder) >= _LEAST_WINDOW
        if has_room:
            self.send_frame(_BEAT)
        return has_room

    def give_up(self, silence_s: float) -> None:
        """Consider the other host lost, because it was silent for `silence_s` seconds."""
        self.is_silent = not self.lost_reason
        self.lost_reason = self.lost_reason or f"nothing was heard from its host for {silence_s:g} s"

    def end_sending(self) -> None:
        """Send no more; what the other end sends is still received."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def _mark_lost(self, error: OSError) -> None:
        self.lost_reason = self.lost_reason or f"the connection to its agent broke ({error.strerror})"


def enable_keepalive(connection: socket.socket) -> None:
    """Let the kernel notice a host or a network that is gone, and send small messages at once."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_IDLE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_INTERVAL_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _KEEPALIVE_PROBES)
