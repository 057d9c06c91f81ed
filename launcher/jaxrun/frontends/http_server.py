"""Serves GET requests in an event loop, without threads, for pages of one user and for readings by Prometheus.

Strangers may reach the port, so all is bounded: connections without a complete request (acceptor.py), the time for it,
and connections that are being answered or may ask again. An error closes its connection.
"""

from __future__ import annotations

import contextlib
import re
import socket
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from http import HTTPStatus
from urllib.parse import SplitResult, urlsplit

from msgspec import Struct

from jaxrun.errors import ProtocolError
from jaxrun.node.channel.acceptor import Acceptor
from jaxrun.node.channel.event_loop import EventLoop
from jaxrun.node.channel.send_buffer import SendBuffer

BACKLOG = 128  # connections that wait to be accepted
_HEAD_TIMEOUT_S = 5.0
_KEEP_ALIVE_S = 30.0  # without a request, or without progress of an answer
_MAX_ANSWERED = 64  # connections that wait for their answer's rest, or for the next request
_MAX_HEAD_BYTES = 2**14
_RECEIVE_BYTES = 2**14
_REQUEST_LINE = re.compile(rb"([A-Z]{1,20}) ([!-~]+) HTTP/1\.([01])")
_HEADER = re.compile(rb"([!#-'*+.0-9A-Z^-z|~-]+):[ \t]*([\t -~\x80-\xff]*?)[ \t]*")
_ORDER = 0


class HttpRequest(Struct, frozen=True):
    """A GET request. `headers` have lower-case names; `keeps_alive`: more may follow on the connection."""

    target: SplitResult
    headers: Mapping[str, str]
    keeps_alive: bool


class HttpAnswer(Struct, frozen=True):
    """The answer to one request; `kind` is the content type."""

    status: HTTPStatus
    content: bytes
    kind: str = "text/plain; charset=utf-8"
    headers: Mapping[str, str] = {}


class RefusedRequestError(Exception):
    """A request that is answered with an error, and the status of that answer."""

    def __init__(self, status: HTTPStatus) -> None:
        super().__init__(f"{status.value} {status.phrase}")
        self.status = status


def plain(status: HTTPStatus, text: str = "") -> HttpAnswer:
    """An answer in words, by default the status's own."""
    return HttpAnswer(status, (text or f"{status.value} {status.phrase}\n").encode("utf-8", "backslashreplace"))


def parse_request(head: bytes) -> HttpRequest:
    """Parse a request line and headers, without the empty line after them. Raises RefusedRequestError."""
    line, *lines = head.split(b"\r\n")
    found = _REQUEST_LINE.fullmatch(line)
    if found is None:
        raise RefusedRequestError(HTTPStatus.BAD_REQUEST)
    headers = _parse_headers(lines)
    method, minor = found[1].decode(), found[3]
    try:
        target = urlsplit(found[2].decode())
    except ValueError:  # such as http://[::1
        raise RefusedRequestError(HTTPStatus.BAD_REQUEST) from None
    has_host = "host" in headers or minor == b"0"
    has_body = "transfer-encoding" in headers or headers.get("content-length", "0") != "0"
    if not target.path.startswith("/") or not has_host or (has_body and method == "GET"):
        raise RefusedRequestError(HTTPStatus.BAD_REQUEST)
    if method != "GET":
        raise RefusedRequestError(HTTPStatus.METHOD_NOT_ALLOWED)
    keeps_alive = minor == b"1" and "close" not in headers.get("connection", "").lower()
    return HttpRequest(target, headers, keeps_alive)


def _parse_headers(lines: list[bytes]) -> dict[str, str]:
    headers: dict[str, str] = {}
    for line in lines:
        found = _HEADER.fullmatch(line)
        name = found[1].decode().lower() if found is not None else ""
        if found is None or (name == "host" and name in headers):
            raise RefusedRequestError(HTTPStatus.BAD_REQUEST)
        headers[name] = found[2].decode("latin-1")
    return headers


