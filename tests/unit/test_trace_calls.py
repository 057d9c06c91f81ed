"""Which rank came last to each call, and how long the others waited for it."""

import pytest

from jaxrun.protocol.flight import DispatchedCall, Flight, PendingCall, ProgramInfo
from jaxrun.protocol.flight_file import EVERY_CALL
from jaxrun.trace.calls import trace_calls

PROGRAMS = {1: ProgramInfo("jit(step)", "k", "c")}
SITES = {7: ("/job/train.py:88 main",)}


def flight(*calls, group="0-2", pending=None, entered=0.0):
    """`calls` are (entered, dispatched), numbered from 1."""
    made = tuple(DispatchedCall(left, group, n, n, 1, 7, begin) for n, (begin, left) in enumerate(calls, 1))
    return Flight(
        EVERY_CALL,
        calls=made,
        call_counts={group: len(made)},
        programs=PROGRAMS,
        sites=SITES,
        pending=pending,
        entered=entered,
    )


def traced(flights, offsets=None, end=100.0):
    calls, awaited = trace_calls(dict(enumerate(flights)), offsets or {}, dict.fromkeys(range(len(flights)), end))
    return [calls[rank] for rank in sorted(calls)], awaited


def test_the_others_wait_in_the_call_until_the_last_has_entered_it():
    (first, second, third), awaited = traced([flight((1.0, 4.5)), flight((4.0, 4.5)), flight((2.0, 4.6))])
    assert [call.waited for (call,) in (first, second, third)] == [3.0, 0.0, 2.0]
    assert [call.last for (call,) in (first, second, third)] == [1, 1, 1]
    assert [call.cost for (call,) in (first, second, third)] == [0.0, 2.5, 0.0]
    assert (first[0].name, first[0].place, first[0].is_over, awaited) == ("jit(step)", "train.py:88 main", True, {})


def test_a_clock_that_is_wrong_is_corrected():
    calls, _ = traced([flight((1.0, 2.0)), flight((101.5, 102.0)), flight((1.0, 2.0))], {1: -100.0})
    assert (calls[1][0].entered, calls[0][0].waited, calls[1][0].cost) == (1.5, 0.5, 0.5)


def test_after_dispatch_a_rank_waits_unless_it_goes_on_to_another_call():
    late = flight((3.0, 3.1), (6.0, 6.1))
    (ahead, waiting, _), _ = traced([flight((1.0, 1.1), (1.2, 1.3)), flight((1.0, 1.1), (3.5, 3.6)), late])
    assert [call.waited for call in ahead] == pytest.approx([0.1, 4.8])
    assert [call.waited for call in waiting] == pytest.approx([2.0, 2.5])


def test_ranks_wait_to_their_end_for_one_that_never_comes():
    pending = PendingCall("0-2", 2, 1, 7, 5.0)
    (one, other, missing), awaited = traced(
        [flight((1.0, 2.0), pending=pending), flight((1.0, 2.0), (6.0, 6.1)), flight((1.0, 2.0))], end=20.0
    )
    assert (one[1].waited, one[1].left, one[1].is_over, one[1].missing) == (15.0, 20.0, False, "rank 2")
    assert (other[1].waited, other[1].left, other[1].is_over, other[1].missing) == (14.0, 6.1, True, "rank 2")
    assert len(missing) == 1 and awaited == {2: 5.0}


def test_a_rank_that_has_come_to_its_next_call_is_in_it():
    (one, _, _), awaited = traced([flight((1.0, 2.0), entered=3.0), flight((1.0, 2.0)), flight((1.0, 2.0))], end=9.0)
    assert (one[1].number, one[1].entered, one[1].left, one[1].is_over) == (2, 3.0, 9.0, False)
    assert awaited == {1: 3.0, 2: 3.0}


def test_of_calls_that_some_ranks_do_not_hold_any_more_nothing_is_said():
    forgetful = flight((1.0, 2.0), (3.0, 4.0))
    held = Flight(EVERY_CALL, calls=forgetful.calls[1:], call_counts={"0-2": 2})
    (one, _, _), awaited = traced([flight((1.0, 2.0), (3.0, 4.0)), flight((1.0, 2.0), (3.5, 4.0)), held])
    assert [call.last for call in one] == [-1, 1] and one[0].waited == 0.0 and awaited == {}


def test_without_the_times_of_entry_nobody_waits():
    calls, awaited = traced([flight((0.0, 2.0)), flight((0.0, 2.0)), flight((0.0, 2.0))])
    assert [(call.entered, call.left, call.waited, call.last) for (call,) in calls] == [(0.0, 2.0, 0.0, -1)] * 3
    assert awaited == {}


def test_groups_of_ranks_wait_for_themselves_alone():
    pairs = [flight((1.0, 2.0), group="0-1"), flight((1.5, 2.0), group="0-1"), flight((9.0, 9.5), group="2")]
    calls, _ = traced(pairs)
    assert [call.last for (call,) in calls] == [1, 1, -1]
