"""Requests as the servers of pages and metrics parse them: well-formed GETs, and a status for anything else."""

from __future__ import annotations

import contextlib

import pytest
from examples import given
from hypothesis import strategies as st

from jaxrun.frontends.http_server import RefusedRequestError, parse_request


def test_a_browsers_request_is_parsed() -> None:
    lines = (
        b"GET /token/document.json?rank=3&timeline HTTP/1.1",
        b"Host: 127.0.0.1:8080",
        b"Accept:*/*",
        b"X-Name:  a b  ",
    )
    request = parse_request(b"\r\n".join(lines))
    assert (request.target.path, request.target.query) == ("/token/document.json", "rank=3&timeline")
    assert request.headers == {"host": "127.0.0.1:8080", "accept": "*/*", "x-name": "a b"}
    assert request.keeps_alive


def test_the_connection_is_kept_only_where_both_ends_want_it() -> None:
    assert not parse_request(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: Close").keeps_alive
    assert not parse_request(b"GET / HTTP/1.0").keeps_alive
    assert parse_request(b"GET http://a/x HTTP/1.1\r\nHost: a").target.path == "/x"


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"", 400),
        (b"GET", 400),
        (b"hello there", 400),
        (b"GET / HTTP/2.0\r\nHost: a", 400),
        (b"GET http://[::1 HTTP/1.1\r\nHost: a", 400),
        (b"GET document.json HTTP/1.1\r\nHost: a", 400),
        (b"GET /\x00 HTTP/1.1\r\nHost: a", 400),
        (b"GET /\xff HTTP/1.1\r\nHost: a", 400),
        (b"GET / HTTP/1.1", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\nHost: b", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\nno header", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\n folded: b", 400),
        (b"GET / HTTP/1.1\r\nHost: a\nInjected: b", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 5", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked", 400),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5", 405),
        (b"HEAD / HTTP/1.1\r\nHost: a", 405),
    ],
)
def test_anything_else_is_refused_with_a_status(head: bytes, status: int) -> None:
    with pytest.raises(RefusedRequestError) as refused:
        parse_request(head)
    assert refused.value.status == status


@given(st.binary(max_size=200) | st.from_regex(rb"GET [ -~]{0,40} HTTP/1.1\r\nHost: a", fullmatch=True))
def test_no_bytes_raise_anything_else(head: bytes) -> None:
    with contextlib.suppress(RefusedRequestError):
        assert parse_request(head).target.path.startswith("/")
