"""From the workers' pipes to the output: what is read and when, at how much at a time, and when ranks wrote."""

import fcntl
import os

import pytest

from jaxrun.node.agent.pipes import OutputPipes


class RecordingLogs:
    def __init__(self):
        self.logged = {}

    def write_file(self, rank, stream, data):
        self.logged[rank, stream] = self.logged.get((rank, stream), b"") + data


class RecordingSink:
    def __init__(self):
        self.congested = False
        self.written = {}
        self.logs = RecordingLogs()
        self.order = []
        self.ended = []

    def write(self, rank, stream, data):
        self.order.append((rank, stream))
        self.written[rank, stream] = self.written.get((rank, stream), b"") + data

    def end_stream(self, rank, stream):
        self.ended.append((rank, stream))


class TwoRankPipes:
    """Pipes of two ranks; `ends` are the workers' ends."""

    def __init__(self):
        self.output = RecordingSink()
        self.first = []
        self.pipes = OutputPipes(self.output, self.first.append)
        self.ends = {}
        self.readers = []
        for rank in (0, 1):
            readers = []
            for stream in ("out", "err"):
                read, self.ends[rank, stream] = os.pipe()
                os.set_blocking(read, False)
                readers.append(read)
            self.pipes.add(rank, *readers)
            self.readers += readers

    def write(self, rank, stream, data):
        os.write(self.ends[rank, stream], data)

    def close_stream(self, rank, stream):
        os.close(self.ends.pop((rank, stream)))


@pytest.fixture
def setup():
    setup = TwoRankPipes()
    yield setup
    setup.pipes.close()
    for fd in [*setup.readers, *setup.ends.values()]:
        os.close(fd)


def test_ready_pipes_are_read_in_the_order_of_the_ranks(setup):
    for rank, stream in ((1, "err"), (1, "out"), (0, "out")):
        setup.write(rank, stream, b"%d" % rank)
    setup.pipes.read_ready()
    assert setup.output.order == [(0, "out"), (1, "err"), (1, "out")]


def test_the_first_output_of_a_rank_is_recorded_once(setup):
    setup.write(1, "err", b"x")
    setup.pipes.read_ready()
    setup.write(1, "out", b"y")
    setup.pipes.read_ready()
    assert setup.first == [1]
    setup.write(0, "out", b"z")
    setup.pipes.finish(0)
    assert setup.first == [1, 0]


def test_what_a_native_library_writes_and_nobody_is_shown_is_no_output_of_the_rank(setup):
    for piece in (b"[Gloo] Rank ", b"0", b" is connected to ", b"1", b" peer ranks. "):
        setup.write(0, "out", piece)
        setup.pipes.read_ready()
    setup.write(0, "out", b"Expected number of connected peer ranks is : 1\n")
    setup.pipes.read_ready()
    assert setup.first == [] and setup.output.written[0, "out"].startswith(b"[Gloo] Rank 0")
    setup.write(0, "out", b"loss 0.5")
    setup.pipes.read_ready()
    assert setup.first == [0]


def test_a_closed_stream_has_no_output_and_ends_once(setup):
    setup.close_stream(0, "out")
    setup.pipes.read_ready()
    setup.pipes.read_ready()
    setup.pipes.finish(0)
    assert setup.first == [] and setup.output.ended == [(0, "out")]


@pytest.mark.parametrize("congested", [False, True])
def test_an_ended_worker_loses_nothing_even_if_the_terminal_is_congested(setup, congested):
    size = fcntl.fcntl(setup.ends[0, "out"], 1031, 2**20)
    setup.output.congested = congested
    setup.write(0, "out", b"x" * size)
    setup.close_stream(0, "out")
    setup.pipes.finish(0)
    assert len(setup.output.written[0, "out"]) == size and setup.output.ended == [(0, "out")]


def test_nothing_is_read_while_the_terminal_is_congested(setup):
    setup.output.congested = True
    setup.write(0, "out", b"x")
    setup.pipes.read_ready()
    assert setup.output.written == {}
    setup.pipes.close()
    assert setup.output.written == {(0, "out"): b"x"}


def test_a_pipe_that_others_hold_open_is_served_after_its_worker_ended(setup):
    setup.write(0, "out", b"before")
    setup.pipes.finish(0)
    setup.write(0, "out", b" after")
    setup.pipes.read_ready()
    assert setup.output.written[0, "out"] == b"before after" and setup.output.ended == []


def test_what_a_hidden_rank_still_writes_is_only_logged(setup):
    setup.write(0, "err", b"before")
    setup.pipes.hide(0)
    setup.write(0, "err", b" after")
    setup.write(1, "err", b"other")
    setup.pipes.read_ready()
    setup.write(0, "err", b" and last")
    setup.pipes.close()
    assert setup.output.written == {(0, "err"): b"before", (1, "err"): b"other"}
    assert setup.output.logs.logged == {(0, "err"): b" after and last"}


def test_a_removed_rank_is_not_read(setup):
    setup.pipes.remove(0)
    setup.write(0, "out", b"x")
    setup.pipes.read_ready()
    setup.pipes.close()
    assert setup.output.written == {}


# ---- how much is read at a time
