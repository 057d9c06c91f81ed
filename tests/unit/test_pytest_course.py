"""What happens in a test, step by step, and what is to be done about it."""

import pytest

from jaxrun.contract.testing import (
    Asks,
    Debug,
    Failing,
    Fault,
    Finished,
    Forsaken,
    Gather,
    Gathered,
    Phase,
    Says,
    Warned,
)
from jaxrun.pytest_plugin.course import Course
from jaxrun.pytest_plugin.orders import Inflict, Read, Record, Show, Tell

CALL = Phase({"when": "call", "outcome": "passed"})
FAILED = Phase({"when": "call", "outcome": "failed"})
SKIPPED = Phase({"when": "call", "outcome": "skipped"})


def feed(course, *said):
    """What each of (rank, message) has the course order; a message of None is a connection that ends."""
    orders = []
    for now, (rank, message) in enumerate(said):
        orders += course.gone(rank, now) if message is None else course.said(rank, message, now)
    return orders


def test_a_test_is_over_when_all_ranks_have_finished_or_gone():
    course = Course(3)
    feed(course, (0, CALL), (0, Finished({})), (2, None))
    assert (course.over, course.missing) == (False, (1,))
    feed(course, (1, Finished({})))
    assert (course.over, course.missing) == (True, ())


def test_the_first_failure_is_remembered_with_its_time():
    course = Course(3)
    feed(course, (0, CALL), (1, FAILED), (1, FAILED), (2, None))
    assert course.failed == 1
    assert [rank.failed for rank in course.ranks.values()] == [None, 1, None]
    assert course.ranks[2].gone == 3


# ---- meetings


def test_a_meeting_waits_for_all_and_gives_each_what_all_brought():
    course = Course(2)
    assert feed(course, (1, Gather("barrier", b"one"))) == []
    assert feed(course, (0, Gather("barrier", b"zero"))) == [Tell(Gathered((b"zero", b"one")), (0, 1))]
    assert feed(course, (0, Gather("barrier", b"again"))) == []


def test_a_broadcast_gives_what_its_root_brought():
    course = Course(2)
    orders = feed(course, (0, Gather("broadcast", b"zero", 1)), (1, Gather("broadcast", b"one", 1)))
    assert orders == [Tell(Gathered((b"one",)), (0, 1))]


@pytest.mark.parametrize(
    ("before", "why"),
    [
        ([(1, Finished({}))], "rank 1 has finished its test"),
        ([(1, FAILED), (1, Finished({}))], "rank 1 has failed"),
        ([(1, SKIPPED), (1, Finished({}))], "rank 1 has skipped"),
        ([(1, None)], "rank 1 is gone"),
    ],
)
@pytest.mark.parametrize("late", [False, True], ids=["then they come", "they have come"])
def test_who_waits_for_a_rank_that_will_not_come_is_told_why(before, why, late):
    course = Course(3)
    comes = [(0, Gather("barrier", b""))]
    orders = feed(course, *(comes + before if late else before + comes))
    assert orders == [Tell(Forsaken(why), (0,))]


def test_all_that_are_gone_are_named():
    course = Course(3)
    orders = feed(course, (1, None), (2, None), (0, Gather("barrier", b"")))
    assert orders == [Tell(Forsaken("ranks 1-2 are gone"), (0,))]


def test_a_rank_that_has_failed_but_takes_down_its_fixtures_may_still_come():
    course = Course(2)
    assert feed(course, (0, Gather("end", b"")), (1, FAILED)) == []
    assert feed(course, (1, Gather("end", b""))) == [Tell(Gathered((b"", b"")), (0, 1))]


def test_ranks_that_wait_in_different_places_are_told_so():
    course = Course(3)
    orders = feed(course, (0, Gather("a", b"")), (1, Gather("b", b"")), (2, Gather("a", b"")))
    assert orders == [Tell(Forsaken("ranks 0, 2 are at a, rank 1 is at b"), (0, 1, 2))]


# ---- faults and warnings


def test_each_fault_and_each_warning_counts_once_whoever_says_it():
    course = Course(2)
    kill, pause = Fault("kill", 1), Fault("pause", 1)
    careful = Warned("UserWarning", "careful", "f.py", 1, "runtest", "t", None)
    orders = feed(course, (0, kill), (1, kill), (0, pause), (0, careful), (1, careful))
    assert orders == [Inflict(kill), Inflict(pause), Record(careful)]


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
    course = Course(3)
    feed(course, *((rank, Finished(made)) for rank, made in enumerate(calls)))
    assert course.in_step is expected


@pytest.mark.parametrize(
    ("finished", "expected"),
    [
        ([Finished({"0-1": 3}, {"0-1": 5}), Finished({"0-1": 3}, {"0-1": 5})], False),
        ([Finished({"0-1": 3}, {"0-1": 5}), Finished({"0-1": 3}, {"0-1": 6})], True),
        ([Finished({"0-1": 3}, {"0-1": 5}), Finished({"0-1": 4}, {"0-1": 6})], True),
        ([Finished({"0-1": 3}, {}), Finished({"0-1": 3}, {"0-1": 6})], False),
        ([Finished({"0-1": 3}, {}), Finished({"0-1": 4}, {})], True),
        ([Finished({"0": 3}, {"0": 5}), Finished({"1": 4}, {"1": 6})], False),
        ([Finished({"0-1": 3}, {"0-1": 5}), FAILED, Finished({"0-1": 3}, {"0-1": 6})], False),
        ([Finished({"0-1": 3}, {"0-1": 5}), None], False),
        ([Finished({"0-1": 3}, {"0-1": 5}), CALL], False),
    ],
)
def test_ranks_that_have_ended_well_after_other_calls_are_doubted(finished, expected):
    course = Course(2)
    feed(course, (0, finished[0]), *((1, said) for said in finished[1:]))
    assert course.is_doubtful is expected


# ---- debuggers


@pytest.mark.parametrize(("debug", "granted"), [(None, []), (-1, [1]), (2, [2]), (0, [])])
def test_one_rank_is_debugged_the_first_or_the_one_that_was_named(debug, granted):
    course = Course(3, debug)
    orders = []
    for rank in (1, 2):
        orders += feed(course, (rank, Failing("boo")), (rank, FAILED))
    answers = {order.ranks[0]: order.message.yes for order in orders if isinstance(order, Tell)}
    assert [rank for rank, yes in answers.items() if yes] == granted
    assert set(answers) == {1, 2}
    assert [order.rank for order in orders if isinstance(order, Show)] == granted


def test_the_debugger_of_another_rank_waits_until_the_first_is_left():
    course = Course(2)
    assert feed(course, (0, Says("(Pdb) ")), (0, Asks())) == [Show(0, "(Pdb) "), Read(0)]
    assert feed(course, (1, Says("> there")), (1, Asks())) == []
    assert course.debugging == 0
    assert feed(course, (0, CALL)) == [Show(1, "> there"), Read(1)]
    assert course.debugging == 1
    assert feed(course, (1, None)) == []
    assert course.debugging is None


def test_a_failing_rank_hears_of_its_debugger_only_when_it_has_its_turn():
    course = Course(2, debug=-1)
    assert feed(course, (0, Failing("a"))) == [Show(0, "a\n"), Tell(Debug(True), (0,))]
    assert feed(course, (1, Failing("b"))) == []
    assert feed(course, (0, Finished({}))) == [Tell(Debug(False), (1,))]
