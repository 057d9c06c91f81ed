"""Until when a test is waited for."""

import pytest

from jaxrun.lockstep.flight import DispatchedCall, Flight, PendingCall
from jaxrun.protocol.pytest_messages import DebuggerOutput, PhaseReport, RunFinished
from jaxrun.pytest_plugin.run_state import RunState
from jaxrun.pytest_plugin.timeouts import Expiry, Timeouts

FAILED = PhaseReport({"when": "call", "outcome": "failed"})


@pytest.fixture
def course():
    return RunState(3)


@pytest.fixture
def patience():
    return Timeouts(began=100.0, timeout=30.0, grace=2.0)


def say(course, rank, message, now):
    return list(course.said(rank, message, now))


def test_at_first_there_is_the_limit_only(course, patience):
    assert patience.due(course) == (130.0, Expiry.TIMEOUT)


def test_after_a_failure_the_others_have_their_grace_within_the_limit(course, patience):
    say(course, 1, FAILED, 105.0)
    assert patience.due(course) == (107.0, Expiry.GRACE)
    late = RunState(3)
    say(late, 1, FAILED, 129.0)
    assert patience.due(late) == (130.0, Expiry.TIMEOUT)


def test_a_death_counts_as_a_failure(course, patience):
    list(course.gone(2, 110.0))
    assert patience.due(course) == (112.0, Expiry.GRACE)


def test_while_some_have_finished_the_others_are_looked_at_less_and_less_often(course, patience):
    say(course, 0, RunFinished({}), 101.0)
    looks = []
    while (due := patience.due(course))[1] is Expiry.CHECK:
        looks.append(due[0])
        patience.looked(due[0])
    assert looks == [103.0, 107.0, 115.0]
    assert due == (130.0, Expiry.TIMEOUT)


def test_a_failure_after_looks_still_has_its_grace(course, patience):
    say(course, 0, RunFinished({}), 101.0)
    patience.looked(103.0)
    say(course, 1, FAILED, 104.0)
    assert patience.due(course) == (106.0, Expiry.GRACE)


def test_a_debugger_stops_all_clocks(course, patience):
    say(course, 1, FAILED, 105.0)
    say(course, 1, DebuggerOutput("(Pdb) "), 105.0)
    patience.paused(105.0, 205.0)
    assert patience.due(course) == (207.0, Expiry.GRACE)
    assert patience.due(RunState(3)) == (230.0, Expiry.TIMEOUT)


# ---- who waits in vain


def made(group, number):
    return Flight(calls=(DispatchedCall(1.0, group, number, 0, 0, 0),), call_counts={group: number})


def entered(group, number):
    return Flight(pending=PendingCall(group, number, 0, 0, 1.0), call_counts={group: number - 1})


@pytest.mark.parametrize(
    ("flights", "expected"),
    [
        (
            {1: made("0-2", 4)},
            "rank 1 is in cross-process call #4 of ranks 0-2, and rank 0 finished the test without it",
        ),
        ({2: entered("0-2", 4)}, "rank 2 is in cross-process call #4 of ranks 0-2"),
        ({1: made("0-2", 3), 2: made("0-2", 3)}, ""),
        ({1: made("1-2", 9), 2: made("1-2", 8)}, ""),
        ({1: Flight()}, ""),
        ({}, ""),
    ],
    ids=["made", "entered", "no further", "a group without who finished", "nothing recorded", "no flights"],
)
def test_who_makes_a_call_that_a_rank_has_finished_without_waits_in_vain(course, flights, expected):
    say(course, 0, RunFinished({"0-2": 3}), 1.0)
    deserted = course.deserted(flights)
    assert deserted.startswith(expected) and bool(deserted) is bool(expected)
