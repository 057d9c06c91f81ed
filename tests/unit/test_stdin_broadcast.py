"""The copies of jaxrun's standard input that ranks get, over real pipes."""

import os
from io import FileIO

import pytest

from jaxrun.agent.stdin_broadcast import StdinBroadcast
from jaxrun.channel.event_loop import EventLoop

MIB = 2**20


class Ranks:
    """Two ranks that read from pipes what is written to `source`, this process's standard input."""

    def __init__(self, source, to_ranks, from_ranks):
        self.source, self.to_ranks, self.from_ranks = source, to_ranks, from_ranks
        self.started = True
        self.loop = EventLoop()
        self.broadcast = StdinBroadcast(self.loop, 0, lambda: dict(enumerate(to_ranks)) if self.started else None)
        self.loop.add_poller(self.broadcast.pause_or_resume)

    def write(self, data):
        """Write to the standard input as much as it takes; returns how much that was."""
        for _ in range(3):  # what was read, given and forgotten makes room for more
            self.loop.run_once(0)
        return self.source.write(data) or 0

    def read(self, rank):
        """What has arrived at a rank; None at the end."""
        for _ in range(3):
            self.loop.run_once(0)
        data = self.from_ranks[rank].read()
        return None if data == b"" else data or b""


@pytest.fixture
def ranks():
    def pipe():
        read, write = os.pipe()
        os.set_blocking(read, False)
        os.set_blocking(write, False)
        return FileIO(read), FileIO(write, "wb")

    before = os.dup(0)
    ours, source = pipe()
    os.set_blocking(ours.fileno(), True)
    os.dup2(ours.fileno(), 0)
    ends = [pipe() for _ in range(2)]
    made = Ranks(source, [write for _, write in ends], [read for read, _ in ends])
    yield made
    made.broadcast.close()
    made.loop.close()
    os.dup2(before, 0)
    os.close(before)
    for file in (ours, source, *made.to_ranks, *made.from_ranks):
        file.close()


def test_every_rank_reads_everything_and_then_the_end(ranks):
    ranks.write(b"a\n")
    assert [ranks.read(0), ranks.read(1)] == [b"a\n"] * 2
    ranks.write(b"b\n")
    ranks.source.close()
    assert [ranks.read(0), ranks.read(1)] == [b"b\n"] * 2
    assert [ranks.read(0), ranks.read(1)] == [None, None]


def test_nothing_is_read_before_all_ranks_are_started(ranks):
    ranks.started = False
    ranks.write(b"a\n")
    assert ranks.read(0) == b""
    ranks.started = True
    assert [ranks.read(0), ranks.read(1)] == [b"a\n"] * 2


def test_a_rank_that_reads_nothing_stops_the_others_until_it_reads(ranks):
    data = bytes(range(256)) * 256
    written, got = b"", [b"", b""]
    for _ in range(100):
        written += data[: ranks.write(data)]
        got[0] += ranks.read(0)
    assert MIB < len(got[0]) < len(written) < 2 * MIB  # what was accepted and what is on its way are bounded
    for _ in range(100):
        got = [read + (ranks.read(rank) or b"") for rank, read in enumerate(got)]
    assert got == [written, written]


@pytest.mark.parametrize("how", ["closes its standard input", "has ended"])
def test_a_rank_that_reads_no_more_stops_nobody(ranks, how):
    data = b"x" * 65536
    if how == "has ended":  # while what it has started holds the pipe
        ranks.write(data)
        ranks.broadcast.drop(1)
        ranks.broadcast.drop(1)
    else:
        ranks.from_ranks[1].close()
    written = got = 0
    for _ in range(100):
        written += ranks.write(data)
        got += len(ranks.read(0))
    assert written > 3 * MIB
    assert got >= written
    assert ranks.to_ranks[1].closed


def test_the_input_is_left_alone_once_no_rank_reads_it(ranks):
    ranks.read(0)
    for end in ranks.from_ranks:
        end.close()
    ranks.write(b"a\n")
    ranks.loop.run_once(0)
    assert not ranks.loop.has_reader(0)
    assert os.read(0, 10) == b"a\n"


def test_a_full_pipe_is_ended_once_it_has_taken_the_rest(ranks):
    data = b"x" * 65536
    written = sum(ranks.write(data) for _ in range(4))
    ranks.source.close()
    for rank in range(2):
        pieces = [ranks.read(rank) for _ in range(20)]
        assert pieces[-1] is None
        assert sum(map(len, filter(None, pieces))) == written
