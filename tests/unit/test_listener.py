"""The door lets in who knows the token; whatever a stranger does there costs nobody anything else."""

import contextlib
import json
import socket
import struct
import threading
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxrun.channel import listener as door_module
from jaxrun.channel.event_loop import EventLoop
from jaxrun.channel.interfaces import Interface
from jaxrun.channel.listener import listen_on_tcp
from jaxrun.errors import UnavailableError
from jaxrun.protocol import auth
from jaxrun.protocol.addresses import Address
from jaxrun.protocol.auth import Challenge, ChallengeResponse, Rejected, Welcome
from jaxrun.protocol.codec import MessageDecoder, encode, message_types
from jaxrun.protocol.connect import HeadAddress, connect

TOKEN = auth.new_token()
LOOPBACK = Interface("lo", "127.0.0.1")
LOOPBACK_6 = Interface("lo", "::1")
JOB = "ab" * 16


class Porter:
    """Serves a listener in a thread, as the supervisor does."""

    def __init__(self, *interfaces, everywhere=False):
        self.admitted = []
        self.dropped = []
        self.failure = None
        self.listener = listen_on_tcp(interfaces or [LOOPBACK], TOKEN, everywhere=everywhere)
        self._wake, self._stop = socket.socketpair()
        self._running = True
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    @property
    def address(self):
        return self.listener.addresses[0]

    def close(self):
        self._stop.send(b".")
        self._thread.join()
        self.listener.close()
        for peer in (self._wake, self._stop, *(one.connection for one in self.admitted)):
            peer.close()
        if self.failure is not None:
            raise self.failure

    def _run(self):
        try:
            self._serve()
        except BaseException as error:  # told when it is closed
            self.failure = error

    def _serve(self):
        loop = EventLoop()
        loop.add_reader(self._wake.fileno(), 0, lambda: setattr(self, "_running", False))
        self.listener.attach(loop, 1, self.admitted.append, self.dropped.append)
        while self._running:
            loop.run_once()
        loop.close()


@pytest.fixture
def open_door():
    """open_door(*INTERFACES) serves one until the test ends."""
    with contextlib.ExitStack() as stack:

        def start(*interfaces, **options):
            porter = Porter(*interfaces, **options)
            stack.callback(porter.close)
            return porter

        yield start


@pytest.fixture
def porter(open_door):
    return open_door()


@contextlib.contextmanager
def guest(porter):
    """A stranger who has just been greeted: its socket and the head's challenge."""
    address = porter.address
    with socket.create_connection((address.ip, address.port), timeout=5) as peer:
        yield peer, read(peer)


def read(peer):
    """The next message from the head."""
    codec = MessageDecoder(message_types(auth.ToClient))
    while not (found := codec.feed(data := peer.recv(4096))):
        assert data, "the head has hung up"
    return found[0]


def ends(peer):
    """Whether the head hangs up; whatever it says before is left aside."""
    with contextlib.suppress(ConnectionError):
        while peer.recv(4096):
            pass
    return True


def get_in(address, rank=0, token=TOKEN, timeout=5.0):
    return connect(lambda: HeadAddress(JOB, token, (address,)), rank, timeout)


def check_open(porter, rank=0):
    """An agent of the job gets in, at once."""
    began = time.monotonic()
    found = get_in(porter.address, rank)
    assert time.monotonic() - began < 1.0
    assert found.job_id == JOB
    found.connection.close()


def until(condition):
    """What the porter's thread is about to do has been done."""
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def frame(content):
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    return struct.pack("!I", len(body)) + body


