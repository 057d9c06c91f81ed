"""What the time of a job was worth: the parts sum up to the whole, whatever happens, and each is what was seen."""

from collections import Counter
from itertools import pairwise

import pytest
from calls_by_hand import flight_after
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from jaxrun.analysis.lockstep.pauses import PauseTimes
from jaxrun.analysis.lockstep.repeated_calls import RepeatedCalls
from jaxrun.analysis.lockstep.stage_times import StageTimes, UnionOfSpans
from jaxrun.analysis.lockstep.time_spent import RUN_PARTS, TimeLedger, TimeReading
from jaxrun.analysis.verdict.goodput_text import Goodput, format_goodput, is_worth_a_line, sum_up
from jaxrun.job_events.actions import RecordTime
from jaxrun.job_events.events import AttemptEnded, AttemptStarted
from jaxrun.protocol.agent_messages import WorkerExited, WorkerSpawned
from jaxrun.protocol.flight import CompilationStage, Flight, TimeTotals, ToldStep
from jaxrun.protocol.stop_messages import CheckpointSaved
from jaxrun.protocol.survivor_messages import LiveRanksAsked
from jaxrun.protocol.worker_messages import DeviceReport, Done, Hello
from jaxrun.records.event_log.event_log import LoggedEvent
from jaxrun.records.history.goodput import account, band
from jaxrun.records.history.job_log import AttemptLog, RankLog, read_attempts

S = 1_000_000  # microseconds
TIMES = st.floats(allow_nan=True, allow_infinity=True) | st.floats(-100.0, 10_000.0)
SECONDS = st.floats(0.0, 500.0)
READINGS = st.builds(
    TimeReading,
    compiling=SECONDS,
    saving=SECONDS,
    restoring=SECONDS,
    pausing=SECONDS,
    data_share=TIMES,
    slowest_share=TIMES,
    steps_since=st.none() | TIMES,
    has_steps=st.booleans(),
    calls=st.integers(0, 3),
    first_new_call=st.none() | TIMES,
    is_held=st.booleans(),
)


def ledger(*readings, start=1000.0, every=10.0):
    made = TimeLedger(start)
    for number, reading in enumerate(readings, 1):
        made.add(reading, start + every * number)
    return {part: spent / S for part, spent in made.parts.items() if spent}


@given(st.lists(st.tuples(READINGS, TIMES, st.none() | SECONDS, st.none() | SECONDS), max_size=12))
def test_the_parts_of_a_ledger_are_never_negative_and_sum_up_even_if_clocks_jump(history):
    made = TimeLedger(1000.0)
    for reading, now, stalled_s, suspended_s in history:
        made.add(reading, now)
        if stalled_s is not None:
            made.stall(stalled_s, reading.calls)
        if suspended_s is not None:
            made.suspend(suspended_s)
        assert sum(made.parts.values()) == made.until_us - made.since_us
        assert min(made.parts.values()) >= 0
        assert set(made.parts) == set(RUN_PARTS)


def test_time_before_the_first_repeated_call_is_set_up_and_later_time_is_steps_less_the_waits():
    stepping = TimeReading(steps_since=1016.0, data_share=0.25, slowest_share=0.05)
    assert ledger(TimeReading(), stepping, stepping) == {
        "steps": pytest.approx(0.7 * 14),
        "set-up": 16.0,
        "data": pytest.approx(0.25 * 14),
        "slowest": pytest.approx(0.05 * 14),
    }


def test_steps_that_are_recognized_late_are_moved_from_the_set_up():
    assert ledger(TimeReading(), TimeReading(steps_since=1004.0)) == {"steps": 16.0, "set-up": 4.0}


def test_a_compilation_that_ends_now_has_begun_before_this_reading():
    assert ledger(TimeReading(), TimeReading(compiling=13.0)) == {"compiling": 13.0, "set-up": 7.0}


def test_a_stall_lasts_from_its_notice_until_the_next_call():
    made = TimeLedger(1000.0)
    stepping = TimeReading(steps_since=1000.0, calls=5)
    made.add(stepping, 1040.0)
    made.stall(30.0, 5)
    made.add(stepping, 1060.0)
    made.stall(50.0, 5)
    made.add(stepping._replace(calls=9, first_new_call=1064.0), 1070.0)
    assert {part: spent / S for part, spent in made.parts.items() if spent} == {"steps": 16.0, "stalled": 54.0}


