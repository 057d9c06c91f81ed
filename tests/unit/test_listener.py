"""The listener admits agents that know the token; nothing that a stranger sends disturbs other connections."""

import contextlib
import socket
import struct
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from listener_thread import (
    LOOPBACK,
    TOKEN,
    answer_to,
    check_admits,
    connect_agent,
    frame,
    is_closed,
    open_listener,
    pending_peer,
    read,
    server,
    wait_until,
)

from jaxrun.errors import UnavailableError
from jaxrun.node.channel import listener as listener_module
from jaxrun.node.channel.event_loop import EventLoop
from jaxrun.node.channel.host_addresses import HostAddress
from jaxrun.node.channel.listener import listen_on_tcp
from jaxrun.protocol import auth
from jaxrun.protocol.addresses import Address
from jaxrun.protocol.auth import ChallengeResponse, Rejected, Welcome
from jaxrun.protocol.codec import encode

LOOPBACK_6 = HostAddress("lo", "::1")


__all__ = ["open_listener", "server"]  # fixtures


STRANGERS = {
    "bytes": bytes(range(256)) * 20,
    "a browser": b"GET / HTTP/1.1\r\nHost: h1\r\n\r\n",
    "a TLS hello": bytes.fromhex("160301020001 0001fc0303") + b"\x5a" * 500,
    "an SSH client": b"SSH-2.0-OpenSSH_9.2\r\n",
    "a giant": struct.pack("!I", 2**32 - 1),
    "a frame too long by one": struct.pack("!I", 4097),
    "no JSON": frame(b"hello"),
    "a message of later": frame({"v": 1, "type": "Done", "rank": 0, "time": 0.0}),
    "a message of the head's": encode(Welcome("")),
    "a proof that is none": encode(ChallengeResponse(0, "n", "p")),
    "a rank that is none": encode(ChallengeResponse(-(10**400), "n", "p")),
    "an empty proof": encode(ChallengeResponse(0, "", "")),
    "a proof that is no Unicode": encode(ChallengeResponse(0, "n", "\ud800")),
    "a nonce that is no Unicode": encode(ChallengeResponse(0, "\ud800", "p")),
}


@pytest.mark.parametrize("data", STRANGERS.values(), ids=STRANGERS)
def test_a_stranger_is_dropped_and_an_agent_is_admitted_meanwhile(server, data):
    with pending_peer(server) as (peer, _):
        peer.sendall(data)
        check_admits(server)
        assert is_closed(peer)
    wait_until(lambda: server.admitted and server.dropped)
    assert [one.rank for one in server.admitted] == [0]
    assert len(server.dropped) == 1 and server.dropped[0].startswith("a peer at 127.0.0.1 ")


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(min_size=1, max_size=5000))
def test_no_bytes_of_a_stranger_harm_the_listener(server, noise):
    with pending_peer(server) as (peer, _):
        with contextlib.suppress(OSError):
            peer.sendall(noise)
            peer.shutdown(socket.SHUT_WR)
        assert is_closed(peer)
    assert server.failure is None and not server.admitted


def test_port_scanners_do_not_stop_the_listener(server):
    for linger in (False, True) * 20:
        peer = socket.create_connection((server.address.ip, server.address.port))
        if linger:  # ends in a reset
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        peer.close()
    check_admits(server)
    wait_until(lambda: len(server.admitted) == 1)


@pytest.mark.parametrize(
    "half", [b"", b"\0\0", encode(ChallengeResponse(0, "n", "p"))[:-1]], ids=["nothing", "two bytes", "half"]
)
def test_a_silent_peer_is_dropped_after_the_handshake_timeout(monkeypatch, open_listener, half):
    monkeypatch.setattr(listener_module, "_HANDSHAKE_TIMEOUT_S", 0.4)
    server = open_listener()
    began = time.monotonic()
    with pending_peer(server) as (peer, _):
        peer.sendall(half)
        check_admits(server)
        assert is_closed(peer)
    assert time.monotonic() - began > 0.3
    wait_until(lambda: server.dropped)
    assert server.dropped == ["a peer at 127.0.0.1 said nothing for 0.4 s"]


