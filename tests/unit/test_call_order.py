"""What the calls around a divergence show: a set whose order differs, an uneven last batch, a search for a NaN."""

import pytest
from calls_by_hand import flight
from msgspec.structs import replace

from jaxrun.analysis.lockstep.call_order import find_call_order
from jaxrun.analysis.lockstep.divergence import Absence, CallGroup, CallOrder, Divergence
from jaxrun.protocol.flight import PendingCall

LINE = "train.py:9 main"


def order(ours, theirs, number, *, place=LINE, ends=(None, None), start=0):
    """The order at call `number` of two ranks that have called programs of these letters, then wait in `ends`."""
    flights = {}
    for rank, (calls, end) in enumerate(zip((ours, theirs), ends, strict=True)):
        made = flight(*calls, *(end or ""), group="0-1", code="")
        last = made.calls[-1]
        coming = PendingCall("0-1", last.number, last.program, 1, 99.0) if end else None
        flights[rank] = replace(made, calls=made.calls[start : -1 if end else None], pending=coming)
    callers = (
        CallGroup((0,), "jit(f)", place=LINE, recorded_by=0),
        CallGroup((1,), "jit(f)", place=place, recorded_by=1),
    )
    return find_call_order(Divergence("0-1", number, callers), flights)


@pytest.mark.parametrize(
    ("ours", "theirs", "number"),
    [
        ("abcdef", "bcdefa", 1),
        ("abcab", "abcba", 4),
        ("ab", "ba", 1),
        ("aabc", "abac", 2),  # two things of one shape
    ],
)
def test_the_same_calls_in_another_order(ours, theirs, number):
    assert order(ours, theirs, number) is CallOrder.REORDERED


def test_an_order_that_ranks_had_before_and_cannot_continue():
    assert order("abc", "abc", 4, ends=("b", "a")) is CallOrder.REORDERED


@pytest.mark.parametrize(
    ("ours", "theirs", "number"),
    [
        ("aaaab", "aaab", 4),  # a full batch more
        ("aaaabaaaab", "aaaabaaab", 9),  # in the second epoch
        ("aaaab", "aaaac", 5),  # two last batches
        ("aaab", "aaba", 3),  # the next epoch begins
    ],
)
def test_batches_of_which_the_last_one_differs(ours, theirs, number):
    assert order(ours, theirs, number) is CallOrder.BATCHES


@pytest.mark.parametrize(("ours", "theirs", "number"), [("a", "b", 1), ("abc", "abd", 3), ("ab", "ac", 2)])
def test_what_was_never_called_there_before_is_no_last_batch(ours, theirs, number):
    assert order(ours, theirs, number) is CallOrder.NO_BATCHES


def test_calls_that_are_no_longer_known_may_have_been_batches():
    assert order("xxxxabc", "xxxxabd", 7, start=4) is CallOrder.BATCHES


def test_a_rank_that_was_read_on_its_way_into_the_call_may_tell_later():
    assert order("abc", "ab", 3) is CallOrder.UNREAD and order("", "", 1) is CallOrder.UNREAD


def test_other_lines_tell_nothing():
    assert order("ab", "ba", 1, place="train.py:12 main") is CallOrder.UNKNOWN


def test_ranks_that_made_no_call_tell_nothing_and_those_that_are_not_read_may_later():
    absent = CallGroup((1,), absence=Absence(0))
    caller = CallGroup((0,), "jit(f)", place=LINE, recorded_by=0)
    flights = {0: flight("a", group="0-1")}
    assert find_call_order(Divergence("0-1", 1, (caller, absent)), flights) is CallOrder.UNKNOWN
    assert find_call_order(Divergence("0-1", 1, (caller, replace(caller, recorded_by=1))), {}) is CallOrder.UNREAD


@pytest.mark.parametrize(
    ("search", "expected"),
    [
        ((1.5, 2.5), CallOrder.NAN_SEARCH),
        ((1.5, 1e10), CallOrder.NAN_SEARCH),
        ((0.5, 1.5), CallOrder.REORDERED),  # an earlier one, which the program has survived
        ((2.5, 3.5), CallOrder.REORDERED),
    ],
)
def test_a_call_of_a_search_for_a_nan(search, expected):
    made = flight("x", "a", "b", group="0-1")
    flights = {0: replace(made, nan_search=search), 1: flight("x", "b", "a", group="0-1")}
    flights = {
        rank: replace(each, programs={n: p._replace(code="") for n, p in each.programs.items()})
        for rank, each in flights.items()
    }
    callers = tuple(CallGroup((rank,), "jit(f)", place=LINE, recorded_by=rank) for rank in range(2))
    assert find_call_order(Divergence("0-1", 2, callers), flights) is expected
