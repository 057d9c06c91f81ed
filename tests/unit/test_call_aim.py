"""The moment before a rank's next call, from its last ones."""

import pytest
from timings import SITES

from jaxrun.lockstep.call_aim import next_moment, was_at
from jaxrun.protocol.flight import CallTiming, Flight


def flight(*entered, in_call_s=0.01, site=7, now_in=0.0):
    calls = (CallTiming("0-1", number, at, at + in_call_s, site) for number, at in enumerate(entered, 1))
    return Flight(timings=tuple(calls), sites=SITES, entered=now_in)


@pytest.mark.parametrize(
    ("now", "moment"),
    [(10.3, 10.9), (10.89, 10.9), (10.95, 11.9), (25.0, 25.9)],
)
def test_the_next_call_comes_after_the_usual_time(now, moment):
    assert next_moment(flight(7.0, 8.0, 9.0, 10.0), 7, 0.1, now) == pytest.approx(moment)


def test_of_a_site_that_is_not_known_any_moment_is_as_good():
    assert next_moment(flight(7.0, 8.0), 8, 0.1, 10.3) == 10.3
    assert next_moment(flight(7.0), 7, 0.1, 10.3) == 10.3
    assert next_moment(flight(7.0, 7.0), 7, 0.1, 10.3) == 10.3


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
    assert was_at(flight(7.0, 8.0, 9.0), 7, 0.1, moment) is is_hit


def test_a_rank_that_is_in_a_call_is_not_on_its_way():
    assert not was_at(flight(7.0, 8.0, now_in=9.0), 7, 0.1, 9.1)
    assert was_at(flight(7.0, 8.0, now_in=9.2), 7, 0.1, 9.1)


def test_another_call_may_come_first():
    calls = (CallTiming("0-1", 1, 7.0, 7.1, 7), CallTiming("0-1", 2, 8.0, 8.1, 8))
    assert not was_at(Flight(timings=calls, sites=SITES), 7, 0.1, 7.95)
