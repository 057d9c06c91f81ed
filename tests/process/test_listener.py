"""The listener admits agents that know the token; no stranger disturbs other connections, and many cost little."""

import contextlib
import os
import resource
import select
import socket
import struct
import threading
import time

import pytest
from examples import given
from handshakes import TOKEN, answer_to, frame, read
from hypothesis import strategies as st
from listener_thread import (
    LOOPBACK,
    check_admits,
    connect_agent,
    is_closed,
    open_listener,
    pending_peer,
    server,
    wait_until,
)

from jaxrun.controller.supervisor.transport import DroppedPeers
from jaxrun.errors import UnavailableError
from jaxrun.job_events.events import PeersDropped
from jaxrun.node.channel import acceptor
from jaxrun.node.channel import listener as listener_module
from jaxrun.node.channel.event_loop import EventLoop
from jaxrun.node.channel.host_addresses import HostAddress
from jaxrun.node.channel.listener import listen_on_tcp
from jaxrun.node.channel.rendezvous import check_reachable
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
    "no MessagePack": frame(b"hello"),
    "a message of later": frame({"type": "Done", "rank": 0, "time": 0.0}),
    "a message of the head's": encode(Welcome("")),
    "a proof that is none": encode(ChallengeResponse(0, "n", "p")),
    "a rank that is none": encode(ChallengeResponse(-(2**63), "n", "p")),
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
    assert [one.number for one in server.admitted] == [0]
    assert len(server.dropped) == 1 and server.dropped[0].startswith("a peer at 127.0.0.1 ")


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
    assert {*server.dropped} == {"a peer at 127.0.0.1 said nothing for 0.4 s"}  # a late agent, too, which comes again


def test_a_peer_whose_answer_waits_to_be_read_is_not_silent(monkeypatch, make_looped):
    monkeypatch.setattr(listener_module, "_HANDSHAKE_TIMEOUT_S", 0.0)
    looped = make_looped()
    (peer,) = looped.connect(1)
    looped.loop.run_once()
    peer.sendall(encode(answer_to(read(peer))))
    looped.acceptor.drop_expired()
    assert [one.number for one in looped.admitted] == [0] and not looped.dropped


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
    wait_until(lambda: sorted(one.number for one in server.admitted) == [0, 1])


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


# ---- how many strangers it bears


class Looped:
    """A listener in a loop that the test turns."""

    def __init__(self, stack, **options):
        self._stack = stack
        self.listener, self.loop = listen_on_tcp([LOOPBACK], TOKEN, everywhere=False), EventLoop()
        self.admitted, self.dropped = [], []
        self.acceptor = self.listener.accept(self.loop, 0, self._admit, self.dropped.append, **options)
        stack.callback(self.loop.close)
        stack.callback(self.acceptor.close)
        stack.callback(self.listener.close)

    def _admit(self, peer):
        self.admitted.append(peer)
        self._stack.callback(peer.connection.close)

    def connect(self, count):
        where = self.listener.addresses[0].ip, self.listener.addresses[0].port
        return [self._stack.enter_context(socket.create_connection(where)) for _ in range(count)]


@pytest.fixture
def make_looped():
    with contextlib.ExitStack() as stack:
        yield lambda **options: Looped(stack, **options)


def challenged(peers):
    """How many of these have got a challenge."""
    return len(select.select(peers, [], [], 0)[0])


def test_of_many_that_prove_nothing_the_oldest_are_dropped(monkeypatch, open_listener):
    monkeypatch.setattr(listener_module, "MAX_UNPROVEN", 8)
    server = open_listener()
    with contextlib.ExitStack() as stack:
        peers = [stack.enter_context(pending_peer(server))[0] for _ in range(20)]
        wait_until(lambda: len(server.dropped) == 12)
        assert all(is_closed(peer) for peer in peers[:12])
        assert challenged(peers[12:]) == 0  # beyond what they have read, nothing has come, nor the end
        check_admits(server)
    assert server.dropped[0] == "a peer at 127.0.0.1 had proved nothing when others came"


def test_those_that_are_expected_have_places_beside_strangers(monkeypatch, make_looped):
    monkeypatch.setattr(listener_module, "MAX_UNPROVEN", 8)
    looped = make_looped(expected=12)
    peers = looped.connect(20)
    wait_until(lambda: looped.loop.run_once(0.1) or challenged(peers) == 20)
    assert not looped.dropped
    peers += looped.connect(1)
    wait_until(lambda: looped.loop.run_once(0.1) or looped.dropped)


