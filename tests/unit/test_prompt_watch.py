"""When a rank with the standard input may be at a prompt."""

import pytest
from simulation import Clock

from jaxrun.node.agent.prompt_watch import PROMPT_DELAY_S, PromptWatch


class Watched:
    """A PromptWatch, with a clock and a rank that the test controls; `said_at` has the times at which it says so."""

    def __init__(self):
        self.clock = Clock()
        self.at_work = False
        self.looks = 0
        self.said_at = []
        self.watch = PromptWatch(self._look, self.clock)

    def _look(self):
        self.looks += 1
        return self.at_work

    def write(self, data, stream="out"):
        self.watch.note_output(stream, data)

    def run(self, seconds):
        until = self.clock.now + seconds
        while (at := self.watch.deadline) is not None and at <= until:
            self.clock.now = at
            if self.watch.poll():
                self.said_at.append(at)
        self.clock.now = until


@pytest.fixture
def watched():
    return Watched()


def test_a_rank_that_waits_behind_an_unfinished_line_may_be_at_a_prompt_which_is_said_once(watched):
    began = watched.clock.now
    watched.write(b"hello\nname? ")
    watched.run(60)
    assert watched.said_at == [pytest.approx(began + PROMPT_DELAY_S)] and watched.looks == 1
    watched.write(b"Bob\nage? ", "out")
    watched.run(60)
    assert len(watched.said_at) == 2


@pytest.mark.parametrize("pieces", [[b"loss ", b"3.25\n"], [b"one\n", b"two\n"], [b"loss 3.25", b"\n"]])
def test_nobody_looks_at_a_rank_that_writes_whole_lines_in_time(watched, pieces):
    for piece in pieces:
        watched.write(piece)
        watched.run(PROMPT_DELAY_S * 0.9)
    watched.run(60)
    assert (watched.looks, watched.said_at) == (0, [])


def test_a_rank_that_computes_the_rest_of_its_line_is_looked_at_again_and_not_for_ever(watched):
    watched.at_work = True
    watched.write(b"loss ")
    watched.run(1.0)
    watched.at_work = False
    watched.run(1.0)
    assert len(watched.said_at) == 1
    watched.at_work = True
    watched.write(b"3.25\naccuracy ")
    watched.run(3600)
    assert len(watched.said_at) == 1 and watched.looks < 20 and watched.watch.deadline is None


def test_a_whole_line_on_one_stream_does_not_end_the_line_on_the_other(watched):
    watched.write(b"name? ", "err")
    watched.write(b"log\n", "out")
    watched.run(1.0)
    assert len(watched.said_at) == 1