def test_a_peer_whose_answer_waits_to_be_read_is_not_silent(monkeypatch):
    monkeypatch.setattr(listener_module, "_HANDSHAKE_TIMEOUT_S", 0.0)
    listener, loop, admitted, dropped = listen_on_tcp([LOOPBACK], TOKEN, everywhere=False), EventLoop(), [], []
    with contextlib.closing(loop), contextlib.closing(listener):
        listener.attach(loop, 0, admitted.append, dropped.append)
        address = listener.addresses[0]
        with socket.create_connection((address.ip, address.port), timeout=60) as peer:
            loop.run_once()
            peer.sendall(encode(answer_to(read(peer))))
            listener.drop_expired()
            assert [one.rank for one in admitted] == [0] and not dropped
            admitted[0].connection.close()


def test_single_bytes_do_not_extend_the_handshake_timeout(monkeypatch, open_listener):
    monkeypatch.setattr(listener_module, "_HANDSHAKE_TIMEOUT_S", 0.4)
    server = open_listener()
    with pending_peer(server) as (peer, _), pytest.raises(ConnectionError):
        for byte in frame(b" " * 600):  # for half a minute
            peer.sendall(bytes([byte]))
            time.sleep(0.05)
    check_admits(server)


def test_a_proof_of_another_token_is_rejected_with_the_reason(server):
    with pending_peer(server) as (peer, challenge):
        peer.sendall(encode(answer_to(challenge, token=auth.new_token())))
        assert read(peer) == Rejected("it does not know the token of this job") and is_closed(peer)
    wait_until(lambda: server.dropped)
    assert not server.admitted and "does not know the job's token" in server.dropped[0]


def test_the_head_proves_itself_though_the_answer_comes_in_pieces_and_the_token_is_never_sent(server):
    with pending_peer(server) as (peer, challenge):
        answer = answer_to(challenge, rank=2)
        for byte in encode(answer):
            peer.sendall(bytes([byte]))
        welcome = read(peer)
    assert welcome.proof == auth.make_proof(TOKEN, "server", 2, challenge.nonce, answer.nonce)
    assert TOKEN not in repr((challenge, answer, welcome))


def test_the_head_listens_on_ipv6_too(open_listener):
    server = open_listener(LOOPBACK_6)
    assert server.address.ip == "::1" and str(server.address).startswith("[::1]:")
    check_admits(server)


def test_all_interfaces_share_one_port_for_both_families(open_listener):
    server = open_listener(LOOPBACK, LOOPBACK_6, everywhere=True)
    port = server.address.port
    assert server.listener.addresses == (Address("127.0.0.1", port), Address("::1", port))
    for rank, address in enumerate(server.listener.addresses):
        connect_agent(address, rank).connection.close()
    wait_until(lambda: sorted(one.rank for one in server.admitted) == [0, 1])


def test_only_the_chosen_interface_is_listened_on(open_listener):
    server = open_listener(LOOPBACK)
    with pytest.raises(OSError):
        socket.create_connection(("::1", server.address.port), timeout=1)
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.2", server.address.port), timeout=1)


@pytest.mark.parametrize(("everywhere", "where"), [(False, "127.0.0.1"), (True, "any address")])
def test_a_port_in_use_is_named(server, everywhere, where):
    port = server.address.port
    with pytest.raises(
        UnavailableError, match=f"^cannot listen at {where}, port {port}: Address already in use; is the head"
    ):
        listen_on_tcp([LOOPBACK], TOKEN, everywhere=everywhere, port=port)


def test_an_address_that_this_host_does_not_have_is_named():
    with pytest.raises(UnavailableError, match=r"cannot listen at 192\.0\.2\.77, port any: Cannot"):
        listen_on_tcp([HostAddress("eth9", "192.0.2.77")], TOKEN, everywhere=False)
