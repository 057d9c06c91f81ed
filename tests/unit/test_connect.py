"""Finding the head among strangers, dead addresses and closed ports: the first that proves that it knows the token."""

import contextlib
import gc
import socket
import threading
import time
import warnings

import pytest

from jaxrun.channel.event_loop import EventLoop
from jaxrun.channel.interfaces import Interface
from jaxrun.channel.listener import listen_on_tcp
from jaxrun.errors import UnavailableError
from jaxrun.protocol import auth
from jaxrun.protocol import connect as connect_module
from jaxrun.protocol.addresses import Address
from jaxrun.protocol.auth import HANDSHAKE_VERSION, Challenge, Rejected, Welcome
from jaxrun.protocol.codec import MessageDecoder, encode, message_types
from jaxrun.protocol.connect import HeadAddress, connect

TOKEN = auth.new_token()
STAGGER = connect_module._STAGGER_S
SLACK_S = 2.0  # of a machine that does much else; an attempt is given up after longer
UNROUTABLE = Address("10.255.255.1", 9)


class Server:
    """Listens, and calls `serve(connection)` for each connection, in a thread."""

    def __init__(self, serve, ip="127.0.0.1", port=0):
        family = socket.AF_INET6 if ":" in ip else socket.AF_INET
        self._listener = socket.create_server((ip, port), family=family)
        self.address = Address(ip, self._listener.getsockname()[1])
        self.count = 0
        self._serve = serve
        self._connections = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self):
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        for connection in self._connections:
            connection.close()

    def _run(self):
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.count += 1
            self._connections.append(connection)
            connection.settimeout(0.5)
            with contextlib.suppress(OSError, StopIteration):
                self._serve(connection)


def head(token=TOKEN, version=HANDSHAKE_VERSION, proof=None):
    """A head with this token; `proof` replaces the proof that it would send."""

    def serve(connection):
        nonce = auth.new_nonce()
        connection.sendall(encode(Challenge(version, nonce)))
        codec = MessageDecoder(message_types(auth.ToServer))
        answers = []
        while not answers and (data := connection.recv(4096)):
            answers = codec.feed(data)
        if not answers:
            return
        answer = answers[0]
        right = auth.make_proof(token, "client", answer.rank, nonce, answer.nonce)
        if proof is None and not auth.proofs_equal(right, answer.proof):
            connection.sendall(encode(Rejected("it does not know the token of this job")))
            connection.close()
            return
        own = auth.make_proof(token, "server", answer.rank, nonce, answer.nonce)
        connection.sendall(encode(Welcome(proof(answer) if proof else own)))

    return serve


def sends(*messages, close=False):
    """A stranger that sends these bytes."""

    def serve(connection):
        for message in messages:
            connection.sendall(message)
        if close:
            connection.close()

    return serve


@pytest.fixture
def listen():
    """listen(SERVE) → a Server until the test ends."""
    with contextlib.ExitStack() as stack:

        def start(serve, **where):
            server = Server(serve, **where)
            stack.callback(server.close)
            return server

        yield start


@pytest.fixture
def blackhole():
    """A port whose connections are never accepted: its queue is full."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=0)
    waiting = []
    for _ in range(4):
        connection = socket.socket()
        connection.setblocking(False)
        connection.connect_ex(listener.getsockname())
        waiting.append(connection)
    time.sleep(0.01)
    yield Address(*listener.getsockname())
    for connection in (*waiting, listener):
        connection.close()


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def reach(*addresses, rank=1, token=TOKEN, timeout=5.0):
    """Connects; returns the seconds that it took and the head's port."""
    began = time.monotonic()
    found = connect(lambda: HeadAddress(token, addresses), rank, timeout)
    seconds = time.monotonic() - began
    port = found.connection.getpeername()[1]
    found.connection.close()
    return seconds, port


def fail(*addresses, timeout=1.0, **more):
    """The text of the error."""
    with pytest.raises(UnavailableError) as failed:
        reach(*addresses, timeout=timeout, **more)
    return str(failed.value)