def test_what_cannot_be_seen_is_unknown():
    assert ledger(TimeReading(has_steps=False, compiling=2.0)) == {"compiling": 2.0, "unknown": 8.0}
    assert ledger(TimeReading(steps_since=1000.0, pausing=4.0)) == {"steps": 6.0, "unknown": 4.0}


def repeating_since(*calls):
    repeated = RepeatedCalls()
    for number, call in enumerate(calls, 1):
        repeated.add(call, float(number))
    return repeated.since


def test_calls_repeat_from_the_first_of_those_that_do_on():
    assert repeating_since("init", "init", *"abababa") == 3.0
    assert repeating_since(*"init", *("ab" * 2000)) == 5.0
    assert repeating_since(*"abab") == 0.0
    assert repeating_since(*("ab" * 9), "eval") == 0.0
    assert repeating_since(*("ab" * 9), "eval", *("ab" * 3)) == 20.0
    assert repeating_since() == 0.0


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 9)), max_size=40))
def test_the_length_of_a_union_of_spans_counts_each_second_once(spans):
    union = UnionOfSpans()
    for since, took in spans:
        union.add(float(since), float(since + took))
    covered = {second for since, took in spans for second in range(since, since + took)}
    assert union.seconds() == len(covered)
    assert union.overlap(10.0, 20.0) == len(covered & set(range(10, 20)))


def test_a_compilation_inside_of_a_restore_counts_once():
    times = StageTimes()
    times.add(CompilationStage("trace", "f", 2.0, 3.0))
    times.add(CompilationStage("compile", "f", 2.0, 4.0))
    times.add(CompilationStage("restore", "by orbax", 1.0, 6.0))
    times.add(CompilationStage("save", "by orbax", 10.0, 11.0))
    assert times.seconds() == (2.0, 1.0, 3.0)


def test_a_pause_is_far_longer_than_usual_and_not_what_a_stage_explains():
    pauses = PauseTimes()
    for number in range(20):
        pauses.add(float(number), number + 0.1)
    pauses.add(60.0, 60.1)
    assert pauses.seconds(lambda since, until: 5.0) == pytest.approx(60.0 - 19.1 - 5.0)
    assert pauses.seconds(lambda since, until: 5.0) == pytest.approx(60.0 - 19.1 - 5.0)  # counted once


def test_the_head_logs_the_time_from_what_flight_recorders_say(simulate):
    job = simulate(2, lockstep="record").run()
    stepping = replace(flight_after(100, "0-1"), repeating_since=16.0, totals=TimeTotals(compiling=2.0))
    job.flights = dict.fromkeys(range(2), flight_after(1, "0-1"))
    job.wait(15).flights = dict.fromkeys(range(2), stepping)
    job.wait(45).done(0, 1).exit(0, 0, 1)
    job.wait(5)
    assert len(job.times) >= 3
    last = {part: spent / S for part, spent in job.times[-1].parts.items()}
    assert last == {"compiling": 2.0, "set-up": pytest.approx(14.0, abs=0.1), "steps": pytest.approx(44.0, abs=0.1)}
    told = ToldStep(30, 90, 60.0, 1, 31.0)  # a step each second, the first one at its end
    job = simulate(1, lockstep="record").run()
    job.wait(40).flights = {0: Flight(told_step=told)}
    job.wait(20).done(0).exit(0, 0)
    job.wait(5)
    last = job.times[-1]
    assert last.parts == {"set-up": pytest.approx(30 * S, abs=S / 10), "steps": pytest.approx(30 * S, abs=S / 10)}
    assert (last.steps, last.first_step, last.last_step, last.total_steps) == (30, 1, 30, 90)


def test_what_the_new_process_of_a_lost_rank_compiles_counts_from_its_start(simulate):
    job = simulate(2, lockstep="record", keep_survivors=True, returns=1).run()
    stepping = replace(flight_after(100, "0-1"), repeating_since=16.0, totals=TimeTotals(compiling=4.0))
    job.flights = dict.fromkeys(range(2), flight_after(1, "0-1"))
    job.wait(15).flights = dict.fromkeys(range(2), stepping)
    job.wait(45).exit(-9, 1)
    job.handle(WorkerSpawned(1, 2001), job.hello(1, pid=2001), job.device_report(1))
    job.handle(LiveRanksAsked(1, (0, 1), 1), LiveRanksAsked(0, (0, 1), 1))
    job.flights = {0: stepping, 1: replace(stepping, totals=TimeTotals(compiling=3.0))}
    job.wait(45).done(0, 1).exit(0, 0, 1)
    job.wait(5)
    assert job.times[-1].parts["compiling"] == pytest.approx(7 * S, abs=S / 10)


