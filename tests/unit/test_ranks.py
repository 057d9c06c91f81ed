"""How ranks are written."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrun.text import format_ranges, format_ranks, format_ranks_on_hosts


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([], ""), ([3], "3"), ([0, 1], "0-1"), ([5, 0, 2, 1, 1], "0-2, 5"), ([7, 5, 3], "3, 5, 7")],
)
def test_runs_are_compacted(ranks, text):
    assert format_ranges(ranks) == text


@given(st.sets(st.integers(0, 40)))
def test_compact_names_exactly_these_ranks(ranks):
    named = set()
    for part in filter(None, format_ranges(ranks).split(", ")):
        first, _, last = part.partition("-")
        named |= set(range(int(first), int(last or first) + 1))
    assert named == ranks


def test_one_rank_is_singular():
    assert format_ranks(iter([4])) == "rank 4"
    assert format_ranks([4, 5]) == "ranks 4-5"


def test_hosts_are_shown_only_where_there_are_several():
    hosts = {0: "h1", 1: "h1", 2: "h2", 3: "h3"}
    assert format_ranks_on_hosts([2], hosts) == "rank 2 (h2)"
    assert format_ranks_on_hosts(iter([3, 0, 1]), hosts) == "ranks 0-1, 3 (h1, h3)"
    assert format_ranks_on_hosts([0, 1], {0: "h1", 1: "h1"}) == "ranks 0-1"
