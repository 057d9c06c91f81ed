"""Which calls come next, from the last ones: those to be profiled, and the moment before that of a late rank."""

import pytest
from timings import SITES

from jaxrun.analysis.lockstep.call_aim import next_moment, was_at
from jaxrun.analysis.lockstep.profile_plan import ProfiledCalls, calls_per_step, plan_profile
from jaxrun.protocol.flight import CallTiming, DispatchedCall, Flight, PendingCall
from jaxrun.protocol.flight_file import EVERY_CALL


def flight(made, *, group="0-3", per_second=10.0, pattern=(1,), pending=None, **more):
    first = max(1, made - 15)
    calls = tuple(
        DispatchedCall(n / per_second, group, n, n, pattern[n % len(pattern)], 7) for n in range(first, made + 1)
    )
    return Flight(EVERY_CALL, calls=calls, call_counts={group: made, **more}, pending=pending)


def test_all_ranks_profile_the_same_calls_once_the_order_has_had_its_time():
    flights = {0: flight(100), 1: flight(103), 2: flight(99)}
    assert plan_profile(flights, range(3), 5, 1.0) == (ProfiledCalls("0-3", 114, 118, (0, 1, 2)),)
    assert plan_profile(flights, range(3), 5, 4.0) == (ProfiledCalls("0-3", 144, 148, (0, 1, 2)),)


def test_ranks_whose_steps_are_slow_do_not_wait_for_many_of_them():
    (slow,) = plan_profile({0: flight(100, per_second=0.01)}, (0,), 1, 1.0)
    assert (slow.first, slow.last) == (103, 103)


def test_a_rank_that_has_entered_a_call_counts_as_there():
    entered = PendingCall("0-3", 101, 1, 7, 10.1)
    (planned,) = plan_profile({0: flight(100), 1: flight(100, pending=entered)}, (0, 1), 1, 0.0)
    assert planned.first == 104


def test_a_step_has_as_many_calls_as_it_takes_until_they_repeat_themselves():
    (planned,) = plan_profile({0: flight(100, pattern=(1, 1, 2))}, (0,), 4, 0.0)
    assert planned.last - planned.first + 1 == 12


@pytest.mark.parametrize(
    ("calls", "period"),
    [("", 1), ("a", 1), ("aa", 1), ("ab", 1), ("abab", 2), ("babab", 2), ("aabaab", 3), ("aaaab", 1), ("xabab", 1)],
)
def test_how_many_calls_a_step_has(calls, period):
    assert calls_per_step([(ord(call), 0) for call in calls]) == period


def test_each_rank_is_profiled_by_its_largest_group():
    flights = {0: flight(50, group="0-1", **{"0-3": 0}), 1: flight(50, group="0-1"), 2: flight(9, group="2-3")}
    flights[3] = flight(9, group="2-3", **{"3,7": 2})
    groups = [(part.group, part.ranks) for part in plan_profile(flights, range(4), 1, 1.0)]
    assert groups == [("0-1", (0, 1)), ("2-3", (2, 3))]


@pytest.mark.parametrize("other", [Flight(), Flight(EVERY_CALL), Flight(EVERY_CALL, call_counts={"0-3": 0})])
def test_nothing_is_planned_before_all_have_made_a_call(other):
    assert plan_profile({0: flight(5), 1: other}, (0, 1), 5, 1.0) == ()
    assert plan_profile({0: flight(5)}, (0, 1), 5, 1.0) == ()


# ---- the moment before the next call


def timed(*entered, in_call_s=0.01, site=7, now_in=0.0):
    calls = (CallTiming("0-1", number, at, at + in_call_s, site) for number, at in enumerate(entered, 1))
    return Flight(timings=tuple(calls), sites=SITES, entered=now_in)


@pytest.mark.parametrize(("now", "moment"), [(10.3, 10.9), (10.89, 10.9), (10.95, 11.9), (25.0, 25.9)])
def test_the_next_call_comes_after_the_usual_time(now, moment):
    assert next_moment(timed(7.0, 8.0, 9.0, 10.0), 7, 0.1, now) == pytest.approx(moment)


def test_of_a_site_that_is_not_known_any_moment_is_as_good():
    assert next_moment(timed(7.0, 8.0), 8, 0.1, 10.3) == 10.3
    assert next_moment(timed(7.0), 7, 0.1, 10.3) == 10.3
    assert next_moment(timed(7.0, 7.0), 7, 0.1, 10.3) == 10.3


@pytest.mark.parametrize(
    ("moment", "is_hit"),
    [
        (8.95, True),
        (8.75, False),  # long before
        (8.005, False),  # in the call before
        (8.5, False),
        (9.5, True),  # and has not come to the next yet
        (6.9, False),  # before all that is known
    ],
)
def test_a_moment_is_right_shortly_before_a_call(moment, is_hit):
    assert was_at(timed(7.0, 8.0, 9.0), 7, 0.1, moment) is is_hit


def test_a_rank_that_is_in_a_call_is_not_on_its_way():
    assert not was_at(timed(7.0, 8.0, now_in=9.0), 7, 0.1, 9.1)
    assert was_at(timed(7.0, 8.0, now_in=9.2), 7, 0.1, 9.1)


def test_another_call_may_come_first():
    calls = (CallTiming("0-1", 1, 7.0, 7.1, 7), CallTiming("0-1", 2, 8.0, 8.1, 8))
    assert not was_at(Flight(timings=calls, sites=SITES), 7, 0.1, 7.95)
