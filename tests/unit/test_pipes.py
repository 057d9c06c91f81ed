"""The workers' pipes, with an output that only takes notes."""

import fcntl
import os

import pytest

from jaxrun.agent.pipes import OutputPipes


class RecordingSink:
    def __init__(self):
        self.congested = False
        self.taken = {}
        self.order = []
        self.ended = []

    def write(self, rank, stream, data):
        self.order.append((rank, stream))
        self.taken[rank, stream] = self.taken.get((rank, stream), b"") + data

    def end_stream(self, rank, stream):
        self.ended.append((rank, stream))


class Stage:
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

    def hang_up(self, rank, stream):
        os.close(self.ends.pop((rank, stream)))


@pytest.fixture
def stage():
    stage = Stage()
    yield stage
    for fd in [*stage.readers, *stage.ends.values()]:
        os.close(fd)


def test_what_is_ready_is_taken_in_the_order_of_the_ranks(stage):
    for rank, stream in ((1, "err"), (1, "out"), (0, "out")):
        stage.write(rank, stream, b"%d" % rank)
    stage.pipes.read_ready()
    assert stage.output.order == [(0, "out"), (1, "err"), (1, "out")]
    stage.pipes.close()


def test_the_first_output_of_a_rank_is_noted_once(stage):
    stage.write(1, "err", b"x")
    stage.pipes.read_ready()
    stage.write(1, "out", b"y")
    stage.pipes.read_ready()
    assert stage.first == [1]
    stage.write(0, "out", b"z")
    stage.pipes.finish(0)
    assert stage.first == [1, 0]
    stage.pipes.close()


def test_an_end_is_no_output(stage):
    stage.hang_up(0, "out")
    stage.pipes.read_ready()
    assert stage.first == [] and stage.output.ended == [(0, "out")]
    stage.pipes.close()


def test_a_pipe_that_has_ended_is_not_ready_any_more(stage):
    stage.hang_up(0, "out")
    stage.pipes.read_ready()
    stage.pipes.read_ready()
    stage.pipes.finish(0)
    assert stage.output.ended == [(0, "out")]
    stage.pipes.close()


@pytest.mark.parametrize("congested", [False, True])
def test_an_ended_worker_loses_nothing_even_if_the_screen_is_stuck(stage, congested):
    size = fcntl.fcntl(stage.ends[0, "out"], 1031, 2**20)
    stage.output.congested = congested
    stage.write(0, "out", b"x" * size)
    stage.hang_up(0, "out")
    stage.pipes.finish(0)
    assert len(stage.output.taken[0, "out"]) == size and stage.output.ended == [(0, "out")]
    stage.pipes.close()


def test_nothing_is_read_while_the_screen_is_stuck(stage):
    stage.output.congested = True
    stage.write(0, "out", b"x")
    stage.pipes.read_ready()
    assert stage.output.taken == {}
    stage.pipes.close()
    assert stage.output.taken == {(0, "out"): b"x"}


def test_a_pipe_that_others_hold_open_is_served_after_its_worker_ended(stage):
    stage.write(0, "out", b"before")
    stage.pipes.finish(0)
    stage.write(0, "out", b" after")
    stage.pipes.read_ready()
    assert stage.output.taken[0, "out"] == b"before after" and stage.output.ended == []
    stage.pipes.close()


def test_a_removed_rank_is_not_read(stage):
    stage.pipes.remove(0)
    stage.write(0, "out", b"x")
    stage.pipes.read_ready()
    stage.pipes.close()
    assert stage.output.taken == {}
