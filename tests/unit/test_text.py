"""Ranks, seconds and signals as text, and ranks read back."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrun.errors import UsageError
from jaxrun.text import format_ranges, format_ranks, format_ranks_on_hosts, format_seconds, format_signal, parse_ranks


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([], ""), ([3], "3"), ([0, 1], "0-1"), ([5, 0, 2, 1, 1], "0-2, 5"), ([7, 5, 3], "3, 5, 7")],
)
def test_runs_are_compacted(ranks, text):
    assert format_ranges(ranks) == text


def test_ranks_are_named_with_their_hosts_where_there_are_several():
    assert (format_ranks(iter([4])), format_ranks([4, 5])) == ("rank 4", "ranks 4-5")
    hosts = {0: "h1", 1: "h1", 2: "h2", 3: "h3"}
    assert format_ranks_on_hosts([2], hosts) == "rank 2 (h2)"
    assert format_ranks_on_hosts(iter([3, 0, 1]), hosts) == "ranks 0-1, 3 (h1, h3)"
    assert format_ranks_on_hosts([0, 1], {0: "h1", 1: "h1"}) == "ranks 0-1"


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 10**6)), min_size=1))
def test_any_ranges_are_read_as_they_are(spans):
    text = ", ".join(f"{first}-{first + more}" if more else str(first) for first, more in spans)
    assert parse_ranks(text, "--x") == tuple(range(first, first + more + 1) for first, more in spans)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *(
            (text, "--x takes ranks such as 1-3,7")
            for text in ("", "a", "1-", "-1", "1,,2", "1-2-3", "1.5", "٣", "0x1")
        ),
        ("1,7-3", "7-3 runs backwards; write 3-7"),
    ],
)
def test_what_is_not_ranks_is_named(text, message):
    with pytest.raises(UsageError, match=message):
        parse_ranks(text, "--x")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (-1, "0.00 s"),
        (0.0312, "0.03 s"),
        (0.996, "1.0 s"),
        (41.31, "41.3 s"),
        (119.96, "2 min 0 s"),
        (3725, "1 h 2 min"),
    ],
)
def test_seconds_keep_two_or_three_digits(value: float, text: str) -> None:
    assert format_seconds(value) == text


def test_signals_have_names() -> None:
    names = [format_signal(number) for number in (9, 34, 37, 99)]
    assert names == ["SIGKILL (9)", "SIGRTMIN (34)", "SIGRTMIN+3 (37)", "signal 99"]
