"""The state of a test on its ranks: messages in, actions out; and the time for which it is waited for."""

import pytest

from jaxrun.frontends.pytest_plugin.rank_results import find_abandoned_rank, in_step, may_be_out_of_step
from jaxrun.frontends.pytest_plugin.run_state import (
    Expiry,
    ReadDebuggerLine,
    RecordWarning,
    RunState,
    SendToRanks,
    ShowDebuggerText,
    Timeouts,
    TriggerFault,
)
from jaxrun.protocol.debugger_messages import DebuggerDecision, DebuggerOutput, DebuggerReadRequest
from jaxrun.protocol.flight import DispatchedCall, Flight, PendingCall
from jaxrun.protocol.pytest_messages import (
    DebugRequest,
    FaultRequest,
    Gather,
    Gathered,
    PeerLost,
    PhaseReport,
    RecordedWarning,
    RunFinished,
)

CALL = PhaseReport({"when": "call", "outcome": "passed"})
FAILED = PhaseReport({"when": "call", "outcome": "failed"})
SKIPPED = PhaseReport({"when": "call", "outcome": "skipped"})


def feed(state, *messages):
    """The actions after each of (rank, message); a message of None is a disconnect."""
    actions = []
    for now, (rank, message) in enumerate(messages):
        actions += state.handle_disconnect(rank, now) if message is None else state.handle_message(rank, message, now)
    return actions


def test_a_test_is_done_when_all_ranks_have_finished_or_disconnected():
    state = RunState(3)
    feed(state, (0, CALL), (0, RunFinished({})), (2, None))
    assert (state.done, state.running) == (False, (1,))
    feed(state, (1, RunFinished({})))
    assert (state.done, state.running) == (True, ())


def test_the_first_failure_is_remembered_with_its_time():
    state = RunState(3)
    feed(state, (0, CALL), (1, FAILED), (1, FAILED), (2, None))
    assert state.first_failure_at == 1
    assert [rank.failed_at for rank in state.ranks.values()] == [None, 1, None]
    assert state.ranks[2].disconnected_at == 3


# ---- gathers


def test_a_gather_waits_for_all_ranks_and_answers_each_with_the_values_of_all():
    state = RunState(2)
    assert feed(state, (1, Gather("barrier", b"one"))) == []
    assert feed(state, (0, Gather("barrier", b"zero"))) == [SendToRanks(Gathered((b"zero", b"one")), (0, 1))]
    assert feed(state, (0, Gather("barrier", b"again"))) == []


def test_a_broadcast_answers_with_the_roots_value():
    state = RunState(2)
    actions = feed(state, (0, Gather("broadcast", b"zero", 1)), (1, Gather("broadcast", b"one", 1)))
    assert actions == [SendToRanks(Gathered((b"one",)), (0, 1))]


@pytest.mark.parametrize(
    ("before", "why"),
    [
        ([(1, RunFinished({}))], "rank 1 has finished its test"),
        ([(1, FAILED), (1, RunFinished({}))], "rank 1 has failed"),
        ([(1, SKIPPED), (1, RunFinished({}))], "rank 1 has skipped"),
        ([(1, None)], "rank 1 is gone"),
    ],
)
@pytest.mark.parametrize("late", [False, True], ids=["then they come", "they have come"])
def test_a_rank_that_waits_for_one_that_will_not_come_is_answered_with_the_reason(before, why, late):
    state = RunState(3)
    comes = [(0, Gather("barrier", b""))]
    actions = feed(state, *(comes + before if late else before + comes))
    assert actions == [SendToRanks(PeerLost(why), (0,))]


def test_all_lost_ranks_are_named():
    state = RunState(3)
    actions = feed(state, (1, None), (2, None), (0, Gather("barrier", b"")))
    assert actions == [SendToRanks(PeerLost("ranks 1-2 are gone"), (0,))]


def test_a_rank_that_has_failed_but_takes_down_its_fixtures_may_still_come():
    state = RunState(2)
    assert feed(state, (0, Gather("end", b"")), (1, FAILED)) == []
    assert feed(state, (1, Gather("end", b""))) == [SendToRanks(Gathered((b"", b"")), (0, 1))]


def test_ranks_that_wait_in_different_places_are_answered_with_these_places():
    state = RunState(3)
    actions = feed(state, (0, Gather("a", b"")), (1, Gather("b", b"")), (2, Gather("a", b"")))
    assert actions == [SendToRanks(PeerLost("ranks 0, 2 are at a, rank 1 is at b"), (0, 1, 2))]


# ---- faults and warnings


