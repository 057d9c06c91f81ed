"""What is known of a job over time: who came last to each call, and its phases."""

import math
import signal

import pytest
from msgspec.structs import replace

from jaxrun.analysis.lockstep.call_waits import find_waits
from jaxrun.job_events.actions import RecordClock, SignalRanks
from jaxrun.job_events.events import AttemptEnded, AttemptStarted, LauncherSignalled
from jaxrun.protocol.agent_messages import StartFailed, WorkerExited, WorkerSpawned
from jaxrun.protocol.flight import CallTiming, DispatchedCall, Flight, PendingCall, ProgramInfo
from jaxrun.protocol.flight_file import EVERY_CALL
from jaxrun.protocol.worker_messages import DeviceReport, Done, Failed, Hello, ProfileEnded, WorkerStage
from jaxrun.records.event_log.event_log import LoggedEvent
from jaxrun.records.history.job_log import rank_phases, read_attempts
from jaxrun.records.history.job_trace import trace_calls

# ---- calls: who came last, and how long the others waited for it

PROGRAMS = {1: ProgramInfo("jit(step)", "k", "c")}
SITES = {7: ("/job/train.py:88 main",)}


def flight(*calls, group="0-2", pending=None, entered=0.0):
    """`calls` are (entered, dispatched), numbered from 1."""
    made = tuple(DispatchedCall(left, group, n, n, 1, 7, begin) for n, (begin, left) in enumerate(calls, 1))
    return Flight(
        EVERY_CALL,
        calls=made,
        call_counts={group: len(made)},
        programs=PROGRAMS,
        sites=SITES,
        pending=pending,
        entered=entered,
    )


def traced(flights, offsets=None, end=100.0):
    calls, awaited = trace_calls(dict(enumerate(flights)), offsets or {}, dict.fromkeys(range(len(flights)), end))
    return [calls[rank] for rank in sorted(calls)], awaited


def test_the_others_wait_in_the_call_until_the_last_has_entered_it():
    (first, second, third), awaited = traced([flight((1.0, 4.5)), flight((4.0, 4.5)), flight((2.0, 4.6))])
    assert [call.waited for (call,) in (first, second, third)] == [3.0, 0.0, 2.0]
    assert [call.last for (call,) in (first, second, third)] == [1, 1, 1]
    assert [call.cost for (call,) in (first, second, third)] == [0.0, 2.0, 0.0]
    assert (first[0].name, first[0].place, first[0].is_over, awaited) == ("jit(step)", "train.py:88 main", True, {})


def test_the_picture_measures_as_the_sentence_about_a_straggler_does():
    times = {
        0: [(1.0, 1.5), (2.0, 3.5), (5.0, 5.5)],
        1: [(1.2, 1.5), (3.0, 3.5), (5.1, 5.5)],
        2: [(1.3, 1.4), (2.5, 3.5), (6.0, 6.1)],
    }
    flights = {
        rank: replace(flight(*calls), timings=tuple(CallTiming("0-2", n, *call, 7) for n, call in enumerate(calls, 1)))
        for rank, calls in times.items()
    }
    waits = find_waits(flights, {}, {rank: (rank,) for rank in flights}, {})["0-2"]
    calls, _ = traced(flights.values())
    costs = [sum(made[wait.number - 1].cost for made in calls) for wait in waits]
    assert costs == [wait.waited_s for wait in waits] and [wait.number for wait in waits] == [2, 3] and all(costs)


def test_a_clock_that_is_wrong_is_corrected():
    calls, _ = traced([flight((1.0, 2.0)), flight((101.5, 102.0)), flight((1.0, 2.0))], {1: -100.0})
    assert (calls[1][0].entered, calls[0][0].waited, calls[1][0].cost) == (1.5, 0.5, 0.5)


def test_after_dispatch_a_rank_waits_unless_it_goes_on_to_another_call():
    late = flight((3.0, 3.1), (6.0, 6.1))
    (ahead, waiting, _), _ = traced([flight((1.0, 1.1), (1.2, 1.3)), flight((1.0, 1.1), (3.5, 3.6)), late])
    assert [call.waited for call in ahead] == pytest.approx([0.1, 4.8])
    assert [call.waited for call in waiting] == pytest.approx([2.0, 2.5])


def test_ranks_wait_to_their_end_for_one_that_never_comes():
    pending = PendingCall("0-2", 2, 1, 7, 5.0)
    (one, other, missing), awaited = traced(
        [flight((1.0, 2.0), pending=pending), flight((1.0, 2.0), (6.0, 6.1)), flight((1.0, 2.0))], end=20.0
    )
    assert (one[1].waited, one[1].left, one[1].is_over, one[1].missing) == (15.0, 20.0, False, "rank 2")
    assert (other[1].waited, other[1].left, other[1].is_over, other[1].missing) == (14.0, 6.1, True, "rank 2")
    assert len(missing) == 1 and awaited == {2: 5.0}


def test_a_rank_that_has_come_to_its_next_call_is_in_it():
    (one, _, _), awaited = traced([flight((1.0, 2.0), entered=3.0), flight((1.0, 2.0)), flight((1.0, 2.0))], end=9.0)
    assert (one[1].number, one[1].entered, one[1].left, one[1].is_over) == (2, 3.0, 9.0, False)
    assert awaited == {1: 3.0, 2: 3.0}


