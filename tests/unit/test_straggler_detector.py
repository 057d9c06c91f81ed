"""The head finds a rank that holds the others up, and where in its program it is; the sentence about it."""

from dataclasses import replace

import pytest
from timings import asynchronous, blocking, shifted, window

from jaxrun.analysis.diagnosis.job_outcome import EndReason
from jaxrun.analysis.diagnosis.straggler import Straggler
from jaxrun.analysis.verdict import decide
from jaxrun.analysis.verdict.stack_text import format_snapshot
from jaxrun.analysis.verdict.straggler_text import format_straggler
from jaxrun.controller.head.clock_offsets import ClockOffsets
from jaxrun.controller.head.straggler_detector import StragglerDetector
from jaxrun.protocol.agent_messages import ClockReply
from jaxrun.protocol.requests import StacksRequest
from jaxrun.protocol.snapshot_messages import CallAim, RecorderSnapshot, SnapshotPurpose, SnapshotReply
from jaxrun.records.event_log.actions import RecordStraggler, TakeSnapshot
from jaxrun.records.event_log.events import Requested

HOSTS = dict.fromkeys(range(3), "h1")
LOAD = 'Thread 0x1 (most recent call first):\n  File "/job/data.py", line 10 in load\n  File "/job/train.py", line 9\n'
IN_CALL = 'Thread 0x1 (most recent call first):\n  File "/job/train.py", line 88 in main\n'


def late(rank, size=3, calls=60, by=0.004):
    return blocking(lambda of, _: 0.02 + by * (of == rank), size, calls)


def reply(dumps, wait="futex_wait_queue"):
    return SnapshotReply(SnapshotPurpose.STRAGGLER, dumps, dict.fromkeys(dumps, wait), {})


def asked(actions):
    """The snapshot that the detector wants, if any."""
    return next((action for action in actions if isinstance(action, TakeSnapshot)), None)


def test_a_straggler_is_asked_a_few_times_where_it_is_before_its_calls():
    detector = StragglerDetector(HOSTS, None)
    flights = late(1)
    actions = detector.add(flights, {}, 1.0)
    assert [action.straggler.frame for action in actions if isinstance(action, RecordStraggler)] == [""]
    for _ in range(4):
        want = asked(actions)
        assert (want.ranks, want.purpose, want.aim.site) == ((1,), SnapshotPurpose.STRAGGLER, 7)
        assert want.aim.lead_s == pytest.approx(0.002)
        assert detector.add(flights, {}, 1.0) == []  # one question after the other
        actions = detector.handle_sample(reply({1: LOAD}), flights)
    assert asked(actions) is None
    assert detector.straggler.ranks == (1,) and detector.straggler.frame == "data.py:10 load"


def test_stacks_that_were_not_taken_at_the_right_moment_end_some_day():
    detector = StragglerDetector(HOSTS, None)
    flights = late(1)
    actions, count = detector.add(flights, {}, 1.0), 0
    while asked(actions):
        count += 1
        actions = detector.handle_sample(reply({1: ""}), flights)
    assert count == 16 and detector.straggler.frame == ""


def test_nobody_is_asked_where_nobody_is_late():
    detector = StragglerDetector(HOSTS, None)
    assert detector.add(late(None), {}, 1.0) == [] and detector.straggler is None


@pytest.mark.parametrize(("in_jax", "told"), [(24, True), (12, True), (3, False), (0, False)])
def test_where_calls_return_at_once_another_rank_must_be_seen_to_wait(in_jax, told):
    detector = StragglerDetector({0: "h1", 1: "h1"}, None)
    flights = asynchronous(lambda rank, _: 0.02 + 0.02 * (rank == 1), 2, 128)
    actions = detector.add(flights, {}, 1.0)
    for number in range(24):
        assert asked(actions) == TakeSnapshot((0,), SnapshotPurpose.STRAGGLER, CallAim(0, 0.0))
        assert detector.straggler is None
        wait = "futex_wait_queue" if number < in_jax else "hrtimer_nanosleep"
        actions = detector.handle_sample(reply({0: IN_CALL}, wait), flights)
    assert (detector.straggler is not None) is told
    assert (asked(actions) is not None) is told  # now of the straggler
    if told:
        assert detector.straggler.share == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize(("of_rank_1", "told"), [(0.1, True), (3.0, False)])
def test_who_only_lacks_a_core_is_no_straggler(of_rank_1, told):
    detector = StragglerDetector(HOSTS, None)
    flights = late(1, calls=120)
    detector.start(0.0)
    detector.add(window(flights, 1, 60), {0: 5.0, 1: 9.0, 2: 5.0}, 10.0)
    detector.add(window(flights, 60, 120), {0: 5.2, 1: 9.0 + of_rank_1, 2: 5.2}, 20.0)
    assert (detector.straggler is not None) is told