def test_the_head_is_reached_at_once(listen):
    right = listen(head())
    found = [reach(right.address) for _ in range(5)]
    assert min(seconds for seconds, _ in found) < 0.15 and found[0][1] == right.address.port


def test_the_head_is_reached_by_ipv6_and_by_name(listen):
    six = listen(head(), ip="::1")
    assert reach(six.address)[1] == six.address.port
    right = listen(head())
    assert reach(Address("localhost", right.address.port))[1] == right.address.port


STRANGERS = {
    "hangs up": (sends(close=True), "hangs up: the wrong job, or no head of jaxrun"),
    "speaks HTTP": (sends(b"HTTP/1.1 400 Bad Request\r\n\r\n"), "answers, but is no head of jaxrun"),
    "speaks SSH": (sends(b"SSH-2.0-OpenSSH_9.2\r\n"), "answers, but is no head of jaxrun"),
    "sends what is none": (
        sends(encode(Challenge(HANDSHAKE_VERSION, "x")).replace(b"Chall", b"Shell")),
        "but is no head of jaxrun",
    ),
    "is of another version": (
        head(version=HANDSHAKE_VERSION + 1),
        f"speaks version {HANDSHAKE_VERSION + 1} of the channel, this agent 1",
    ),
    "is the head of another job": (head(token="00" * 32), "refuses: it does not know the token of this job"),
    "claims to be it": (head(proof=lambda answer: "ab" * 32), "answers, but does not know this job's token"),
    "reflects the proof": (head(proof=lambda answer: answer.proof), "answers, but does not know this job's token"),
    "is the head without a challenge": (sends(encode(Welcome("ab" * 32))), "does not know this job's token"),
    "has an empty proof": (head(proof=lambda answer: ""), "does not know this job's token"),
}


@pytest.mark.parametrize(("serve", "text"), STRANGERS.values(), ids=STRANGERS)
def test_a_stranger_on_the_first_address_is_skipped(listen, serve, text):
    stranger, right = listen(serve), listen(head())
    seconds, port = reach(stranger.address, right.address)
    assert port == right.address.port and stranger.count == 1
    assert seconds < STAGGER + SLACK_S


@pytest.mark.parametrize(("serve", "text"), STRANGERS.values(), ids=STRANGERS)
def test_the_error_says_how_a_stranger_answered(listen, serve, text):
    stranger = listen(serve)
    error = fail(stranger.address)
    assert error.startswith("rank 1 on ") and "found no head of the job within 1 s: " in error
    assert f"{stranger.address} " in error and text in error


def test_a_proof_that_was_seen_before_is_not_accepted_again(listen):
    seen = []

    def replay(connection):
        """The same nonce each time, and the proof of the first time."""
        connection.sendall(encode(Challenge(HANDSHAKE_VERSION, "11" * 32)))
        codec = MessageDecoder(message_types(auth.ToServer))
        (answer,) = codec.feed(connection.recv(4096))
        seen.append(auth.make_proof(TOKEN, "server", answer.rank, "11" * 32, answer.nonce))
        connection.sendall(encode(Welcome(seen[0])))

    stranger = listen(replay)
    reach(stranger.address)
    assert "does not know this job's token" in fail(stranger.address)
    assert len(set(seen)) >= 2


def test_a_stranger_whose_text_cannot_be_encoded_is_skipped(listen):
    stranger, right = listen(sends(encode(Challenge(HANDSHAKE_VERSION, "\ud800")))), listen(head())
    assert reach(stranger.address, right.address)[1] == right.address.port


def test_a_silent_stranger_costs_no_more_than_the_stagger(listen):
    silent, right = listen(sends()), listen(head())
    seconds, port = reach(silent.address, right.address)
    assert port == right.address.port and seconds < STAGGER + SLACK_S


def test_half_a_challenge_costs_no_more_than_the_stagger(listen):
    stranger, right = listen(sends(encode(Challenge(HANDSHAKE_VERSION, "n"))[:-3])), listen(head())
    assert reach(stranger.address, right.address)[0] < STAGGER + SLACK_S


