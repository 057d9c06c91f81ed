"""The answers of many agents to one request for a snapshot."""

from dataclasses import replace

from jaxrun.diagnosis.stacks import NATIVE_STACKS_TIMEOUT_S
from jaxrun.head.actions import TakeSnapshot
from jaxrun.protocol.agent_messages import SnapshotPurpose, SnapshotReply
from jaxrun.protocol.flight import Flight
from jaxrun.supervisor.snapshot_collection import SnapshotCollection


def taken(purpose, rank, text="stack"):
    return SnapshotReply(
        purpose, {rank: text}, {rank: "futex"}, {rank: 1.0}, flights={rank: Flight(trouble=f"of rank {rank}")}
    )


def test_stacks_are_complete_when_all_have_answered():
    collection = SnapshotCollection(TakeSnapshot((0, 3), SnapshotPurpose.SHOW), 100.0)
    assert not collection.complete and 100.5 < collection.deadline < 105.0
    assert (
        not collection.add(taken(SnapshotPurpose.EARLY_EXIT, 0))
        and not collection.add(taken(SnapshotPurpose.SHOW, 3))
        and collection.add(taken(SnapshotPurpose.SHOW, 0))
    )
    assert collection.result() == SnapshotReply(
        SnapshotPurpose.SHOW,
        {0: "stack", 3: "stack"},
        {0: "futex", 3: "futex"},
        {0: 1.0, 3: 1.0},
        flights={0: Flight(trouble="of rank 0"), 3: Flight(trouble="of rank 3")},
    )


def test_a_rank_that_does_not_answer_has_no_stacks():
    collection = SnapshotCollection(TakeSnapshot((0, 3), SnapshotPurpose.SHOW), 100.0)
    collection.add(taken(SnapshotPurpose.SHOW, 3))
    assert collection.result() == SnapshotReply(
        SnapshotPurpose.SHOW,
        {0: "", 3: "stack"},
        {0: "", 3: "futex"},
        {0: 0.0, 3: 1.0},
        flights={3: Flight(trouble="of rank 3")},
    )


def test_of_calls_only_flights_are_told():
    collection = SnapshotCollection(TakeSnapshot((3,), SnapshotPurpose.HISTORY), 100.0)
    assert collection.add(SnapshotReply(SnapshotPurpose.HISTORY, {}, {}, {}, {}, {3: Flight(trouble="of rank 3")}))
    assert collection.result() == SnapshotReply(
        SnapshotPurpose.HISTORY, {}, {}, {}, {}, {3: Flight(trouble="of rank 3")}
    )


def test_c_frames_take_longer():
    collection = SnapshotCollection(TakeSnapshot((3,), SnapshotPurpose.NATIVE), 100.0)
    assert collection.deadline > 100.0 + NATIVE_STACKS_TIMEOUT_S
    assert collection.add(replace(taken(SnapshotPurpose.NATIVE, 3), native_stacks={3: "gloo::allreduce"}))
    assert collection.result().native_stacks == {3: "gloo::allreduce"}


def test_nobody_to_ask_is_an_answer():
    assert SnapshotCollection(TakeSnapshot((), SnapshotPurpose.SHOW), 0.0).complete
