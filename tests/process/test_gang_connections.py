"""The connections of a gang's parent and its ranks: who may connect, that none delays another, that no byte is lost."""

import gc
import os
import signal
import socket
import struct
import tempfile
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from gang_by_hand import gang
from listener_thread import ListenerThread, wait_until

from jaxrun.errors import ProtocolError, UnavailableError, UsageError
from jaxrun.frontends.gang import rank_connections
from jaxrun.frontends.gang.rank_connections import RankListener
from jaxrun.protocol.gang_connection import GangMessageReader
from jaxrun.protocol.gang_messages import GangMessageKind, pack
from jaxrun.protocol.names import GANG_ADDRESS, GANG_TOKEN
from jaxrun_runtime.gang import __main__ as gang_connect

__all__ = ["gang"]  # a fixture


class Parent(ListenerThread):
    """A listener that accepts ranks in a thread."""

    def __init__(self, *, remote):
        self.ranks = RankListener(remote=remote)
        super().__init__(listener=self.ranks.listener)

    def accept(self):
        """The next peer; waits until it has come."""
        wait_until(lambda: self.admitted)
        return self.admitted.pop(0)

    def close(self):
        super().close()
        self.ranks.close()


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
        with connect(parent) as rank, (peer := parent.accept()).connection as connection:
            assert peer.number == 3 and not connection.getblocking() and rank.gettimeout() is None
            rank.sendall(b"%d" % number)
            connection.setblocking(True)
            assert connection.recv(10) == b"%d" % number
            connection.sendall(b"hello")
            assert rank.recv(10) == b"hello"
    assert not parent.admitted


def test_afterwards_nobody_can_come_and_nothing_is_left(parent, monkeypatch):
    monkeypatch.setattr(gang_connect, "CONNECT_TIMEOUT_S", 0.2)
    directory = parent.ranks.directory
    assert directory.is_dir() and directory.stat().st_mode & 0o077 == 0
    parent.close()
    parent.ranks.close()
    assert not directory.exists()
    with pytest.raises(UnavailableError, match="found no parent of its gang"):
        connect(parent)


def test_a_stranger_is_not_admitted(parent, monkeypatch):
    with monkeypatch.context() as impatient:
        impatient.setattr(gang_connect, "CONNECT_TIMEOUT_S", 0.2)
        with pytest.raises(UnavailableError, match="found no parent of its gang"):
            connect(parent, **{GANG_TOKEN: "guess"})
    with connect(parent), parent.accept().connection:
        assert not parent.admitted


@pytest.mark.parametrize("where", ["", "tcp:"])
def test_without_an_address_the_error_says_what_starts_the_rank(where):
    with pytest.raises(ProtocolError, match=r"this program is started by jaxrun\.Gang"):
        gang_connect.connect_to_parent(where, "token")


def test_a_rank_without_a_parent_ends_with_a_sentence(monkeypatch):
    monkeypatch.setattr("jaxrun.protocol.connect._ROUND_PAUSE_S", 60.0)  # so it tries once
    monkeypatch.setenv(GANG_ADDRESS, "unix:/nowhere/at/all")
    with pytest.raises(SystemExit, match=r"cannot reach the Python process that owns its gang.*No such file"):
        gang_connect.main()
    assert GANG_ADDRESS not in os.environ


# ---- connected ranks


def test_a_rank_that_does_not_read_holds_nobody_up(gang):
    large = pack(GangMessageKind.VALUE, 1, np.zeros(2**20), share=False)
    gang.connections.send(large, (0, 1))
    for rank in (gang.ranks[1], gang.ranks[0]):
        thread = threading.Thread(target=rank.receive)
        thread.start()
        while thread.is_alive():
            gang.connections.poll(0.01)
        thread.join()
    gang.ranks[0].returns()
    assert [rank for rank, _ in gang.connections.poll(60)] == [0]


def test_a_rank_that_is_not_connected_is_sent_nothing(gang):
    gang.ranks[0].ends()
    assert gang.connections.poll(60) == [(0, None)]
    gang.connections.send(pack(GangMessageKind.VALUE, 1, "x", share=False), (0, 1, 7))
    assert gang.ranks[1].receive().load() == "x"


def test_a_rank_that_disconnects_while_it_is_sent_something_is_reported_once(gang):
    gang.ranks[0].connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    gang.ranks[0].ends()
    gang.connections.send(pack(GangMessageKind.VALUE, 1, "x", share=False), (0,))
    assert gang.connections.poll(60) == [(0, None)] and gang.connections.poll(0) == []


def test_the_output_of_the_launcher_is_kept(gang):
    gang.launcher_prints("jaxrun: look\n")
    assert gang.connections.poll(60) == [] and gang.connections.read_launcher_output() == "jaxrun: look\n"
    assert gang.connections.read_launcher_output() == ""


def test_the_end_of_the_launcher_wakes_a_poll_only_once(gang):
    gang.end_launcher()
    assert gang.connections.poll(60) == []
    gang.ranks[1].send(1)
    assert [rank for rank, _ in gang.connections.poll(60)] == [1]


def test_connections_to_hosts_that_have_vanished_end_some_time_after_the_launcher(gang, monkeypatch):
    now = 1000.0
    monkeypatch.setattr(rank_connections, "time", SimpleNamespace(monotonic=lambda: now))
    assert gang.connections.poll(0) == []  # silence means nothing while there is a launcher
    gang.end_launcher()
    assert gang.connections.poll(0) == []
    now += 60
    gang.ranks[1].send("last words")  # they count, although this process has not polled for so long
    (received,) = gang.connections.poll(0)
    assert received[0] == 1 and received[1].load() == "last words"
    assert gang.connections.poll(0) == []
    now += 60
    assert gang.connections.poll(0) == [(0, None), (1, None)] and gang.connections.ranks == ()


def interrupt_in_another_thread():
    thread = threading.Thread(target=signal.raise_signal, args=(signal.SIGINT,))
    thread.start()
    thread.join()


@pytest.mark.parametrize("interrupt", [lambda: signal.raise_signal(signal.SIGINT), interrupt_in_another_thread])
def test_a_ctrl_c_while_bytes_move_comes_afterwards(gang, interrupt):
    """Otherwise a message would be half read, and all that follows would be nonsense."""
    read = GangMessageReader.receive

    def interrupted(inbox):
        message = read(inbox)
        interrupt()
        return message

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GangMessageReader, "receive", interrupted)
        gang.ranks[0].send("whole")
        with pytest.raises(KeyboardInterrupt):
            gang.connections.poll(60)
    gang.ranks[0].send("next")
    assert [(rank, message.load()) for rank, message in gang.connections.poll(60)] == [(0, "whole"), (0, "next")]


def test_an_interface_that_is_not_there_leaves_neither_a_directory_nor_a_descriptor(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    gc.collect()
    before = os.listdir("/proc/self/fd")
    for _ in range(3):
        with pytest.raises(
            UsageError, match="--interface nonesuch is not an interface, address or network of this host"
        ):
            RankListener(remote=True, interface="nonesuch")
    assert os.listdir("/proc/self/fd") == before and not list(tmp_path.iterdir())
