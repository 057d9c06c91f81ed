"""Functions of jaxrun that all ranks must call: what a rank notes of them, and what is told where one has not."""

import pytest
from deadlock_samples import ENTRY, FUTEX, SYNC, dump
from msgspec.structs import replace

from jaxrun.analysis.diagnosis.doing import StandingOut
from jaxrun.analysis.diagnosis.job_stacks import JobStacks
from jaxrun.analysis.diagnosis.overview import Overview
from jaxrun.analysis.diagnosis.rank_state import Activity, find_rank_state
from jaxrun.analysis.diagnosis.stacks import is_waiting_in_jax, main_stack
from jaxrun.analysis.diagnosis.wait_graph import find_wait_graph
from jaxrun.analysis.lockstep.joint_waits import find_missing_ranks
from jaxrun.analysis.verdict.deadlocks import explain_deadlock
from jaxrun.analysis.verdict.stack_text import find_place
from jaxrun.frontends.pytest_plugin.run_loop import describe_abandoned
from jaxrun.frontends.top.samples import take_samples
from jaxrun.protocol.flight import Flight, JointWait
from jaxrun.protocol.flight_file import GANG_BARRIER, RESTORE, SHOULD_STOP, SNAPSHOT
from jaxrun.protocol.query_messages import RankReply

SITES = {7: ("/job/train.py:9 main", "/job/train.py:20 <module>")}
# The frames of ranks that wait in the joint functions, as they were seen.
WAIT = "SITE/jaxrun_runtime/joint_calls.py 83 wait"
FRAMES = {
    SNAPSHOT: f"{WAIT}\nSITE/jaxrun_runtime/state_snapshots/snapshots.py 60 snapshot",
    RESTORE: f"{WAIT}\nSITE/jaxrun_runtime/state_snapshots/snapshots.py 72 restore",
    SHOULD_STOP: f"PY/threading.py 359 wait\n{WAIT}\nSITE/jaxrun_runtime/stopping.py 49 should_stop",
    GANG_BARRIER: "SITE/jaxrun_runtime/gang/calls.py 165 _receive\nSITE/jaxrun_runtime/gang/calls.py 70 receive\n"
    f"{WAIT}\nSITE/jaxrun_runtime/pytest/rank_gang.py 64 barrier",
}
USER = f"JOB/train.py 9 main\nJOB/train.py 20 <module>\n{ENTRY}"


# ---- what a rank notes


# ---- what is told


def flight(function="", number=0, since=90.0, **calls):
    """A rank that has made so many `calls` of each function, and may wait in one."""
    wait = JointWait(function, number, since, 7) if function else None
    return Flight(sites=SITES, joint_calls=calls, joint_wait=wait)


def in_function(function, number=1):
    return replace(flight(function, number), joint_calls={function: number})


def explain(flights, dumps, finished=()):
    hosts = dict.fromkeys({*flights, *dumps, *finished}, "h1")
    waits = dict.fromkeys(dumps, FUTEX)
    return list(map(str, explain_deadlock(JobStacks(100.0, hosts, dumps, waits, flights, finished))))


def stack(function):
    return dump(f"{FRAMES[function]}\n{USER}")


@pytest.mark.parametrize("function", FRAMES)
def test_a_rank_that_waits_in_a_joint_function_is_known_by_its_stack(function):
    state = find_rank_state(0, stack(function), FUTEX)
    assert (state.activity, state.call, state.place) == (Activity.JOINT_CALL, function, "train.py:9 main")
    assert find_place(main_stack(stack(function))).format() == f"train.py:9 main   in {function}"
    assert main_stack(stack(function)).is_in_jax() and is_waiting_in_jax(stack(function), "do_poll")


def test_the_rank_that_has_not_called_it_is_named_with_what_it_does_instead():
    flights = {0: in_function(SNAPSHOT), 1: flight()}
    told = f"rank 0 waits in {SNAPSHOT} (train.py:9 main) for rank 1, which has not called it: all ranks must"
    barrier = dump(f"{SYNC}\nJOB/train.py 30 step\n{ENTRY}")
    assert explain(flights, {0: stack(SNAPSHOT), 1: barrier}) == [
        f"{told}; rank 1 waits in a barrier (sync_global_devices at train.py:30 step)"
    ]
    queue = dump(f"PY/threading.py 359 wait\nPY/queue.py 202 get\nJOB/train.py 54 step\n{ENTRY}")
    first, second = explain(flights, {0: stack(SNAPSHOT), 1: queue})
    assert first == f"{told}; rank 1 waits for data at train.py:54 step"
    assert second.startswith("rank 1 waits for data (queue.get) at train.py:54 step, and rank 0 waits for it in")
    assert explain(flights, {0: stack(SNAPSHOT)}, finished=(1,)) == [
        f"rank 0 waits in {SNAPSHOT} (train.py:9 main) for rank 1, which has finished without calling it: "
        "all ranks must"
    ]


def test_many_ranks_that_have_not_called_it_are_named_together():
    flights = {rank: in_function(SNAPSHOT, 3) for rank in (0, 2)} | {1: flight(**{SNAPSHOT: 2}), 3: flight()}
    (waits,) = find_missing_ranks(flights)
    assert (waits.waiting, waits.missing, waits.since) == ((0, 2), (1, 3), 90.0)


def test_a_rank_that_has_made_that_call_is_not_missing_whatever_it_does_now():
    assert find_missing_ranks({0: in_function(SNAPSHOT, 2), 1: flight(**{SNAPSHOT: 2, RESTORE: 1})}) == ()
    assert find_missing_ranks({0: flight(), 1: flight()}) == ()


def test_a_rank_that_has_finished_need_not_agree_on_when_to_stop_but_must_have_taken_the_snapshot():
    for function, missing in ((SNAPSHOT, (1,)), (SHOULD_STOP, ())):
        (waits,) = find_missing_ranks({0: in_function(function), 1: flight()})
        assert waits.missing_of({1}) == missing and waits.missing_of({2}) == ()


def test_a_test_whose_rank_waits_for_one_that_has_finished_it_is_given_up():
    flights = {0: in_function(SNAPSHOT), 1: flight()}
    told = f"rank 0 is in {SNAPSHOT}, and rank 1 finished the test without it"
    assert describe_abandoned(find_wait_graph(flights, finished=(1,))) == told
    assert describe_abandoned(find_wait_graph(flights)) == ""


def test_top_shows_who_waits_there_and_for_whom():
    flights = {0: in_function(SNAPSHOT), 1: flight(), 2: flight(**{SNAPSHOT: 1})}
    vitals = {rank: RankReply(rank, 1, 100.0, kernel_wait="hrtimer_nanosleep") for rank in flights}
    found = take_samples(Overview(100.0, "running", dict.fromkeys(flights, "h1"), (0, 1, 2), flights, vitals))
    assert (found[0].state, found[0].since_s) == ("waits for rank 1 in snapshot", 10.0)
    assert (found[1].state, found[1].standing_out, found[1].late_s) == ("sleeps", StandingOut.LATE, 10.0)
    assert found[2].late_s is None