# ---- the event log of a job


def job(*attempts):
    """Return the logs of attempts, each given as (time, message) pairs."""
    return read_attempts(
        LoggedEvent(time, message, number) for number, events in enumerate(attempts, 1) for time, message in events
    )


def reached(rank, spawned, hello, devices):
    yield spawned, WorkerSpawned(rank, 100 + rank)
    yield hello, Hello(rank, "h1", 100 + rank, hello, spawned, {}, "", {})
    yield devices, DeviceReport(rank, rank, 1, 1, 1, ("cpu",), "cpu", "", devices - 1.0, devices)


def spent(until, since=10.0, **parts):
    names = {name.replace("_", "-"): round(seconds * S) for name, seconds in parts.items()}
    return until, RecordTime(since, until, names, steps=round(parts.get("steps", 0.0)))


def seconds(goodput):
    assert sum(goodput.parts_us.values()) == goodput.total_us
    return {part: micro / S for part, micro in goodput.parts_us.items()}


def test_the_time_of_an_attempt_is_divided_at_its_start_run_and_end():
    (log,) = job(
        [
            (0.0, AttemptStarted()),
            *reached(0, 1.0, 3.0, 8.0),
            *reached(1, 1.0, 4.0, 10.0),
            spent(70.0, steps=50.0, set_up=10.0),
            (70.0, Done(0, 70.0)),
            (72.0, WorkerExited(0, 0)),
        ]
    )
    made = account([log])
    parts = {"python": 4.0, "joining": 5.0, "devices": 1.0, "set-up": 10.0, "steps": 50.0, "stopping": 2.0}
    assert seconds(made) == parts
    assert (made.share, made.steps, made.attempts) == (50 / 72, 50, 1)
    periods = band([log])
    assert [(first, last) for first, last, _ in periods] == [(0, 4), (4, 9), (9, 10), (10, 70), (70, 72)]


def test_an_attempt_that_ends_in_its_start_up_has_only_started():
    logs = job([(0.0, AttemptStarted(listening="eth0 10.0.0.9:40")), (30.0, WorkerExited(0, 1))])
    assert seconds(account(logs)) == {"hosts": 30.0}
    logs = job([(0.0, AttemptStarted()), (1.0, WorkerSpawned(0, 7)), (9.0, WorkerExited(0, 1))])
    assert seconds(account(logs)) == {"python": 9.0}


def restarted(*, saved=(), told=False):
    first = {"first_step": 1, "last_step": 60} if told else {}
    again = {"first_step": 41, "last_step": 100} if told else {}
    start = [(0.0, AttemptStarted()), *reached(0, 1.0, 2.0, 10.0)]
    middle = RecordTime(10.0, 40.0, {"steps": 30 * S}, steps=30)
    end = RecordTime(10.0, 70.0, {"steps": 60 * S}, steps=60, **first)
    last = RecordTime(120.0, 180.0, {"steps": 60 * S}, steps=60, **again)
    ended = AttemptEnded("killed", 137, "rank 0 was killed", "rank-0000.err")
    saves = [(time, CheckpointSaved(0, step)) for time, step in saved]
    return job(
        [*start, *saves, (40.0, middle), (70.0, end), (70.0, WorkerExited(0, -9)), (70.0, ended)],
        [(100.0, AttemptStarted()), *reached(0, 101.0, 102.0, 120.0), (180.0, last), (180.0, Done(0, 180.0))],
    )


def test_steps_after_the_last_saved_one_are_repeated_by_the_next_attempt():
    made = account(restarted(saved=[(25.0, 15), (50.0, 40)]))
    parts = seconds(made)
    assert (parts["steps"], parts["repeated"], parts["hosts"]) == (100.0, 20.0, 30.0)


def test_the_numbers_that_the_program_tells_say_which_steps_are_repeated():
    made = account(restarted(told=True))
    assert (seconds(made)["repeated"], made.repeated_steps, made.steps) == (20.0, 20, 100)


def test_without_any_sign_of_a_checkpoint_it_is_unknown_whether_steps_were_kept():
    parts = seconds(account(restarted()))
    assert (parts["steps"], parts["unknown"], "repeated" in parts) == (60.0, 60.0, False)