def test_of_calls_that_some_ranks_do_not_hold_any_more_nothing_is_said():
    forgetful = flight((1.0, 2.0), (3.0, 4.0))
    held = Flight(EVERY_CALL, calls=forgetful.calls[1:], call_counts={"0-2": 2})
    (one, _, _), awaited = traced([flight((1.0, 2.0), (3.0, 4.0)), flight((1.0, 2.0), (3.5, 4.0)), held])
    assert [call.last for call in one] == [-1, 1] and one[0].waited == 0.0 and awaited == {}


def test_without_the_times_of_entry_nobody_waits():
    calls, awaited = traced([flight((0.0, 2.0)), flight((0.0, 2.0)), flight((0.0, 2.0))])
    assert [(call.entered, call.left, call.waited, call.last) for (call,) in calls] == [(0.0, 2.0, 0.0, -1)] * 3
    assert awaited == {}


def test_groups_of_ranks_wait_for_themselves_alone():
    pairs = [flight((1.0, 2.0), group="0-1"), flight((1.5, 2.0), group="0-1"), flight((9.0, 9.5), group="2")]
    calls, _ = traced(pairs)
    assert [call.last for (call,) in calls] == [1, 1, -1]


# ---- phases: what the event log says of each attempt and rank


def logs(*events):
    """`events` are (time, message, attempt)."""
    return read_attempts(LoggedEvent(time, message, attempt) for time, message, attempt in events)


def hello(rank, started=1.2):
    return Hello(rank, f"h{rank + 1}", 11 + rank, 2.0, started, {}, "", {})


def proof(rank, joined):
    return DeviceReport(rank, rank, 2, 1, 2, ("cpu",), "cpu", "", joined, 4.0)


START = [
    (0.0, AttemptStarted(), 1),
    (1.0, WorkerSpawned(0, 11), 1),
    (2.0, hello(0), 1),
    (4.0, proof(0, 3.0), 1),
    (1.5, WorkerSpawned(1, 12), 1),
    (2.5, hello(1), 1),
    (5.0, proof(1, 3.5), 1),
]


def test_the_phases_of_a_rank_follow_each_other():
    (log,) = logs(*START, (9.0, Done(0, 9.0), 1), (9.5, WorkerExited(0, 0), 1))
    assert [(span.name, span.start, span.end) for span in rank_phases(log.ranks[0], log)] == [
        ("before its process", 0.0, 1.0),
        ("start Python and import jax", 1.0, 2.0),
        ("meet the other ranks, join", 2.0, 3.0),
        ("find the devices", 3.0, 4.0),
        ("wait for the other ranks", 4.0, 5.0),
        ("program", 5.0, 9.0),
        ("end", 9.0, 9.5),
    ]
    assert rank_phases(log.ranks[1], log)[-1][:3] == ("program", 5.0, 9.5)  # of which nothing more is known
    assert (log.ranks[1].host, log.ranks[1].pid, log.run_at) == ("h2", 12, 5.0)


def test_a_message_of_a_rank_may_arrive_before_its_start_is_reported():
    (log,) = logs((0.0, AttemptStarted(), 1), (2.0, hello(0, started=1.0), 1), (2.1, WorkerSpawned(0, 5), 1))
    assert [(span.name, span.start) for span in rank_phases(log.ranks[0], log)][:2] == [
        ("before its process", 0.0),
        ("start Python and import jax", 1.0),
    ]


def test_a_job_that_never_ran_has_no_program():
    (log,) = logs(*START[:6], (7.0, StartFailed("no device"), 1))
    assert [span.name for span in rank_phases(log.ranks[1], log)][-1] == "meet the other ranks, join"
    assert log.run_at is None and log.marks[0].is_failure and log.marks[0].detail == "no device"


def test_attempts_are_apart():
    first, second = logs(
        *START,
        (6.0, Failed(1, 6.0, WorkerStage.PROGRAM, 1, "ValueError", "bad", ""), 1),
        (6.1, WorkerExited(1, 1), 1),
        (6.2, SignalRanks((0,), signal.SIGKILL), 1),
        (6.3, WorkerExited(0, -9), 1),
        (6.4, AttemptEnded("failed", 1, "rank 1 failed", "rank-0001.err"), 1),
        (6.5, AttemptStarted("", "rank 1 failed"), 2),
        (7.0, WorkerSpawned(0, 13), 2),
        (8.0, WorkerExited(0, -11), 2),
    )
    assert (first.number, first.end, first.outcome, second.number, second.start) == (1, 6.4, "rank 1 failed", 2, 6.5)
    assert [(mark.name, mark.is_failure) for mark in first.ranks[1].marks] == [("ValueError", True)]
    assert first.ranks[0].marks == []  # jaxrun itself has killed it
    assert [mark.name for mark in second.ranks[0].marks] == ["crashed with SIGSEGV (11)"]
    assert [mark.name for mark in first.marks] == ["SIGKILL (9) to rank 0"]


def test_times_of_another_clock_are_corrected_by_the_last_word_on_it():
    (log,) = logs(
        (0.0, AttemptStarted(), 1),
        (0.5, RecordClock(1, -7.0), 1),
        (1.0, ProfileEnded(1, 7.0, 6.0, "s", "f", 1, 2, "", False), 1),
        (2.0, RecordClock(1, -5.0, 0.001), 1),
        (3.0, WorkerExited(1, 0), 1),
    )
    rank = log.ranks[1]
    assert (rank.profiles[0].start, rank.profiles[0].end, rank.clock_error) == (1.0, 2.0, 0.001)


def test_values_that_no_process_has_are_left_out():
    odd = (proof(1, math.nan), LauncherSignalled(10**9))
    (log,) = logs(*START[:-1], *((6.0, message, 1) for message in odd))
    assert len(log.ranks) == 2 and log.ranks[1].joined is None and log.end == 6.0
