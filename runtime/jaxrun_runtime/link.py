"""The worker's end of the channel to its agent."""

from __future__ import annotations

import os
import socket
import threading
from typing import TypeVar

from jaxrun.contract import Decoder, Message, encode
from jaxrun.errors import ProtocolError

M = TypeVar("M")
_PIECE = 65536


class AgentGone(Exception):
    """The agent has closed the channel or died: there is no job any more."""


class Link:
    """Sends and receives messages; several threads may send."""

    def __init__(self, fd: int) -> None:
        os.set_inheritable(fd, False)
        self._socket = socket.socket(fileno=fd)
        self._decoder = Decoder()
        self._waiting: list[Message] = []
        self._sending = threading.Lock()

    def send(self, message: Message) -> None:
        """Raises AgentGone if nobody listens any more."""
        with self._sending:
            try:
                self._socket.sendall(encode(message))
            except OSError as error:
                raise AgentGone from error

    def receive(self, kind: type[M]) -> M:
        """Block until the next message, which must be of `kind`."""
        message = self._next()
        if not isinstance(message, kind):
            raise ProtocolError(f"expected {kind.__name__} from the agent, received {message!r}")
        return message

    def receive_either(self, first: type[M], second: type[M]) -> M:
        """Block until the next message, which must be of one of two kinds."""
        message = self._next()
        if not isinstance(message, (first, second)):
            raise ProtocolError(
                f"expected {first.__name__} or {second.__name__} from the agent, received {message!r}"
            )
        return message

    def agent_gone(self) -> bool:
        """Whether the agent has already closed its end."""
        try:
            return self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def _next(self) -> Message:
        while not self._waiting:
            try:
                data = self._socket.recv(_PIECE)
            except OSError as error:
                raise AgentGone from error
            if not data:
                raise AgentGone
            self._waiting = self._decoder.feed(data)
        return self._waiting.pop(0)
