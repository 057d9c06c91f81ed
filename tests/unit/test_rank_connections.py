"""The connections to the ranks of a gang: no rank delays another, and no byte is lost."""

import os
import signal
import socket
import struct
import tempfile
import threading

import numpy as np
import pytest
from gang_by_hand import FakeGang

from jaxrun.errors import UsageError
from jaxrun.gang.rank_connections import RankListener
from jaxrun.protocol.gang_messages import GangMessageKind, GangMessageReader, pack


@pytest.fixture
def gang():
    fake = FakeGang(2)
    yield fake
    fake.close()


def test_a_rank_that_does_not_read_holds_nobody_up(gang):
    large = pack(GangMessageKind.VALUE, 1, np.zeros(2**20), share=False)
    gang.connections.send(large, (0, 1))
    thread = threading.Thread(target=gang.ranks[1].receive)
    thread.start()
    while thread.is_alive():
        gang.connections.poll(0.01)
    thread.join()
    reader = threading.Thread(target=gang.ranks[0].receive)
    reader.start()
    while reader.is_alive():
        gang.connections.poll(0.01)
    reader.join()
    gang.ranks[0].returns()
    assert [rank for rank, _ in gang.connections.poll(20)] == [0]


def test_a_rank_that_is_not_connected_is_sent_nothing(gang):
    gang.ranks[0].ends()
    assert gang.connections.poll(20) == [(0, None)]
    gang.connections.send(pack(GangMessageKind.VALUE, 1, "x", share=False), (0, 1, 7))
    assert gang.ranks[1].receive().load() == "x"


def test_a_rank_that_disconnects_while_it_is_sent_something_is_reported_once(gang):
    gang.ranks[0].connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    gang.ranks[0].ends()
    gang.connections.send(pack(GangMessageKind.VALUE, 1, "x", share=False), (0,))
    assert gang.connections.poll(20) == [(0, None)] and gang.connections.poll(0) == []


def test_the_output_of_the_launcher_is_kept(gang):
    os.write(gang.launcher.output_write_end, b"jaxrun: look\n")
    assert gang.connections.poll(20) == [] and gang.connections.read_launcher_output() == "jaxrun: look\n"
    assert gang.connections.read_launcher_output() == ""


def test_the_end_of_the_launcher_is_no_reason_to_wake_up_again(gang):
    os.close(gang.launcher.output_write_end)
    gang.launcher.output_write_end, gang.launcher.has_ended = -1, True
    assert gang.connections.poll(20) == []
    gang.ranks[1].send(GangMessageKind.VALUE, 1)
    assert [rank for rank, _ in gang.connections.poll(20)] == [1]


def test_a_ctrl_c_while_bytes_move_comes_afterwards(gang):
    """Otherwise a message would be half read, and all that follows would be nonsense."""
    read = GangMessageReader.receive

    def interrupted(inbox):
        message = read(inbox)
        signal.raise_signal(signal.SIGINT)
        return message

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GangMessageReader, "receive", interrupted)
        gang.ranks[0].send(GangMessageKind.VALUE, "whole")
        with pytest.raises(KeyboardInterrupt):
            gang.connections.poll(20)
    gang.ranks[0].send(GangMessageKind.VALUE, "next")
    assert [(rank, message.load()) for rank, message in gang.connections.poll(20)] == [(0, "whole"), (0, "next")]


def test_an_interface_that_is_not_there_leaves_neither_a_directory_nor_a_descriptor(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = os.listdir("/proc/self/fd")
    for _ in range(3):
        with pytest.raises(UsageError, match="--interface nonesuch is no interface, address or network of this host"):
            RankListener(remote=True, interface="nonesuch")
    assert os.listdir("/proc/self/fd") == before and not list(tmp_path.iterdir())
