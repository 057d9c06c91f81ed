"""A listener that is served in a thread, and peers of it that do as a test wants."""

import contextlib
import socket
import threading
import time

import pytest
from handshakes import TOKEN, read

from jaxrun.node.channel.event_loop import EventLoop
from jaxrun.node.channel.host_addresses import HostAddress
from jaxrun.node.channel.listener import listen_on_tcp
from jaxrun.protocol.connect import HeadAddress, connect

LOOPBACK = HostAddress("lo", "127.0.0.1")


class ListenerThread:
    """Serves a listener in a thread, as the supervisor does: one of TCP, unless another is given."""

    def __init__(self, *interfaces, everywhere=False, listener=None):
        self.admitted = []
        self.dropped = []
        self.failure = None
        self.listener = listener or listen_on_tcp(interfaces or [LOOPBACK], TOKEN, everywhere=everywhere)
        self._wake, self._stop = socket.socketpair()
        self._running = True
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    @property
    def address(self):
        return self.listener.addresses[0]

    def close(self):
        if self._stop.fileno() < 0:
            return
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
        except BaseException as error:  # raised by close()
            self.failure = error

    def _serve(self):
        loop = EventLoop()
        loop.add_reader(self._wake.fileno(), 0, lambda: setattr(self, "_running", False))
        acceptor = self.listener.accept(loop, 1, self.admitted.append, self.dropped.append)
        loop.run_until(lambda: not self._running)
        acceptor.close()
        loop.close()


@pytest.fixture
def open_listener():
    """open_listener(*INTERFACES) serves a listener until the test ends."""
    with contextlib.ExitStack() as stack:

        def start(*interfaces, **options):
            server = ListenerThread(*interfaces, **options)
            stack.callback(server.close)
            return server

        yield start


@pytest.fixture
def server(open_listener):
    return open_listener()


@contextlib.contextmanager
def pending_peer(server):
    """Connects without having authenticated: yields the socket and the head's challenge."""
    address = server.address
    with socket.create_connection((address.ip, address.port), timeout=60) as peer:
        yield peer, read(peer)


def is_closed(peer):
    """Whether the head closes the connection; messages before that are ignored."""
    with contextlib.suppress(ConnectionError):
        while peer.recv(4096):
            pass
    return True


def connect_agent(address, rank=0):
    return connect(lambda: HeadAddress(TOKEN, (address,)), rank, 60.0)


def check_admits(server, rank=0):
    """Checks that an agent of the job is admitted; raises UnavailableError if it is not."""
    connect_agent(server.address, rank).connection.close()


def wait_until(condition):
    """Waits at most a minute until `condition` holds."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)