RANKS = st.builds(
    RankLog,
    at=st.dictionaries(st.sampled_from([WorkerSpawned, Hello, DeviceReport, Done]), TIMES),
    joined=st.none() | TIMES,
)
RECORDS = st.builds(
    RecordTime,
    since=TIMES,
    until=TIMES,
    parts=st.dictionaries(st.sampled_from([*RUN_PARTS, "of a later version"]), st.integers(-S, 200 * S)),
    steps=st.integers(-5, 500),
    first_step=st.integers(-1, 300),
    last_step=st.integers(-1, 300),
)
LOGS = st.builds(
    AttemptLog,
    number=st.just(1),
    start=TIMES,
    end=TIMES,
    ranks=st.dictionaries(st.integers(0, 2), RANKS, max_size=3),
    spent=st.lists(RECORDS, max_size=3),
    saved_at=st.none() | TIMES,
    has_ended=st.booleans(),
    reported_at=st.none() | TIMES,
)


@given(st.lists(LOGS, max_size=4))
def test_the_parts_of_any_job_are_never_negative_and_sum_up(logs):
    made = account(logs)
    assert sum(made.parts_us.values()) == made.total_us
    assert min(made.parts_us.values(), default=0) >= 0
    assert sum(sum_up([made, made]).parts_us.values()) == 2 * made.total_us
    periods = band(logs)
    assert sum(sum(period.parts.values()) for period in periods) == made.total_us
    assert all(min(period.parts.values()) >= 0 for period in periods)
    assert all(one.end == two.start for one, two in pairwise(periods))


@given(st.lists(READINGS, max_size=8))
def test_the_periods_of_a_band_sum_up_to_the_parts_also_where_time_is_explained_later(readings):
    made, records = TimeLedger(10.0), []
    for number, reading in enumerate(readings, 1):
        made.add(reading, 10.0 + 10 * number)
        records.append((10.0 + 10 * number, RecordTime(10.0, 10.0 + 10 * number, dict(made.parts))))
    end = 12.0 + 10 * len(readings)
    logs = job([(0.0, AttemptStarted()), *reached(0, 1.0, 2.0, 10.0), *records, (end, WorkerExited(0, 0))])
    totals = Counter()
    for period in band(logs):
        totals.update(period.parts)
    assert {part: spent for part, spent in totals.items() if spent} == account(logs).parts_us


def test_a_long_compilation_lies_where_it_was_in_the_band_and_steps_that_were_lost_at_the_end():
    made = TimeLedger(10.0)
    records = []
    for now, reading in (
        (30.0, TimeReading()),
        (50.0, TimeReading(compiling=25.0)),
        (70.0, TimeReading(steps_since=50.0)),
    ):
        made.add(reading, now)
        records.append((now, RecordTime(10.0, now, dict(made.parts))))
    started = [(0.0, AttemptStarted()), *reached(0, 1.0, 2.0, 10.0)]
    ended = AttemptEnded("killed", 137, "rank 0 was killed", "rank-0000.err")
    logs = job(
        [*started, *records, (60.0, CheckpointSaved(0, 1)), (70.0, WorkerExited(0, -9)), (70.0, ended)],
        [(75.0, AttemptStarted()), (75.0, WorkerExited(0, 1))],
    )
    found = [
        (period.start, {part: spent / S for part, spent in period.parts.items() if spent}) for period in band(logs)
    ]
    assert found == [
        (0.0, {"python": 2.0}),
        (2.0, {"joining": 7.0}),
        (9.0, {"devices": 1.0}),
        (10.0, {"set-up": 15.0, "compiling": 5.0}),
        (30.0, {"compiling": 20.0}),
        (50.0, {"steps": 10.0, "repeated": 10.0}),
        (70.0, {"hosts": 5.0}),
    ]


def test_a_line_at_the_end_names_what_took_most_of_the_rest():
    parts = {"steps": 931 * S, "compiling": 32 * S, "repeated": 19 * S, "data": 10 * S, "stopping": 8 * S}
    made = Goodput(1000 * S, parts, attempts=3, late_rank=3)
    lost = "3.2 % compiling, 1.9 % repeated steps after 2 restarts, 1.0 % rank 3 late, 0.8 % other"
    assert format_goodput(made) == f"goodput 93.1 % of 16 min 40 s: {lost}"
    assert is_worth_a_line(made)
    assert not is_worth_a_line(Goodput(59 * S, {"steps": 59 * S}, attempts=1))
    assert not is_worth_a_line(Goodput(990 * S, {"unknown": 990 * S}, attempts=3))