@pytest.mark.parametrize("count", [1, 3])
def test_dead_addresses_delay_by_the_stagger_each(listen, blackhole, count):
    right = listen(head())
    seconds, port = reach(*[blackhole] * count, right.address)
    assert port == right.address.port
    assert seconds < count * STAGGER + SLACK_S


def test_an_unroutable_address_delays_by_no_more_than_the_stagger(listen):
    right = listen(head())
    seconds, _ = reach(UNROUTABLE, right.address)
    assert seconds < STAGGER + SLACK_S


def test_a_port_that_refuses_does_not_delay_at_all(listen):
    right = listen(head())
    closed = [Address("127.0.0.1", free_port()) for _ in range(5)]
    assert min(reach(*closed, right.address)[0] for _ in range(5)) < 0.15


def test_of_two_addresses_of_one_head_one_connection_remains(listen):
    slow = threading.Event()

    def late(connection):
        slow.wait(10)
        head()(connection)

    first, second = listen(late), listen(head())
    seconds, port = reach(first.address, second.address)
    slow.set()
    assert port == second.address.port and seconds < STAGGER + SLACK_S


def test_a_head_that_listens_later_is_found(listen):
    address = Address("127.0.0.1", free_port())
    timer = threading.Timer(0.6, lambda: listen(head(), port=address.port))
    timer.start()
    seconds, _ = reach(address)
    timer.join()
    assert 0.5 < seconds < 0.6 + SLACK_S


def test_a_dead_address_does_not_keep_a_head_that_listens_later_from_being_found(listen, blackhole):
    address = Address("127.0.0.1", free_port())
    timer = threading.Timer(0.6, lambda: listen(head(), port=address.port))
    timer.start()
    try:
        reach(blackhole, address)
    finally:
        timer.join()


def test_the_heads_address_may_become_known_later(listen):
    right = listen(head())
    addresses = iter([None, HeadAddress(TOKEN, ()), HeadAddress(TOKEN, (right.address,))])
    found = connect(lambda: next(addresses), 0, 5.0)
    found.connection.close()


def test_without_an_address_the_error_says_where_it_was_looked_for():
    with pytest.raises(UnavailableError, match=r"^rank 4 on .* found no head of the job within 0.1 s: no file yet$"):
        connect(lambda: None, 4, 0.1, "no file yet")


def test_every_address_is_in_the_error(blackhole):
    closed = Address("127.0.0.1", free_port())
    text = fail(closed, blackhole, Address("host.invalid", 9), timeout=0.6)
    assert f"{closed} refuses connections" in text
    assert f"{blackhole} has not answered yet" in text
    assert "host.invalid:9 cannot be reached (" in text


def test_an_address_that_never_answers_is_given_up(monkeypatch, listen):
    monkeypatch.setattr(connect_module, "_ATTEMPT_TIMEOUT_S", 0.2)
    silent = listen(sends())
    assert f"{silent.address} does not answer within 0.2 s" in fail(silent.address, timeout=0.7)
    assert silent.count > 1


def test_the_time_limit_holds(blackhole):
    began = time.monotonic()
    fail(blackhole, UNROUTABLE, timeout=0.5)
    assert 0.4 < time.monotonic() - began < 0.5 + SLACK_S


def test_an_address_that_fails_at_once_leaves_no_socket_to_the_collector():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert "cannot be reached" in fail(Address("255.255.255.255", 9))
        gc.collect()
    assert not [warning for warning in caught if issubclass(warning.category, ResourceWarning)]


def test_a_real_listener_and_a_connection_agree():
    """Both sides as they are: the server's proof is right, and both sides end up with one connection."""
    listener = listen_on_tcp([Interface("lo", "127.0.0.1")], TOKEN, everywhere=False)
    admitted, loop = [], EventLoop()
    listener.attach(loop, 0, admitted.append)

    def serve():
        while not admitted:
            loop.run_once(5)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        reach(listener.addresses[0], rank=6)
    finally:
        thread.join()
        listener.close()
        loop.close()
    assert [one.rank for one in admitted] == [6]
    admitted[0].connection.close()
