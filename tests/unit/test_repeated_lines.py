"""Lines that several ranks print at about the same time are shown once, in the order of each rank, and none is lost."""

from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from jaxrun.records.output.repeated_lines import HOLD_S, RepeatedLines, merge_lines

STREAMS = ("out", "err")
LINES = st.lists(st.tuples(st.sampled_from(STREAMS), st.sampled_from([b"a\n", b"b\n", b"c\n"])), max_size=8)


@given(st.dictionaries(st.integers(0, 4), LINES, max_size=4))
def test_each_rank_s_lines_are_all_shown_and_in_their_order(printed):
    merged = merge_lines({rank: deque(lines) for rank, lines in sorted(printed.items())})
    for rank, lines in printed.items():
        shown = [(stream, line) for ranks, (stream, text) in merged if rank in ranks for line in text.splitlines(True)]
        assert shown == lines


def test_a_line_of_all_ranks_is_shown_once_even_if_one_prints_more_before_it():
    held = RepeatedLines()
    for rank in range(8):
        own = b"shard 7 is empty\n" if rank == 7 else b""
        assert held.hold(rank, "err", own + b"loading\n", 10.0 + rank / 100)
    assert held.due == 10.0 + HOLD_S
    assert held.release() == [
        ([7], ("err", b"shard 7 is empty\n")),
        ([*range(8)], ("err", b"loading\n")),
    ]
    assert (held.due, held.release()) == (None, [])


def test_lines_in_another_order_on_each_rank_keep_their_orders():
    a, b = ("err", b"a\n"), ("err", b"b\n")
    assert merge_lines({0: deque([a, b]), 1: deque([b, a])}) == [([0], a), ([0, 1], b), ([1], a)]


def test_lines_of_both_streams_stay_in_the_order_of_each_rank():
    held = RepeatedLines()
    for rank in range(2):
        assert held.hold(rank, "out", b"step 1\n", 10.0) and held.hold(rank, "err", b"warning\n", 10.0)
        assert held.hold(rank, "out", b"step 2\n", 10.1)
    both = [0, 1]
    assert held.release() == [
        (both, ("out", b"step 1\n")),
        (both, ("err", b"warning\n")),
        (both, ("out", b"step 2\n")),
    ]


def test_a_flood_is_not_held():
    held = RepeatedLines()
    assert held.hold(0, "err", b"x" * 4000 + b"\n", 1.0)
    assert not held.hold(0, "err", b"x" * 4000 + b"\n", 1.1)
    assert not held.hold(0, "err", b"short\n", 1.5)
    assert held.hold(1, "err", b"short\n", 1.5)
    assert held.hold(0, "err", b"short\n", 2.6)
