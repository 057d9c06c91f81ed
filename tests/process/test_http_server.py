"""The server of pages and metrics: one thread, bounded connections, and no stranger keeps its owner from an answer."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections.abc import Callable, Iterator
from http import HTTPStatus

import pytest
from harness import wait_until

from jaxrun.frontends import http_server
from jaxrun.frontends.http_server import HttpAnswer, HttpRequest, HttpServer
from jaxrun.node.channel.event_loop import EventLoop

BIG = b"x" * 2**23  # more than the buffers of a connection hold


class Served:
    """A server in a loop that the test turns."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self.stack = stack
        self.loop = EventLoop()
        listening = socket.create_server(("127.0.0.1", 0), backlog=http_server.BACKLOG)
        self.address = listening.getsockname()[:2]
        self.server = HttpServer(self.loop, listening, self.answer)
        stack.callback(self.loop.close)
        stack.callback(self.server.close)

    def answer(self, request: HttpRequest) -> HttpAnswer:
        if request.target.path == "/fails":
            raise ZeroDivisionError
        if request.target.path == "/missing":
            return http_server.plain(HTTPStatus.NOT_FOUND)
        return HttpAnswer(HTTPStatus.OK, BIG if request.target.path == "/big" else request.target.path.encode())

    def connect(self, data: bytes = b"") -> socket.socket:
        link = self.stack.enter_context(socket.create_connection(self.address, timeout=20))
        link.sendall(data)
        return link

    def turn_until(self, condition: Callable[[], object]) -> None:
        wait_until(lambda: self.loop.run_once(0.02) or condition())

    def read(self, link: socket.socket, end: bytes) -> bytes:
        """Read until this end has come, or the connection is closed."""
        data = b""
        while not data.endswith(end):
            while not is_readable(link):
                self.loop.run_once(0.02)
            more = link.recv(2**20)
            if not more:
                break
            data += more
        return data


def is_readable(link: socket.socket) -> bool:
    return bool(select.select([link], [], [], 0)[0])


def get(path: str, *headers: str) -> bytes:
    return "\r\n".join((f"GET {path} HTTP/1.1", "Host: a", *headers, "", "")).encode()


@pytest.fixture
def served() -> Iterator[Served]:
    with contextlib.ExitStack() as stack:
        yield Served(stack)


def test_requests_of_one_connection_are_answered_in_their_order_though_they_come_at_once_or_in_pieces(
    served: Served,
) -> None:
    link = served.connect(get("/one") + get("/two"))
    assert served.read(link, b"/two").count(b"HTTP/1.1 200 OK\r\n") == 2
    for byte in get("/three"):
        link.sendall(bytes([byte]))
        served.loop.run_once(0.01)
    assert served.read(link, b"/three").endswith(b"\r\n\r\n/three")
    last = served.read(served.connect(get("/one", "Connection: close")), b"nothing")
    assert b"Connection: close\r\n" in last and last.endswith(b"/one")


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GET http://[::1 HTTP/1.1\r\n\r\n", 400),
        (b"\x16\x03\x01\r\n\r\n", 400),
        (get("/missing"), 404),
        (get("/" + "x" * 2**14), 431),
        (b"x" * (2**14 + 1), 431),
    ],
)
def test_an_error_closes_its_connection_and_prints_nothing(
    served: Served, capfd: pytest.CaptureFixture[str], data: bytes, status: int
) -> None:
    answer = served.read(served.connect(data), b"nothing")
    assert answer.startswith(b"HTTP/1.1 %d " % status)
    assert capfd.readouterr() == ("", "")


def test_an_unexpected_error_is_the_requests_own(served: Served, capfd: pytest.CaptureFixture[str]) -> None:
    assert served.read(served.connect(get("/fails")), b"nothing").startswith(b"HTTP/1.1 500 ")
    assert "ZeroDivisionError" in capfd.readouterr().err
    assert served.read(served.connect(get("/one")), b"/one")


def test_among_many_that_never_finish_their_request_the_owner_is_answered(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "_HEAD_TIMEOUT_S", 600.0)  # their number alone ends them
    served.server.close()
    served = Served(served.stack)
    threads = threading.active_count()
    strangers: list[socket.socket] = []

    def only_the_latest_are_left() -> bool:
        return [is_readable(one) for one in strangers] == [True] * (len(strangers) - 64) + [False] * 64

    while len(strangers) < 200:
        strangers += [served.connect(b"GET / HTT") for _ in range(100)]
        served.turn_until(only_the_latest_are_left)
    assert served.read(served.connect(get("/one")), b"/one")
    assert threading.active_count() == threads


def test_a_request_has_a_deadline_and_an_idle_connection_as_well(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "_HEAD_TIMEOUT_S", 0.2)
    monkeypatch.setattr(http_server, "_KEEP_ALIVE_S", 0.1)
    served.server.close()
    again = Served(served.stack)
    half = again.connect(b"GET / HTT")
    idle = again.connect(get("/one"))
    assert again.read(idle, b"nothing").endswith(b"/one")

    def drips() -> bool:
        """Send one more byte, which does not extend the deadline; return whether the server has closed."""
        with contextlib.suppress(OSError):
            half.sendall(b"P")
        return is_readable(half)

    again.turn_until(drips)


def test_those_that_ask_and_do_not_read_are_few_and_delay_nobody(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "_MAX_ANSWERED", 4)
    links = [served.connect(get("/big", "Connection: close")) for _ in range(8)]
    served.turn_until(lambda: all(map(is_readable, links)))
    assert served.read(served.connect(get("/one")), b"/one")
    assert len(served.read(links[0], b"nothing")) < len(BIG) < len(served.read(links[-1], b"nothing"))
    greedy = served.connect(get("/big"))
    served.turn_until(lambda: is_readable(greedy))
    with pytest.raises(OSError):
        for _ in range(2000):  # asks on without reading
            greedy.sendall(b"x" * 2**12)
            served.loop.run_once(0)