def test_of_a_short_job_all_that_it_waited_for_cores_counts():
    detector = StragglerDetector(HOSTS, None)
    detector.start(10.0)
    for rank, seconds in enumerate((0.1, 0.5, 0.1)):
        detector.handle_recorder(RecorderSnapshot(rank, late(1)[rank], seconds), 12.0)
    detector.add(late(1), {}, 12.0)
    assert detector.straggler is None


def test_ranks_of_several_hosts_are_compared_once_their_clocks_are_known():
    hosts = {0: "h1", 1: "h2", 2: "h3"}
    clocks = ClockOffsets(hosts)
    detector = StragglerDetector(hosts, clocks)
    flights = late(1)
    flights[2] = shifted(flights[2], 5.0)
    assert detector.add(flights, {}, 100.0) == []
    for rank, ahead in enumerate((0.0, 0.0, 5.0)):
        clocks.handle(ClockReply(rank, 100.0, 100.0005 + ahead), 100.001)
    detector.add(flights, {}, 100.0)
    assert detector.straggler.ranks == (1,)
    for rank, ahead in enumerate((0.0, 0.0, 5.0)):  # two hours later the clocks may be anywhere
        assert clocks.offset(rank, 7300.0).error_at(7300.0) > 0.1, ahead
    detector.add({}, {}, 7300.0)
    assert detector.straggler is None


def test_a_job_says_at_its_end_who_held_it_up(simulate):
    job = simulate(3, lockstep="record").run()
    job.flights = late(1)
    job.stacks = {1: LOAD}
    job.wait(10.0)
    samples = [(ranks, purpose) for _, purpose, ranks in job.snapshots if purpose is SnapshotPurpose.STRAGGLER]
    assert samples == [((1,), SnapshotPurpose.STRAGGLER)] * 4
    job.handle(*(RecorderSnapshot(rank, flight) for rank, flight in job.flights.items()))
    job.done(0, 1, 2).exit(0, 0, 1, 2)
    assert job.outcome.reason is EndReason.OK and job.outcome.straggler.frame == "data.py:10 load"
    verdict = decide.decide(job.outcome, job.hosts, started=0.0, ended=12.0)
    assert verdict.details == (f"{format_straggler(job.outcome.straggler, job.hosts)}.",)


def test_nothing_is_said_of_it_where_a_rank_has_failed(simulate):
    job = simulate(3, lockstep="record").run()
    job.flights = late(1)
    job.wait(10.0)
    job.handle(job.failure(2)).wait(5.0)
    job.exit(1, 2).wait(60.0)
    assert job.outcome.straggler is not None
    verdict = decide.decide(job.outcome, job.hosts, started=0.0, ended=12.0)
    assert not any("came last" in line for line in verdict.details)


def test_stacks_say_it_too(simulate):
    job = simulate(3, lockstep="record").run()
    job.flights, job.stacks = late(1), dict.fromkeys(range(3), IN_CALL)
    job.wait(10.0)
    job.handle(Requested("1", StacksRequest())).wait(1.0)
    ((_, answer),) = job.answered
    snapshot = answer.content
    assert snapshot.straggler.ranks == (1,)
    assert "rank 1 came last to 100 % of calls" in format_snapshot(snapshot)


# ---- the sentence

ONE = Straggler((5,), "0-7", "", 500, 490, 0.94, 0.038, 0.31, 0.3, True, "data.py:10 load")
TWO_EACH = {rank: f"h{rank // 2 + 1}" for rank in range(8)}


@pytest.mark.parametrize(
    ("straggler", "hosts", "text"),
    [
        (
            ONE,
            TWO_EACH,
            "rank 5 (h3) came last to 94 % of calls, by 38 ms on average: the others waited 31 % of the time; "
            "it was in data.py:10 load",
        ),
        (
            replace(ONE, frame="", late_s=1.234, place="train.py:88 main"),
            dict.fromkeys(range(8), "h1"),
            "rank 5 came last to 94 % of the calls at train.py:88, by 1.2 s on average: the others waited 31 % "
            "of the time",
        ),
        (
            replace(ONE, ranks=(4, 5), frame="", late_s=0.00123),
            TWO_EACH,
            "ranks 4-5 (h3) came last to 94 % of calls, by 1.2 ms on average: the others waited 31 % of the time",
        ),
        (
            replace(ONE, group="4-5", frame=""),
            TWO_EACH,
            "rank 5 (h3) came last to 94 % of calls of ranks 4-5, by 38 ms on average: rank 4 waited 31 % of the time",
        ),
    ],
)
def test_it_names_who_came_last_and_what_that_cost(straggler, hosts, text):
    assert format_straggler(straggler, hosts) == text
