"""Finding the head among strangers, dead addresses and closed ports: the first that proves that it knows the token."""

import contextlib
import gc
import itertools
import socket
import threading
import time
import warnings
from types import SimpleNamespace

import pytest

from jaxrun.errors import UnavailableError
from jaxrun.protocol import auth
from jaxrun.protocol import connect as connect_module
from jaxrun.protocol.addresses import Address
from jaxrun.protocol.auth import HANDSHAKE_VERSION, Challenge, Rejected, Welcome
from jaxrun.protocol.codec import MessageDecoder, encode, message_types
from jaxrun.protocol.connect import HeadAddress, connect

TOKEN = auth.new_token()
FOR_EVER_S = 600.0
UNROUTABLE = Address("10.255.255.1", 9)


@pytest.fixture
def one_round(monkeypatch):
    """One round of attempts lasts as long as it needs, and no other follows."""
    for name in ("_FIRST_ROUND_S", "_ATTEMPT_TIMEOUT_S", "_ROUND_PAUSE_S"):
        monkeypatch.setattr(connect_module, name, FOR_EVER_S)


@pytest.fixture
def no_stagger(monkeypatch):
    """Nobody waits for a silent address until the next is tried: whoever is delayed by one waits for ever."""
    monkeypatch.setattr(connect_module, "_STAGGER_S", FOR_EVER_S)


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
            connection.settimeout(30)
            with contextlib.suppress(OSError, StopIteration):
                self._serve(connection)


def head(connection):
    """Serves an agent of the job, as its head does."""
    nonce = auth.new_nonce()
    connection.sendall(encode(Challenge(HANDSHAKE_VERSION, nonce)))
    codec = MessageDecoder(message_types(auth.ToServer))
    answers = []
    while not answers and (data := connection.recv(4096)):
        answers = codec.feed(data)
    for answer in answers:
        connection.sendall(encode(Welcome(auth.make_proof(TOKEN, "server", answer.number, nonce, answer.nonce))))


def sends(*messages, close=False):
    """A stranger that sends these messages, or bytes."""

    def serve(connection):
        for message in messages:
            connection.sendall(message if isinstance(message, bytes) else encode(message))
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
    yield Address(*listener.getsockname())
    for connection in (*waiting, listener):
        connection.close()


@pytest.fixture
def closed():
    """A port that refuses connections, where a Server can listen later: nobody else gets it meanwhile."""
    with socket.socket() as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(("127.0.0.1", 0))
        yield Address(*bound.getsockname())


def reach(*addresses, timeout=60.0):
    """Connects rank 1; returns the head's port."""
    found = connect(lambda: HeadAddress(TOKEN, addresses), 1, timeout)
    with found.connection:
        return found.connection.getpeername()[1]


def fail(*addresses, timeout=60.0):
    """The text of the error."""
    with pytest.raises(UnavailableError) as failed:
        reach(*addresses, timeout=timeout)
    return str(failed.value)


@pytest.mark.usefixtures("one_round", "no_stagger")
def test_the_head_is_reached_at_once_also_by_ipv6_and_by_name_and_behind_ports_that_refuse(listen, closed):
    right, six = listen(head), listen(head, ip="::1")
    assert reach(right.address) == reach(*[closed] * 5, right.address) == right.address.port
    assert reach(Address("localhost", right.address.port)) == right.address.port
    assert reach(six.address) == six.address.port


CHALLENGE = Challenge(HANDSHAKE_VERSION, "ab" * 32)
STRANGERS = {
    "hangs up": (sends(close=True), "closed the connection: it serves another job, or is not a jaxrun head"),
    "speaks HTTP": (sends(b"HTTP/1.1 400 Bad Request\r\n\r\n"), "answers, but is not a jaxrun head"),
    "speaks SSH": (sends(b"SSH-2.0-OpenSSH_9.2\r\n"), "answers, but is not a jaxrun head"),
    "sends what is none": (sends(encode(CHALLENGE).replace(b"Chall", b"Shell")), "but is not a jaxrun head"),
    "is of another version": (
        sends(Challenge(HANDSHAKE_VERSION + 1, "")),
        f"speaks version {HANDSHAKE_VERSION + 1} of the channel, this agent 1",
    ),
    "is the head of another job": (
        sends(CHALLENGE, Rejected("it does not know the token of this job")),
        "refuses: it does not know the token of this job",
    ),
    "claims to be it": (sends(CHALLENGE, Welcome("ab" * 32)), "answers, but does not know this job's token"),
}