def test_equal_faults_and_equal_warnings_of_several_ranks_count_once():
    state = RunState(2)
    kill, pause = FaultRequest("kill", 1), FaultRequest("pause", 1)
    careful = RecordedWarning("UserWarning", "careful", "f.py", 1, "runtest", "t", None)
    actions = feed(state, (0, kill), (1, kill), (0, pause), (0, careful), (1, careful))
    assert actions == [TriggerFault(kill), TriggerFault(pause), RecordWarning(careful)]


# ---- in step


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        ([{}, {}, {}], True),
        ([{"0-2": 3}, {"0-2": 3}, {"0-2": 3}], True),
        ([{"0-2": 3}, {"0-2": 2}, {"0-2": 3}], False),
        ([{"0-2": 1}, {"0-2": 1}, {}], False),
        ([{"0-1": 2}, {"0-1": 2}, {}], True),
        ([{"0-1": 2}, {}, {}], False),
    ],
)
def test_ranks_are_in_step_if_each_group_has_made_as_many_calls(calls, expected):
    state = RunState(3)
    feed(state, *((rank, RunFinished(made)) for rank, made in enumerate(calls)))
    assert in_step(state.ranks) is expected


@pytest.mark.parametrize(
    ("finished", "expected"),
    [
        ([RunFinished({"0-1": 3}, {"0-1": 5}), RunFinished({"0-1": 3}, {"0-1": 5})], False),
        ([RunFinished({"0-1": 3}, {"0-1": 5}), RunFinished({"0-1": 3}, {"0-1": 6})], True),
        ([RunFinished({"0-1": 3}, {"0-1": 5}), RunFinished({"0-1": 4}, {"0-1": 6})], True),
        ([RunFinished({"0-1": 3}, {}), RunFinished({"0-1": 3}, {"0-1": 6})], False),
        ([RunFinished({"0-1": 3}, {}), RunFinished({"0-1": 4}, {})], True),
        ([RunFinished({"0": 3}, {"0": 5}), RunFinished({"1": 4}, {"1": 6})], False),
        ([RunFinished({"0-1": 3}, {"0-1": 5}), FAILED, RunFinished({"0-1": 3}, {"0-1": 6})], False),
        ([RunFinished({"0-1": 3}, {"0-1": 5}), None], False),
        ([RunFinished({"0-1": 3}, {"0-1": 5}), CALL], False),
    ],
)
def test_ranks_that_finished_after_different_calls_may_be_out_of_step(finished, expected):
    state = RunState(2)
    feed(state, (0, finished[0]), *((1, message) for message in finished[1:]))
    assert may_be_out_of_step(state.ranks) is expected


# ---- debuggers


@pytest.mark.parametrize(("debug", "granted"), [(False, []), (True, [1])])
def test_the_first_rank_that_fails_is_debugged(debug, granted):
    state = RunState(3, debug)
    actions = []
    for rank in (1, 2):
        actions += feed(state, (rank, DebugRequest("boo")), (rank, FAILED))
    answers = {action.ranks[0]: action.message.granted for action in actions if isinstance(action, SendToRanks)}
    assert [rank for rank, answer in answers.items() if answer] == granted
    assert set(answers) == {1, 2}
    assert [action.rank for action in actions if isinstance(action, ShowDebuggerText)] == granted


def test_the_debugger_of_another_rank_waits_until_the_first_is_left():
    state = RunState(2)
    assert feed(state, (0, DebuggerOutput(0, "(Pdb) ")), (0, DebuggerReadRequest(0))) == [
        ShowDebuggerText(0, "(Pdb) "),
        ReadDebuggerLine(0),
    ]
    assert feed(state, (1, DebuggerOutput(1, "> there")), (1, DebuggerReadRequest(1))) == []
    assert state.debugged_rank == 0
    assert feed(state, (0, CALL)) == [ShowDebuggerText(1, "> there"), ReadDebuggerLine(1)]
    assert state.debugged_rank == 1
    assert feed(state, (1, None)) == []
    assert state.debugged_rank is None


def test_a_failing_rank_is_answered_only_when_the_debugger_is_free():
    state = RunState(2, debug=True)
    assert feed(state, (0, DebugRequest("a"))) == [
        ShowDebuggerText(0, "a\n"),
        SendToRanks(DebuggerDecision(True), (0,)),
    ]
    assert feed(state, (1, DebugRequest("b"))) == []
    assert feed(state, (0, RunFinished({}))) == [SendToRanks(DebuggerDecision(False), (1,))]


# ---- for how long it is waited for


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
