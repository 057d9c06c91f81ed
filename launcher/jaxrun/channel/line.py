"""One connection between an agent and the head: typed messages both ways, never blocking."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import termios
from collections.abc import Mapping
from typing import Any, Generic, TypeVar, get_args

from jaxrun.channel import messages
from jaxrun.contract import Codec, encode

_PIECE = 2**18
# A peer whose kernel does not answer is lost after _IDLE + _COUNT x _INTERVAL seconds: the kernel finds it out for us.
_IDLE = 3
_INTERVAL = 1
_COUNT = 5
SILENCE = _IDLE + _COUNT * _INTERVAL

M = TypeVar("M")


def kinds(union: Any) -> Mapping[str, type[Any]]:
    """The members of a union of messages, by name."""
    return {kind.__name__: kind for kind in (get_args(union) or (union,))}


TO_HEAD = kinds(messages.ToHead)
TO_AGENT = kinds(messages.ToAgent)


class Line(Generic[M]):
    """Sends any message; receives those of `received`."""

    def __init__(self, connection: socket.socket, received: Mapping[str, type[M]]) -> None:
        connection.setblocking(False)
        keep_alive(connection)
        self._socket = connection
        self._codec: Codec[M] = Codec(received)
        self._unsent = bytearray()
        self._put_back: list[M] = []
        self.lost = ""  # why nothing more can come or go

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def unsent(self) -> int:
        """Bytes that wait because the network takes no more."""
        return len(self._unsent)

    def send(self, message: object) -> None:
        """What cannot be sent now is kept for `flush`; to a peer that is lost nothing is sent."""
        self.send_frame(encode(message))

    def send_frame(self, frame: bytes) -> None:
        """The same, of what is encoded already."""
        if not self.lost:
            self._unsent += frame
            self.flush()

    def flush(self) -> None:
        """Send what waits, as far as the network takes it."""
        while self._unsent and not self.lost:
            try:
                count = self._socket.send(self._unsent)
            except BlockingIOError:
                return
            except OSError as error:
                self._lose(error)
                self._unsent.clear()
                return
            del self._unsent[:count]

    def receive(self) -> list[M]:
        """What has arrived; afterwards `lost` says whether that was the last. ProtocolError for what is no message."""
        arrived, self._put_back = self._put_back, []
        while True:  # also where nothing can be sent any more: what came before that still counts
            try:
                data = self._socket.recv(_PIECE)
            except BlockingIOError:
                break
            except OSError as error:
                self._lose(error)
                break
            if not data:
                self.lost = self.lost or "the connection to its agent was closed"
                break
            arrived += self._codec.feed(data)
            if len(data) < _PIECE:
                break
        return arrived

    def put_back(self, messages: list[M]) -> None:
        """Let the next `receive` return these first."""
        self._put_back = messages

    def unanswered(self) -> bool:
        """Whether the other side's kernel has not confirmed all that was sent."""
        with contextlib.suppress(OSError):
            return any(fcntl.ioctl(self._socket, termios.TIOCOUTQ, bytes(4)))
        return False

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.close()

    def _lose(self, error: OSError) -> None:
        silent = isinstance(error, TimeoutError) or "route" in str(error)
        what = f"nothing was heard from its host for {SILENCE} s" if silent else "the connection to its agent broke"
        self.lost = self.lost or f"{what} ({error.strerror})"


def keep_alive(connection: socket.socket) -> None:
    """Let the kernel notice a host or a network that is gone; and send small messages at once."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _INTERVAL)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _COUNT)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENCE * 1000)
