"""What happens in a test, step by step, and what is to be done about it."""

import pytest

from jaxrun.protocol.pytest_messages import (
    DebugDecision,
    DebuggerOutput,
    DebuggerReadRequest,
    DebugRequest,
    FaultRequest,
    Gather,
    Gathered,
    PeerLost,
    PhaseReport,
    RecordedWarning,
    RunFinished,
)
from jaxrun.pytest_plugin.actions import ReadDebuggerLine, RecordWarning, SendToRanks, ShowDebuggerText, TriggerFault
from jaxrun.pytest_plugin.run_state import RunState

CALL = PhaseReport({"when": "call", "outcome": "passed"})
FAILED = PhaseReport({"when": "call", "outcome": "failed"})
SKIPPED = PhaseReport({"when": "call", "outcome": "skipped"})


def feed(course, *said):
    """What each of (rank, message) has the course order; a message of None is a connection that ends."""
    orders = []
    for now, (rank, message) in enumerate(said):
        orders += course.gone(rank, now) if message is None else course.said(rank, message, now)
    return orders


def test_a_test_is_over_when_all_ranks_have_finished_or_gone():
    course = RunState(3)
    feed(course, (0, CALL), (0, RunFinished({})), (2, None))
    assert (course.done, course.running) == (False, (1,))
    feed(course, (1, RunFinished({})))
    assert (course.done, course.running) == (True, ())


def test_the_first_failure_is_remembered_with_its_time():
    course = RunState(3)
    feed(course, (0, CALL), (1, FAILED), (1, FAILED), (2, None))
    assert course.first_failure_at == 1
    assert [rank.failed_at for rank in course.ranks.values()] == [None, 1, None]
    assert course.ranks[2].disconnected_at == 3


# ---- meetings


def test_a_meeting_waits_for_all_and_gives_each_what_all_brought():
    course = RunState(2)
    assert feed(course, (1, Gather("barrier", b"one"))) == []
    assert feed(course, (0, Gather("barrier", b"zero"))) == [SendToRanks(Gathered((b"zero", b"one")), (0, 1))]
    assert feed(course, (0, Gather("barrier", b"again"))) == []


def test_a_broadcast_gives_what_its_root_brought():
    course = RunState(2)
    orders = feed(course, (0, Gather("broadcast", b"zero", 1)), (1, Gather("broadcast", b"one", 1)))
    assert orders == [SendToRanks(Gathered((b"one",)), (0, 1))]


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
def test_who_waits_for_a_rank_that_will_not_come_is_told_why(before, why, late):
    course = RunState(3)
    comes = [(0, Gather("barrier", b""))]
    orders = feed(course, *(comes + before if late else before + comes))
    assert orders == [SendToRanks(PeerLost(why), (0,))]


def test_all_that_are_gone_are_named():
    course = RunState(3)
    orders = feed(course, (1, None), (2, None), (0, Gather("barrier", b"")))
    assert orders == [SendToRanks(PeerLost("ranks 1-2 are gone"), (0,))]


def test_a_rank_that_has_failed_but_takes_down_its_fixtures_may_still_come():
    course = RunState(2)
    assert feed(course, (0, Gather("end", b"")), (1, FAILED)) == []
    assert feed(course, (1, Gather("end", b""))) == [SendToRanks(Gathered((b"", b"")), (0, 1))]


def test_ranks_that_wait_in_different_places_are_told_so():
    course = RunState(3)
    orders = feed(course, (0, Gather("a", b"")), (1, Gather("b", b"")), (2, Gather("a", b"")))
    assert orders == [SendToRanks(PeerLost("ranks 0, 2 are at a, rank 1 is at b"), (0, 1, 2))]


# ---- faults and warnings


def test_each_fault_and_each_warning_counts_once_whoever_says_it():
    course = RunState(2)
    kill, pause = FaultRequest("kill", 1), FaultRequest("pause", 1)
    careful = RecordedWarning("UserWarning", "careful", "f.py", 1, "runtest", "t", None)
    orders = feed(course, (0, kill), (1, kill), (0, pause), (0, careful), (1, careful))
    assert orders == [TriggerFault(kill), TriggerFault(pause), RecordWarning(careful)]


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
    course = RunState(3)
    feed(course, *((rank, RunFinished(made)) for rank, made in enumerate(calls)))
    assert course.in_step is expected


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
def test_ranks_that_have_ended_well_after_other_calls_are_doubted(finished, expected):
    course = RunState(2)
    feed(course, (0, finished[0]), *((1, said) for said in finished[1:]))
    assert course.may_be_out_of_step is expected


# ---- debuggers


@pytest.mark.parametrize(("debug", "granted"), [(None, []), (-1, [1]), (2, [2]), (0, [])])
def test_one_rank_is_debugged_the_first_or_the_one_that_was_named(debug, granted):
    course = RunState(3, debug)
    orders = []
    for rank in (1, 2):
        orders += feed(course, (rank, DebugRequest("boo")), (rank, FAILED))
    answers = {order.ranks[0]: order.message.yes for order in orders if isinstance(order, SendToRanks)}
    assert [rank for rank, yes in answers.items() if yes] == granted
    assert set(answers) == {1, 2}
    assert [order.rank for order in orders if isinstance(order, ShowDebuggerText)] == granted


def test_the_debugger_of_another_rank_waits_until_the_first_is_left():
    course = RunState(2)
    assert feed(course, (0, DebuggerOutput("(Pdb) ")), (0, DebuggerReadRequest())) == [
        ShowDebuggerText(0, "(Pdb) "),
        ReadDebuggerLine(0),
    ]
    assert feed(course, (1, DebuggerOutput("> there")), (1, DebuggerReadRequest())) == []
    assert course.debugged_rank == 0
    assert feed(course, (0, CALL)) == [ShowDebuggerText(1, "> there"), ReadDebuggerLine(1)]
    assert course.debugged_rank == 1
    assert feed(course, (1, None)) == []
    assert course.debugged_rank is None


def test_a_failing_rank_hears_of_its_debugger_only_when_it_has_its_turn():
    course = RunState(2, debug=-1)
    assert feed(course, (0, DebugRequest("a"))) == [ShowDebuggerText(0, "a\n"), SendToRanks(DebugDecision(True), (0,))]
    assert feed(course, (1, DebugRequest("b"))) == []
    assert feed(course, (0, RunFinished({}))) == [SendToRanks(DebugDecision(False), (1,))]