@pytest.mark.parametrize(("serve", "text"), STRANGERS.values(), ids=STRANGERS)
@pytest.mark.usefixtures("one_round", "no_stagger")
def test_a_stranger_on_the_first_address_is_skipped_and_the_error_says_how_it_answered(listen, serve, text):
    stranger, right = listen(serve), listen(head)
    assert reach(stranger.address, right.address) == right.address.port
    assert stranger.count == 1
    error = fail(stranger.address)
    assert error.startswith("rank 1 on ") and "found no head of the job within 60 s: " in error
    assert f"{stranger.address} " in error and text in error


@pytest.mark.usefixtures("one_round")
def test_silent_strangers_and_dead_addresses_cost_no_more_than_the_stagger(listen, blackhole):
    says_nothing, says_half = listen(sends()), listen(sends(encode(CHALLENGE)[:-3]))
    cannot_be_answered_in_unicode = listen(sends(Challenge(HANDSHAKE_VERSION, "\ud800")))
    silent = [server.address for server in (says_nothing, says_half, cannot_be_answered_in_unicode)]
    right = listen(head)
    assert reach(*silent, blackhole, UNROUTABLE, right.address) == right.address.port


@pytest.mark.parametrize("dead", [False, True])
def test_a_head_that_listens_later_is_found_also_beside_a_dead_address(listen, closed, blackhole, dead):
    began = time.monotonic()
    timer = threading.Timer(0.6, lambda: listen(head, port=closed.port))
    timer.start()
    try:
        assert reach(*[blackhole] * dead, closed) == closed.port
    finally:
        timer.join()
    assert time.monotonic() - began > 0.5


def test_the_heads_address_may_become_known_later(listen):
    right = listen(head)
    known = itertools.repeat(HeadAddress(TOKEN, (right.address,)))
    addresses = itertools.chain([None, HeadAddress(TOKEN, ())], known)
    found = connect(lambda: next(addresses), 0, 60.0)
    found.connection.close()


def test_a_name_that_resolves_later_is_looked_up_in_each_round(listen, monkeypatch):
    server, lookups, said = listen(head), [], []
    entry = socket.getaddrinfo(server.address.ip, server.address.port, type=socket.SOCK_STREAM)

    def resolve(address):
        lookups.append(address)
        if len(lookups) < 3:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return entry

    monkeypatch.setattr(connect_module.addresses, "resolve", resolve)
    monkeypatch.setattr(connect_module, "_ROUND_PAUSE_S", 0.01)
    monkeypatch.setattr(connect_module, "_FIRST_ROUND_S", FOR_EVER_S)
    found = HeadAddress(TOKEN, (Address("pod-0.jobs", server.address.port),))
    connect(lambda: found, 1, 60.0, on_failed_round=said.append).connection.close()
    assert lookups == [found.addresses[0]] * 3
    assert said == [f"{found.addresses[0]} does not resolve (Name or service not known)"] * 2


def test_without_an_address_the_error_says_where_it_was_looked_for():
    with pytest.raises(UnavailableError, match=r"^rank 4 on .* found no head of the job within 0.1 s: no file yet$"):
        connect(lambda: None, 4, 0.1, "no file yet")


def test_every_address_is_in_the_error_and_the_time_limit_holds(closed, blackhole, monkeypatch):
    began, tried, start = time.monotonic(), [], connect_module._start_connecting
    monkeypatch.setattr(connect_module, "_FIRST_ROUND_S", FOR_EVER_S)
    monkeypatch.setattr(connect_module, "_start_connecting", lambda address: tried.append(address) or start(address))
    # The time stands still until the last one is tried, which alone is silent.
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() if blackhole in tried else began, sleep=time.sleep)
    monkeypatch.setattr(connect_module, "time", clock)
    text = fail(closed, Address("host.invalid", 9), blackhole, timeout=1.5)
    assert 1.2 < time.monotonic() - began < 60
    assert f"{closed} refuses connections" in text
    assert f"{blackhole} has not answered yet" in text
    assert "host.invalid:9 does not resolve (" in text


@pytest.mark.usefixtures("one_round")
def test_an_address_that_never_answers_is_given_up(monkeypatch, listen):
    silent, checks = listen(sends()), []

    def check():
        checks.append(1)
        if len(checks) > 1:  # the end of the round is fixed, that of the attempt is not
            monkeypatch.setattr(connect_module, "_ATTEMPT_TIMEOUT_S", 0.2)

    with pytest.raises(UnavailableError, match=f"{silent.address} does not answer within 0.2 s"):
        connect(lambda: HeadAddress(TOKEN, (silent.address,)), 1, 60.0, check=check)


@pytest.mark.usefixtures("one_round")
def test_an_address_that_fails_at_once_leaves_no_socket_to_the_collector():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert "cannot be reached" in fail(Address("255.255.255.255", 9))
        gc.collect()
    assert not [warning for warning in caught if issubclass(warning.category, ResourceWarning)]
