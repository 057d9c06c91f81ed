"""The time for which a test is waited for."""

import pytest

from jaxrun.protocol.debugger_messages import DebuggerOutput
from jaxrun.protocol.flight import DispatchedCall, Flight, PendingCall
from jaxrun.protocol.pytest_messages import PhaseReport, RunFinished
from jaxrun.pytest_plugin.rank_results import find_abandoned_rank
from jaxrun.pytest_plugin.run_state import Expiry, RunState, Timeouts

FAILED = PhaseReport({"when": "call", "outcome": "failed"})


@pytest.fixture
def state():
    return RunState(3)


@pytest.fixture
def timeouts():
    return Timeouts(began=100.0, timeout=30.0, grace=2.0)


def send(state, rank, message, now):
    list(state.handle_message(rank, message, now))


def test_at_first_there_is_the_timeout_only(state, timeouts):
    assert timeouts.next_expiry(state) == (130.0, Expiry.TIMEOUT)


def test_after_a_failure_the_others_have_their_grace_within_the_timeout(state, timeouts):
    send(state, 1, FAILED, 105.0)
    assert timeouts.next_expiry(state) == (107.0, Expiry.GRACE)
    late = RunState(3)
    send(late, 1, FAILED, 129.0)
    assert timeouts.next_expiry(late) == (130.0, Expiry.TIMEOUT)


def test_a_death_counts_as_a_failure(state, timeouts):
    list(state.handle_disconnect(2, 110.0))
    assert timeouts.next_expiry(state) == (112.0, Expiry.GRACE)


def test_while_some_ranks_have_finished_the_others_are_checked_less_and_less_often(state, timeouts):
    send(state, 0, RunFinished({}), 101.0)
    checks = []
    while (expiry := timeouts.next_expiry(state))[1] is Expiry.CHECK:
        checks.append(expiry[0])
        timeouts.record_check(expiry[0])
    assert checks == [103.0, 107.0, 115.0]
    assert expiry == (130.0, Expiry.TIMEOUT)


def test_a_failure_after_checks_still_has_its_grace(state, timeouts):
    send(state, 0, RunFinished({}), 101.0)
    timeouts.record_check(103.0)
    send(state, 1, FAILED, 104.0)
    assert timeouts.next_expiry(state) == (106.0, Expiry.GRACE)


def test_a_debugger_stops_all_clocks(state, timeouts):
    send(state, 1, FAILED, 105.0)
    send(state, 1, DebuggerOutput(1, "(Pdb) "), 105.0)
    timeouts.exclude_pause(105.0, 205.0)
    assert timeouts.next_expiry(state) == (207.0, Expiry.GRACE)
    assert timeouts.next_expiry(RunState(3)) == (230.0, Expiry.TIMEOUT)


# ---- abandoned ranks


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
    ids=["made", "entered", "no further", "a group without the finished rank", "nothing recorded", "no flights"],
)
def test_a_rank_in_a_call_that_another_has_finished_without_is_abandoned(state, flights, expected):
    send(state, 0, RunFinished({"0-2": 3}), 1.0)
    abandoned = find_abandoned_rank(state.ranks, flights)
    assert abandoned.startswith(expected) and bool(abandoned) is bool(expected)
