"""The connection of a rank to its gang's parent: each side against the other."""

import os
import threading
import time

import pytest

from jaxrun.channel.event_loop import EventLoop
from jaxrun.errors import ProtocolError, UnavailableError
from jaxrun.gang.rank_connections import RankListener
from jaxrun.protocol.names import GANG_ADDRESS, GANG_TOKEN
from jaxrun_runtime.gang import connect as gang_connect


class Parent:
    """A listener that accepts ranks in a thread."""

    def __init__(self, *, remote):
        self.ranks = RankListener(remote=remote)
        self.peers = []
        self._loop = EventLoop()
        self._open = True
        self.ranks.listener.attach(self._loop, 0, self.peers.append)
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self):
        while self._open:
            self._loop.run_once(0.01)

    def accept(self):
        """The next peer; waits until it has come."""
        deadline = time.monotonic() + 20
        while not self.peers:
            assert time.monotonic() < deadline
            time.sleep(0.002)
        return self.peers.pop(0)

    def close(self):
        self._open = False
        self._thread.join()
        self.ranks.close()
        self._loop.close()


@pytest.fixture(params=[False, True], ids=["on one machine", "over TCP"])
def parent(request):
    made = Parent(remote=request.param)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def rank_3(monkeypatch):
    monkeypatch.setattr("jaxrun_runtime.rank", 3)


def connect(parent, **changes):
    environ = parent.ranks.environ | changes
    return gang_connect.connect_to_parent(environ[GANG_ADDRESS], environ[GANG_TOKEN]).connection


def test_ranks_come_one_after_the_other(parent):
    for number in range(3):
        peer_of = parent.accept
        with connect(parent) as rank, (peer := peer_of()).connection as connection:
            assert peer.rank == 3 and not connection.getblocking() and rank.gettimeout() is None
            rank.sendall(b"%d" % number)
            connection.setblocking(True)
            assert connection.recv(10) == b"%d" % number
            connection.sendall(b"hello")
            assert rank.recv(10) == b"hello"
    assert not parent.peers


def test_afterwards_nobody_can_come_and_nothing_is_left(parent, monkeypatch):
    monkeypatch.setattr(gang_connect, "_CONNECT_TIMEOUT_S", 0.2)
    directory = parent.ranks.directory
    assert directory.is_dir() and directory.stat().st_mode & 0o077 == 0
    parent.close()
    parent.ranks.close()
    assert not directory.exists()
    with pytest.raises(UnavailableError, match="found no parent of its gang"):
        connect(parent)


def test_a_stranger_is_not_admitted(parent, monkeypatch):
    monkeypatch.setattr(gang_connect, "_CONNECT_TIMEOUT_S", 0.2)
    with pytest.raises(UnavailableError, match="refuses: it does not know the token"):
        connect(parent, **{GANG_TOKEN: "guess"})
    with connect(parent), parent.accept().connection:
        assert not parent.peers


@pytest.mark.parametrize("where", ["", "tcp:"])
def test_without_an_address_the_error_says_what_starts_the_rank(where):
    with pytest.raises(ProtocolError, match=r"this program is started by jaxrun\.Gang"):
        gang_connect.connect_to_parent(where, "token")


def test_a_rank_without_a_parent_ends_with_a_sentence(monkeypatch):
    monkeypatch.setattr(gang_connect, "_CONNECT_TIMEOUT_S", 0.1)
    monkeypatch.setenv(GANG_ADDRESS, "unix:/nowhere/at/all")
    with pytest.raises(SystemExit, match=r"cannot reach the Python process that its gang belongs to.*No such file"):
        gang_connect.main()
    assert GANG_ADDRESS not in os.environ
