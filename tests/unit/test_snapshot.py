"""A snapshot of the ranks: collected from the answers of many agents, formatted, and written and read back."""

from dataclasses import replace

import pytest

from jaxrun.analysis.diagnosis.snapshot import Snapshot
from jaxrun.analysis.diagnosis.stacks import NATIVE_STACKS_TIMEOUT_S
from jaxrun.analysis.verdict.stack_text import format_snapshot
from jaxrun.controller.supervisor.snapshot_collection import SnapshotCollections
from jaxrun.protocol.flight import DispatchedCall, Flight, PendingCall, ProgramInfo
from jaxrun.protocol.flight_file import EVERY_CALL
from jaxrun.protocol.snapshot_messages import SnapshotPurpose, SnapshotReply
from jaxrun.records.event_log.actions import TakeSnapshot

HOSTS = {0: "h1", 1: "h1", 2: "h2", 3: "h2"}
IN_JAX = """Thread 0x1 (most recent call first):
  File "/v/lib/python3.11/site-packages/jax/_src/array.py", line 1 in _value
  File "/home/me/train.py", line 88 in step
"""
IN_QUEUE = """Thread 0x1 (most recent call first):
  File "/usr/lib/python3.11/queue.py", line 171 in get
  File "/home/me/data.py", line 31 in __next__
"""


def flight(number, *, pending=None, compiling=None, time=100.0, group="0-3", name="jit(step)"):
    calls = (DispatchedCall(time, group, number, 1, 1, 1),) if number else ()
    sites = {1: ("/home/me/train.py:88 step",)}
    programs = {1: ProgramInfo(name, "k", "c")}
    return Flight(
        level=EVERY_CALL,
        calls=calls,
        call_counts={group: number},
        programs=programs,
        sites=sites,
        pending=pending,
        compiling=compiling,
    )


def look(dumps, flights, **more):
    waits = dict.fromkeys(dumps, "futex_wait_queue")
    return Snapshot(160.0, HOSTS, dumps, waits, flights, **more)


def test_each_group_says_how_far_its_ranks_have_come():
    entered = PendingCall("0-3", 1205, 1, 1, 99.0)
    flights = {rank: flight(1204, pending=entered) for rank in (0, 1, 2)} | {3: flight(1204, time=97.0)}
    text = format_snapshot(look({0: IN_JAX, 1: IN_JAX, 2: IN_JAX, 3: IN_QUEUE}, flights))
    rows = text.splitlines()
    assert rows[1].endswith("train.py:88 step   in JAX: _value    in call #1205 jit(step), 61.0 s")
    assert rows[2].endswith("data.py:31 __next__   in queue: get  after call #1204 jit(step), 63.0 s ago")
    assert "rank 3 is the one that differs." in rows and "waits for data" in text


def test_ranks_in_one_place_may_have_come_differently_far():
    flights = {0: flight(4), 1: flight(5), 2: flight(5, name="jit(mean)", group="0-1")}
    rows = format_snapshot(look({0: IN_JAX, 1: IN_JAX, 2: IN_JAX}, flights)).splitlines()
    assert "after calls #4-5 jit(step), 60.0 s ago or after call #5 jit(mean) of ranks 0-1" in rows[1]


def test_a_compilation_is_reported():
    text = format_snapshot(look({0: IN_JAX}, {0: flight(4, compiling=("jit(init)", 130.0))}))
    assert "compiling jit(init), 30.0 s" in text


def test_finished_ranks_are_reported_too():
    text = format_snapshot(look({0: IN_JAX, 1: IN_JAX}, {rank: flight(4) for rank in range(3)}, finished=(2, 3)))
    assert "ranks 2-3 (h2) have finished, after call #4 jit(step), 60.0 s ago." in text


def test_without_recorders_there_are_only_stacks():
    rows = format_snapshot(look({0: IN_JAX, 1: IN_QUEUE}, {})).splitlines()
    assert rows[1].endswith("in JAX: _value") and format_snapshot(look({}, {})) == ""


# ---- the answers of agents

SHOW, EARLY_EXIT, HISTORY = SnapshotPurpose.SHOW, SnapshotPurpose.EARLY_EXIT, SnapshotPurpose.HISTORY
PROGRESS = SnapshotPurpose.PROGRESS


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def collections(clock):
    return SnapshotCollections(clock)


def flights(*ranks):
    return {rank: Flight(trouble=f"of rank {rank}") for rank in ranks}


def reply(purpose, rank):
    return SnapshotReply(purpose, {rank: "stack"}, {rank: "futex"}, {rank: 1.0}, flights=flights(rank))


def test_a_snapshot_is_complete_when_all_have_answered(collections):
    assert collections.start(TakeSnapshot((0, 3), SHOW)) == []
    assert 100.5 < collections.deadline() < 105.0
    assert collections.add(reply(EARLY_EXIT, 0)) == []  # nobody waits for it any more
    assert collections.add(reply(SHOW, 3)) == []
    stacks, waits, cpu = {0: "stack", 3: "stack"}, {0: "futex", 3: "futex"}, {0: 1.0, 3: 1.0}
    assert collections.add(reply(SHOW, 0)) == [SnapshotReply(SHOW, stacks, waits, cpu, flights=flights(0, 3))]
    assert collections.deadline() is None


def test_a_rank_that_does_not_answer_in_time_has_no_stacks(collections, clock):
    collections.start(TakeSnapshot((0, 3), SHOW))
    collections.add(reply(SHOW, 3))
    assert collections.expire() == []
    clock.now = collections.deadline()
    stacks, waits, cpu = {0: "", 3: "stack"}, {0: "", 3: "futex"}, {0: 0.0, 3: 1.0}
    assert collections.expire() == [SnapshotReply(SHOW, stacks, waits, cpu, flights=flights(3))]
    assert collections.add(reply(SHOW, 0)) == []


def test_a_snapshot_of_recorders_has_flights_alone(collections):
    collections.start(TakeSnapshot((3,), HISTORY))
    only_flights = SnapshotReply(HISTORY, {}, {}, {}, flights=flights(3))
    assert collections.add(only_flights) == [only_flights]


def test_a_snapshot_of_progress_has_no_stacks(collections):
    collections.start(TakeSnapshot((0, 3), PROGRESS))
    replies = [SnapshotReply(PROGRESS, {}, {}, {r: 1.5}, {r: 7}, {r: 9}, {r: (4, 0, 2, 0)}) for r in (0, 3)]
    assert collections.add(replies[0]) == []
    both = {0: (4, 0, 2, 0), 3: (4, 0, 2, 0)}
    assert collections.add(replies[1]) == [
        SnapshotReply(PROGRESS, {}, {}, {0: 1.5, 3: 1.5}, {0: 7, 3: 7}, {0: 9, 3: 9}, both)
    ]


def test_c_frames_take_longer(collections):
    collections.start(TakeSnapshot((3,), SnapshotPurpose.NATIVE))
    assert collections.deadline() > 100.0 + NATIVE_STACKS_TIMEOUT_S
    native = {3: "gloo::allreduce"}
    (result,) = collections.add(replace(reply(SnapshotPurpose.NATIVE, 3), native_stacks=native))
    assert result.native_stacks == native


def test_a_snapshot_of_no_ranks_is_complete_at_once(collections):
    assert collections.start(TakeSnapshot((), SHOW)) == [SnapshotReply(SHOW, {}, {}, {})]
