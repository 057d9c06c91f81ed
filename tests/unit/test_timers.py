"""The head's table of timers: what is due and in which order, and which timers stand still or move on."""

import time

import pytest

from jaxrun.controller.head.timers import LASTING, PROGRAM_CLOCKS, Timer, Timers
from jaxrun.job_events.actions import PrintLine


@pytest.fixture
def timers():
    return Timers()


def say(text):
    """An action that says which timer was fired."""
    return lambda now: [PrintLine(f"{text} {now:g}")]


def fired(timers, now):
    return [action.text for action in timers.fire(now)]


def test_a_timer_is_fired_once_when_it_is_due(timers):
    timers.set(Timer.JOB, 10.0, say("job"))
    assert timers.next_at() == timers.at(Timer.JOB) == 10.0
    assert fired(timers, 9.9) == []
    assert fired(timers, 10.5) == ["job 10.5"]
    assert fired(timers, 99.0) == [] and timers.next_at() is None and timers.at(Timer.JOB) is None


def test_the_earliest_is_fired_first_and_at_the_same_time_the_kind_that_stands_first_then_what_was_set_first(timers):
    timers.set(Timer.QUERY, 2.0, say("b"), of=9)
    timers.set(Timer.QUERY, 2.0, say("c"), of=1)
    timers.set(Timer.JOB, 2.0, say("a"))
    timers.set(Timer.DETAILS, 1.0, say("first"))
    assert fired(timers, 5.0) == ["first 5", "a 5", "b 5", "c 5"]


def test_to_set_a_timer_replaces_it_and_advance_only_brings_it_nearer(timers):
    timers.set(Timer.GRACE, 5.0, say("once"))
    timers.set(Timer.GRACE, 9.0, say("again"))
    timers.advance(Timer.GRACE, 12.0, say("later"))
    assert timers.next_at() == 9.0
    timers.advance(Timer.GRACE, 8.0, say("earlier"))
    timers.advance(Timer.KILL, 8.5, say("new"))
    assert fired(timers, 10.0) == ["earlier 10", "new 10"]


def test_what_is_fired_may_set_and_cancel_timers_that_are_due(timers):
    def then(now):
        timers.cancel(Timer.JOB)
        timers.set(Timer.GRACE, now, say("set"))
        return [PrintLine("then")]

    timers.set(Timer.STARTUP, 1.0, then)
    timers.set(Timer.JOB, 1.0, say("cancelled"))
    assert fired(timers, 1.0) == ["then", "set 1"]


def test_timers_of_one_kind_are_distinguished_by_their_subject(timers):
    for number in range(3):
        timers.set(Timer.QUERY, 1.0 + number, say(str(number)), of=number)
    timers.cancel_one(Timer.QUERY, 0)
    assert timers.at(Timer.QUERY) is None and timers.at(Timer.QUERY, of=1) == 2.0
    assert [action.text for action in timers.fire_early(Timer.QUERY, 0.5)] == ["1 0.5", "2 0.5"]
    assert timers.next_at() is None


def test_a_held_timer_stands_still_and_the_others_run(timers):
    timers.set(Timer.JOB, 10.0, say("job"))
    timers.set(Timer.FAULT, 4.0, say("fault"), of=1)
    timers.set(Timer.ALLOCATION_NEAR, 20.0, say("allocation"))
    timers.hold(3.0, *PROGRAM_CLOCKS)
    timers.hold(9.0, *PROGRAM_CLOCKS)
    assert timers.at(Timer.JOB) is None and fired(timers, 100.0) == ["allocation 100"]
    timers.resume(100.0, Timer.STARTUP)
    assert timers.next_at() is None
    timers.resume(100.0, *PROGRAM_CLOCKS)
    assert timers.at(Timer.FAULT, of=1) == 101.0 and timers.at(Timer.JOB) == 107.0
    assert fired(timers, 200.0) == ["fault 200", "job 200"]


def test_a_held_timer_that_is_set_or_cancelled_is_held_no_more(timers):
    for kind in (Timer.JOB, Timer.GROW):
        timers.set(kind, 10.0, say("held"))
    timers.hold(0.0, *PROGRAM_CLOCKS)
    timers.set(Timer.JOB, 5.0, say("set"))
    timers.cancel(Timer.GROW)
    timers.resume(50.0, *PROGRAM_CLOCKS)
    assert fired(timers, 100.0) == ["set 100"]


def test_when_the_job_stood_still_all_timers_move_but_the_end_of_an_allocation(timers):
    for kind in Timer:
        timers.set(kind, 10.0, say(kind.name))
    timers.postpone(100.0)
    assert fired(timers, 109.0) == ["ALLOCATION_NEAR 109"]
    assert len(fired(timers, 110.0)) == len(Timer) - 1


def test_a_phase_ends_with_its_timers(timers):
    for kind in Timer:
        timers.set(kind, 10.0, say(kind.name))
    timers.cancel_phase()
    assert fired(timers, 10.0) == [f"{kind.name} 10" for kind in Timer if kind in LASTING]


def test_timers_that_are_set_and_cancelled_again_and_again_leave_nothing_and_cost_the_same(timers):
    timers.set(Timer.JOB, 1e9, say("job"))
    costs = []
    for _ in range(5):
        begin = time.thread_time()
        for number in range(8192):
            timers.set(Timer.QUERY, 1000.0, say("query"), of=number)
            timers.set(Timer.STALL_CHECK, 1000.0 + number, say("check"))
            timers.cancel_one(Timer.QUERY, number)
            assert timers.next_at() is not None
        costs.append(time.thread_time() - begin)
    assert len(timers._heap) < 100, "what was cancelled is not kept"
    assert min(costs) < 8192 * 100e-6