class _RequestReader:
    """Collects requests on a connection, which becomes non-blocking."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.connection = connection
        self._received = bytearray()

    @property
    def has_request(self) -> bool:
        """Whether `take` returns a request, or refuses it."""
        return b"\r\n\r\n" in self._received or self.is_full

    @property
    def is_full(self) -> bool:
        return len(self._received) > _MAX_HEAD_BYTES

    def advance(self) -> bool:
        """Receive once; return `has_request`. Raises ProtocolError at the end of the connection, and OSError."""
        try:
            data = self.connection.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return self.has_request
        if not data:
            raise ProtocolError("closed the connection before its request was complete")
        self._received += data
        return self.has_request

    def take(self) -> HttpRequest:
        """Remove and return the next request. Raises RefusedRequestError."""
        head, end, rest = self._received.partition(b"\r\n\r\n")
        if not end or len(head) > _MAX_HEAD_BYTES:
            raise RefusedRequestError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        self._received = rest
        return parse_request(bytes(head))


class _Connection:
    """A connection whose first request was complete."""

    def __init__(self, reader: _RequestReader) -> None:
        self.reader = reader
        self.deadline = 0.0
        self.is_last = False  # whether the connection is closed after this answer
        self._unsent = SendBuffer(reader.connection.send)

    @property
    def is_sending(self) -> bool:
        return bool(self._unsent)

    def start(self, answer: HttpAnswer, *, is_last: bool) -> None:
        self.is_last = is_last
        self._unsent.add(_format_head(answer, is_last=is_last))
        self._unsent.add(answer.content)

    def send(self) -> None:
        """Send as much as fits now. Raises OSError if the other end is gone."""
        self._unsent.flush()


def _format_head(answer: HttpAnswer, *, is_last: bool) -> bytes:
    headers = {
        "Content-Type": answer.kind,
        "Content-Length": str(len(answer.content)),
        **({"Connection": "close"} if is_last else {}),
        **answer.headers,
    }
    lines = [f"HTTP/1.1 {answer.status.value} {answer.status.phrase}", *(f"{n}: {v}" for n, v in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


class HttpServer:
    """Answers GET requests at one listening socket."""

    def __init__(self, loop: EventLoop, listening: socket.socket, answer: Callable[[HttpRequest], HttpAnswer]) -> None:
        """Serve in this loop; `answer` is called with each well-formed request."""
        self._answer = answer
        self._answered: OrderedDict[int, _Connection] = OrderedDict()  # the longest idle first
        self._loop = loop
        self._listening = listening
        self._acceptor = Acceptor(loop, _ORDER, [listening], _RequestReader, self._add, timeout_s=_HEAD_TIMEOUT_S)
        loop.add_poller(self._close_idle)

    def close(self) -> None:
        self._acceptor.close()
        self._listening.close()
        for fd in list(self._answered):
            self._close(fd)

    def _add(self, reader: _RequestReader) -> None:
        if len(self._answered) >= _MAX_ANSWERED:
            self._close(next(iter(self._answered)))
        fd = reader.connection.fileno()
        self._answered[fd] = _Connection(reader)
        self._loop.add_reader(fd, _ORDER, partial(self._receive, fd))
        self._proceed(fd)

    def _receive(self, fd: int) -> None:
        connection = self._answered.get(fd)
        if connection is None:  # closed since the loop found it ready
            return
        try:
            connection.reader.advance()
        except (OSError, ProtocolError):
            self._close(fd)
            return
        if connection.is_sending and connection.reader.is_full:  # asks on, and does not read
            self._close(fd)
        else:
            self._proceed(fd)

    def _proceed(self, fd: int) -> None:
        """Send what is left of an answer, and answer the requests that have come, in their order."""
        connection = self._answered.get(fd)
        if connection is None:
            return
        self._answered.move_to_end(fd)
        connection.deadline = time.monotonic() + _KEEP_ALIVE_S
        try:
            while True:
                connection.send()
                if connection.is_sending or not (connection.is_last or connection.reader.has_request):
                    break
                if connection.is_last:
                    self._close(fd)
                    return
                self._respond(connection)
        except OSError:
            self._close(fd)
            return
        self._loop.set_writer(fd, partial(self._proceed, fd) if connection.is_sending else None)

    def _respond(self, connection: _Connection) -> None:
        keeps_alive = False
        try:
            request = connection.reader.take()
            answer = self._answer(request)
            keeps_alive = request.keeps_alive and answer.status is HTTPStatus.OK
        except RefusedRequestError as error:
            answer = plain(error.status)
        except Exception:
            traceback.print_exc()
            answer = plain(HTTPStatus.INTERNAL_SERVER_ERROR)
        connection.start(answer, is_last=not keeps_alive)

    def _close_idle(self) -> float | None:
        """Close idle connections; return the seconds until the next one is, None without any."""
        while self._answered:
            fd, connection = next(iter(self._answered.items()))
            left = connection.deadline - time.monotonic()
            if left > 0:
                return left
            self._close(fd)
        return None

    def _close(self, fd: int) -> None:
        self._loop.remove_reader(fd)
        link = self._answered.pop(fd).reader.connection
        with contextlib.suppress(OSError):
            link.shutdown(socket.SHUT_WR)
        link.close()