def test_who_answers_is_heard_before_he_is_dropped_for_others(monkeypatch, make_looped):
    """Though all that happened at once, and the loop has not seen it yet."""
    monkeypatch.setattr(listener_module, "MAX_UNPROVEN", 1)
    looped = make_looped()
    (agent,) = looped.connect(1)
    looped.loop.run_once(60)
    challenge = read(agent)
    looped.connect(3)  # before the answer, so that the loop sees them first
    agent.sendall(encode(answer_to(challenge)))
    looped.loop.run_once(60)
    assert [peer.number for peer in looped.admitted] == [0]


def test_one_turn_of_the_loop_accepts_a_bounded_number(monkeypatch, make_looped):
    """Or strangers that come faster than they are accepted would keep a job, or a gang, from all else."""
    monkeypatch.setattr(acceptor, "_ACCEPTED_AT_ONCE", 5)
    looped = make_looped()
    peers = looped.connect(12)
    looped.loop.run_once(60)
    assert challenged(peers) == 5


@pytest.mark.parametrize("left", ["none", "few"])
def test_without_descriptors_nobody_is_accepted_for_a_while_and_nothing_spins(monkeypatch, make_looped, left):
    monkeypatch.setattr(acceptor, "_OUT_OF_DESCRIPTORS_PAUSE_S", 0.3)
    looped = make_looped()
    (stranger,) = looped.connect(1)
    looped.loop.run_once(60)
    with contextlib.ExitStack() as held:
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        looped.connect(1)
        highest = max(map(int, os.listdir("/proc/self/fd")))
        if left == "few":
            held.enter_context(monkeypatch.context()).setattr(acceptor, "descriptors_for_peers", lambda: 0)
        else:
            held.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
            resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, limits[1]))
            with contextlib.suppress(OSError):
                while True:
                    held.enter_context(open(os.devnull))
        turns, began = 0, time.monotonic()
        while time.monotonic() < began + 0.25:  # the loop blocks, and is free for the job
            looped.loop.run_once(0.05)
            turns += 1
        assert turns <= 8 and len(looped.dropped) == 1 and is_closed(stranger)
    later = looped.connect(1)
    wait_until(lambda: looped.loop.run_once(0.05) or challenged(later))


def test_a_loop_goes_on_after_its_listener_was_closed_for_lack_of_descriptors(monkeypatch, make_looped):
    """As that of a gang does, whose ranks have all come."""
    monkeypatch.setattr(acceptor, "_OUT_OF_DESCRIPTORS_PAUSE_S", 0.0)
    looped = make_looped()
    with monkeypatch.context() as short:
        short.setattr(acceptor, "descriptors_for_peers", lambda: 0)
        looped.connect(1)
        looped.loop.run_once(60)
    looped.acceptor.close()
    looped.listener.close()
    looped.loop.run_once(0)


def test_some_descriptors_are_for_no_peer(monkeypatch):
    for limit, highest in (((1024, 4096), 992), ((64, 4096), 56), ((resource.RLIM_INFINITY,) * 2, 2**31)):
        monkeypatch.setattr(resource, "getrlimit", lambda which, limit=limit: limit)
        assert acceptor.descriptors_for_peers() == highest


def test_the_first_that_was_dropped_is_logged_at_once_and_all_others_of_a_minute_in_one_line():
    peers = DroppedPeers(lambda: 1000.0)
    assert peers.deadline() is None
    peers.add("a peer at 10.0.0.9 is not a jaxrun process: " + "x" * 5000)
    assert peers.deadline() <= 1000.0
    one = peers.take()
    assert peers.deadline() is None
    for number in range(10_000):
        peers.add(f"a peer at 10.0.0.{number % 9} said nothing")
    assert peers.deadline() == 1060.0
    many = peers.take()
    assert peers.take() is None
    assert one.count == 1 and len(one.reason) == 200
    assert many == PeersDropped(10_000, "a peer at 10.0.0.0 said nothing")


def test_a_check_distinguishes_a_head_from_nobody(capsys):
    listener, loop = listen_on_tcp([HostAddress("lo", "127.0.0.1")], TOKEN, everywhere=False), EventLoop()
    acceptor_of_head = listener.accept(loop, 0, lambda peer: None)
    (address,) = listener.addresses
    server = threading.Thread(target=loop.run_once, args=(10,))
    server.start()
    try:
        assert check_reachable(str(address)) == 0
        server.join()
    finally:
        acceptor_of_head.close()
        listener.close()
        loop.close()
    assert f"a jaxrun head answers at {address}, reached from 127.0.0.1" in capsys.readouterr().out
    with pytest.raises(UnavailableError, match="cannot reach a head"):
        check_reachable(str(address))