STRANGERS = {
    "bytes": bytes(range(256)) * 20,
    "a browser": b"GET / HTTP/1.1\r\nHost: h1\r\n\r\n",
    "a TLS hello": bytes.fromhex("160301020001 0001fc0303") + b"\x5a" * 500,
    "an SSH client": b"SSH-2.0-OpenSSH_9.2\r\n",
    "a giant": struct.pack("!I", 2**32 - 1),
    "a frame too long by one": struct.pack("!I", 4097),
    "no JSON": frame(b"hello"),
    "an empty frame": frame(b""),
    "deep brackets": frame(b"[" * 4000),
    "another version": frame({"v": 2, "type": "ChallengeResponse", "rank": 0, "nonce": "", "proof": ""}),
    "an unknown type": frame({"v": 1, "type": "Shell", "command": "true"}),
    "a message of later": frame({"v": 1, "type": "Done", "rank": 0, "time": 0.0}),
    "the head's own words": encode(Welcome("")),
    "a proof that is none": encode(ChallengeResponse(0, "n", "p")),
    "a rank that is none": encode(ChallengeResponse(-(10**400), "n", "p")),
    "an empty proof": encode(ChallengeResponse(0, "", "")),
}


@pytest.mark.parametrize("words", STRANGERS.values(), ids=STRANGERS)
def test_a_stranger_is_dropped_and_an_agent_gets_in_meanwhile(porter, words):
    with guest(porter) as (peer, _):
        peer.sendall(words)
        check_open(porter)
        assert ends(peer)
    until(lambda: porter.admitted and porter.dropped)
    assert [one.rank for one in porter.admitted] == [0]
    assert len(porter.dropped) == 1 and porter.dropped[0].startswith("a peer at 127.0.0.1 ")


NO_UNICODE = {"a proof": ChallengeResponse(0, "n", "\ud800"), "a nonce": ChallengeResponse(0, "\ud800", "p")}


@pytest.mark.parametrize("answer", NO_UNICODE.values(), ids=NO_UNICODE)
def test_text_that_cannot_be_encoded_does_not_bring_the_head_down(answer):
    porter = Porter()
    try:
        with guest(porter) as (peer, _):
            peer.settimeout(1)
            peer.sendall(encode(answer))
            assert ends(peer)
        check_open(porter)
    finally:
        porter.close()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(min_size=1, max_size=5000))
def test_no_bytes_of_a_stranger_harm_the_door(porter, noise):
    with guest(porter) as (peer, _):
        with contextlib.suppress(OSError):
            peer.sendall(noise)
            peer.shutdown(socket.SHUT_WR)
        assert ends(peer)
    assert porter.failure is None and not porter.admitted


def test_scanners_that_connect_and_close_leave_the_door_open(porter):
    for linger in (False, True) * 20:
        peer = socket.create_connection((porter.address.ip, porter.address.port))
        if linger:  # ends in a reset
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        peer.close()
    check_open(porter)
    until(lambda: len(porter.admitted) == 1)


@pytest.mark.parametrize(
    "half", [b"", b"\0\0", encode(ChallengeResponse(0, "n", "p"))[:-1]], ids=["nothing", "two bytes", "half"]
)
def test_who_falls_silent_is_dropped_when_the_time_is_over(monkeypatch, open_door, half):
    monkeypatch.setattr(door_module, "_HANDSHAKE_TIMEOUT_S", 0.4)
    porter = open_door()
    began = time.monotonic()
    with guest(porter) as (peer, _):
        peer.sendall(half)
        check_open(porter)
        assert ends(peer)
    assert 0.3 < time.monotonic() - began < 2.0
    until(lambda: porter.dropped)
    assert porter.dropped == ["a peer at 127.0.0.1 said nothing for 0.4 s"]


def test_a_drip_of_bytes_does_not_buy_more_time(monkeypatch, open_door):
    monkeypatch.setattr(door_module, "_HANDSHAKE_TIMEOUT_S", 0.4)
    porter = open_door()
    began = time.monotonic()
    with guest(porter) as (peer, _), pytest.raises(ConnectionError):
        for byte in frame(b" " * 4000):
            peer.sendall(bytes([byte]))
            time.sleep(0.05)
            assert time.monotonic() - began < 5.0
    check_open(porter)


def test_hundreds_of_silent_guests_keep_no_agent_waiting(porter):
    with contextlib.ExitStack() as stack:
        for _ in range(200):
            stack.enter_context(socket.create_connection((porter.address.ip, porter.address.port)))
        check_open(porter)


