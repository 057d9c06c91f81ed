"""A job without any sign of life is told of once, and stopped when its time is over."""

import pytest

from jaxrun.head.hang_detectors import StallDetector
from jaxrun.protocol.agent_messages import SnapshotPurpose, SnapshotReply
from jaxrun.protocol.flight import Flight
from jaxrun.protocol.flight_file import EVERY_CALL

IN_JAX = """Thread 0x1 (most recent call first):
  File "/v/lib/python3.11/site-packages/jax/_src/array.py", line 1 in _value
  File "/home/me/train.py", line 2 in <module>
"""
TRACING = IN_JAX.replace("line 1 in _value", "line 7 in trace")
SILENT = {"stall": 60.0}


def test_without_a_sign_of_life_the_job_is_warned_once_and_stopped(simulate):
    job = simulate(3, **SILENT).run()
    job.wait(59)
    assert job.ending is None and len(job.said) == 1
    at, text = job.said[0]
    assert 30 <= at <= 46 and "no output, no call and no CPU time in any rank" in text and "after 60 s of it" in text
    job.wait(20)
    assert job.ending.reason == "stall" and set(job.ending.stacks) == {0, 1, 2}
    assert 60 <= job.ending.decided_at <= 62 and job.kills() != []


def test_without_the_option_nobody_looks(simulate):
    job = simulate(3).run().wait(10_000)
    assert job.ending is None and job.head.deadline() is None


@pytest.mark.parametrize("sign", ["cpu", "written"])
def test_a_sign_of_life_is_enough(simulate, sign):
    job = simulate(3, **SILENT).run()
    setattr(job, sign, lambda now: now)  # one core's time; a byte each second
    job.wait(1000)
    assert job.ending is None and job.said == []


def test_a_little_time_of_threads_that_only_wait_is_no_sign(simulate):
    job = simulate(3, **SILENT).run()
    job.cpu = lambda now: 0.01 * now
    assert job.wait(80).ending.reason == "stall"


def test_what_was_silent_for_long_and_goes_on_may_be_silent_again(simulate):
    job = simulate(3, **SILENT).run()
    job.written = lambda now: int(now > 50)
    job.wait(100)
    assert job.ending is None and len(job.said) == 2
    assert 105 < job.wait(100).ending.decided_at < 140


def test_a_rank_that_ends_is_a_sign_of_life(simulate):
    job = simulate(3, **SILENT).run()
    job.wait(50)
    job.done(2)
    job.exit(0, 2).wait(50)
    assert job.ending is None


def test_the_verdict_says_it_with_the_places(simulate):
    from jaxrun.verdict import decide

    job = simulate(3, **SILENT).run()
    job.wait(100)
    told = decide.decide(job.ending, job.hosts, started=0.0, ended=job.finished_at)
    assert told.exit_code == 124 and told.outcome == "stall" and "no progress" in told.headline
    assert any("3 ranks" in line for line in told.details)


def look(dump, cpu, **flight):
    flight = Flight(level=EVERY_CALL, **flight)
    return SnapshotReply(SnapshotPurpose.STALL, {0: dump}, {0: ""}, {0: cpu}, {0: 0}, {0: flight})


def idle_after(*looks):
    stall = StallDetector(60.0, 0.0)
    return [stall.update(taken, 15.0 * (turn + 1)) for turn, taken in enumerate(looks)][-1]


def test_polling_in_jax_is_no_sign_of_life():
    assert idle_after(look(IN_JAX, 1.0), look(IN_JAX, 16.0), look(IN_JAX, 31.0)) == 45.0


@pytest.mark.parametrize(
    "second",
    [
        look(TRACING, 16.0),
        look(IN_JAX, 16.0, compiling=("jit(step)", 3.0)),
        look(IN_JAX, 16.0, call_counts={"0-3": 5}),
        SnapshotReply(SnapshotPurpose.STALL, {0: IN_JAX}, {0: ""}, {0: 16.0}, {0: 0}),
    ],
    ids=["another place", "compiles", "a call", "no recorder"],
)
def test_computing_in_jax_is_one(second):
    first = look(IN_JAX, 1.0, call_counts={"0-3": 4})
    assert idle_after(first, second) == 0.0
