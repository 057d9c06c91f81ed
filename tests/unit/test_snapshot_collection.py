"""The answers of many agents to requests for snapshots."""

from dataclasses import replace

import pytest

from jaxrun.diagnosis.stacks import NATIVE_STACKS_TIMEOUT_S
from jaxrun.head.actions import TakeSnapshot
from jaxrun.protocol.flight import Flight
from jaxrun.protocol.snapshot_messages import SnapshotPurpose, SnapshotReply
from jaxrun.supervisor.snapshot_collection import SnapshotCollections

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