def test_an_agent_with_the_wrong_token_is_told_so_and_dropped(porter):
    with pytest.raises(UnavailableError, match="refuses: it does not know the token of this job"):
        get_in(porter.address, rank=3, token=auth.new_token(), timeout=0.3)
    until(lambda: porter.dropped)
    assert not porter.admitted
    assert all("does not know the job's token" in text for text in porter.dropped)


def answer_to(challenge, rank=0, role="client", token=TOKEN):
    nonce = auth.new_nonce()
    return ChallengeResponse(rank, nonce, auth.make_proof(token, role, rank, challenge.nonce, nonce))


def test_a_proof_is_good_once(porter):
    with guest(porter) as (peer, challenge):
        answer = answer_to(challenge)
        peer.sendall(encode(answer))
        assert isinstance(read(peer), Welcome)
    with guest(porter) as (peer, challenge):
        peer.sendall(encode(answer))  # a replay
        assert isinstance(read(peer), Rejected) and ends(peer)
    until(lambda: len(porter.admitted) == 1)


def test_a_proof_is_good_for_its_rank_alone(porter):
    with guest(porter) as (peer, challenge):
        answer = answer_to(challenge, rank=1)
        peer.sendall(encode(ChallengeResponse(0, answer.nonce, answer.proof)))
        assert isinstance(read(peer), Rejected)
    assert not porter.admitted


def test_a_heads_proof_is_none_of_an_agent(porter):
    """Or a stranger could have one head's proof from another, and reflect it."""
    with guest(porter) as (peer, challenge):
        peer.sendall(encode(answer_to(challenge, role="server")))
        assert isinstance(read(peer), Rejected)
    assert not porter.admitted


def test_no_two_guests_get_the_same_challenge(porter):
    nonces = set()
    for _ in range(20):
        with guest(porter) as (_, challenge):
            assert isinstance(challenge, Challenge)
            nonces.add(challenge.nonce)
    assert len(nonces) == 20 and all(len(nonce) == 64 for nonce in nonces)


def test_the_head_proves_itself_and_the_token_is_never_said(porter):
    with guest(porter) as (peer, challenge):
        answer = answer_to(challenge, rank=2)
        peer.sendall(encode(answer))
        welcome = read(peer)
    assert welcome.proof == auth.make_proof(TOKEN, "server", 2, challenge.nonce, answer.nonce)
    assert TOKEN not in repr((challenge, answer, welcome))


def test_words_that_come_in_pieces_are_heard(porter):
    with guest(porter) as (peer, challenge):
        for byte in encode(answer_to(challenge)):
            peer.sendall(bytes([byte]))
        assert isinstance(read(peer), Welcome)


def test_the_head_listens_at_ipv6_too(open_door):
    porter = open_door(LOOPBACK_6)
    assert porter.address.ip == "::1" and str(porter.address).startswith("[::1]:")
    check_open(porter)


def test_everywhere_is_one_port_for_both_families(open_door):
    porter = open_door(LOOPBACK, LOOPBACK_6, everywhere=True)
    port = porter.address.port
    assert porter.listener.addresses == (Address("127.0.0.1", port), Address("::1", port))
    for rank, address in enumerate(porter.listener.addresses):
        get_in(address, rank).connection.close()
    until(lambda: sorted(one.rank for one in porter.admitted) == [0, 1])


def test_a_chosen_interface_is_listened_at_and_no_other(open_door):
    porter = open_door(LOOPBACK)
    with pytest.raises(OSError):
        socket.create_connection(("::1", porter.address.port), timeout=1)
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.2", porter.address.port), timeout=1)


@pytest.mark.parametrize(("everywhere", "where"), [(False, "127.0.0.1"), (True, "any address")])
def test_a_port_that_is_taken_is_named(porter, everywhere, where):
    port = porter.address.port
    with pytest.raises(UnavailableError, match=f"^cannot listen at {where}, port {port}: Address already in use"):
        listen_on_tcp([LOOPBACK], TOKEN, everywhere=everywhere, port=port)


def test_an_address_that_this_host_has_not_is_named():
    with pytest.raises(UnavailableError, match=r"cannot listen at 192\.0\.2\.77, port any: Cannot"):
        listen_on_tcp([Interface("eth9", "192.0.2.77")], TOKEN, everywhere=False)
