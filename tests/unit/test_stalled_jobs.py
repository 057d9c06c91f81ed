"""A job that stalls: it is told of, and stopped where that was asked for."""

from pathlib import Path

import pytest

from jaxrun.diagnosis.snapshot import Snapshot
from jaxrun.protocol.worker_messages import ChildForked
from jaxrun.verdict.decide import decide
from jaxrun.verdict.stall_notice import format_stall_notice

IN_JAX = """Thread 0x1 (most recent call first):
  File "/v/lib/python3.11/site-packages/jax/_src/array.py", line 1 in _value
  File "/home/me/train.py", line 2 in <module>
"""
SILENT = {"stall": 60.0}


def test_without_progress_the_job_is_warned_once_and_stopped(simulate):
    job = simulate(3, **SILENT).run()
    job.wait(59)
    assert job.outcome is None and len(job.printed) == 1
    at, text = job.printed[0]
    assert 30 <= at <= 46 and text.startswith("no progress for ") and "after 60 s of it" in text
    job.wait(20)
    assert job.outcome.reason == "stall" and set(job.outcome.stacks) == {0, 1, 2}
    assert 60 <= job.outcome.decided_at <= 62 and job.kills() != []


def test_without_either_option_nothing_is_checked(simulate):
    job = simulate(3).run().wait(10_000)
    assert job.outcome is None and job.head.deadline() is None


IN_POOL = """Thread 0x1 (most recent call first):
  File "/usr/lib/python3.13/multiprocessing/pool.py", line 367 in map
  File "/home/me/train.py", line 86 in <module>
"""


@pytest.mark.parametrize("limits", [SILENT, {"job": 60.0}])
def test_a_job_that_ends_while_it_waits_for_forked_children_names_the_fork(simulate, limits):
    job = simulate(2, **limits).run().handle(ChildForked(1, 1.0, "data.py:12 make_pool"))
    job.stacks = {0: IN_POOL, 1: IN_POOL}
    job.wait(90)
    verdict = decide(job.outcome, job.hosts, started=0.0, ended=job.now)
    assert "forked at data.py:12 make_pool" in " ".join("\n".join(verdict.details).split())


@pytest.mark.parametrize("sign", ["cpu", "written"])
def test_progress_of_one_kind_is_enough(simulate, sign):
    job = simulate(3, **SILENT).run()
    setattr(job, sign, lambda now: now)  # one core's time; a byte each second
    job.wait(1000)
    assert job.outcome is None and job.printed == []


def test_a_little_time_of_threads_that_only_wait_is_no_progress(simulate):
    job = simulate(3, **SILENT).run()
    job.cpu = lambda now: 0.01 * now
    assert job.wait(80).outcome.reason == "stall"


def test_a_job_that_was_silent_for_long_and_goes_on_may_be_silent_again(simulate):
    job = simulate(3, **SILENT).run()
    job.written = lambda now: int(now > 50)
    job.wait(100)
    assert job.outcome is None and len(job.printed) == 2
    assert 105 < job.wait(100).outcome.decided_at < 140


def test_a_rank_that_ends_is_progress(simulate):
    job = simulate(3, **SILENT).run()
    job.wait(50)
    job.done(2)
    job.exit(0, 2).wait(50)
    assert job.outcome is None


def test_the_verdict_names_the_hang_with_its_places(simulate):
    from jaxrun.verdict.decide import decide as decide_verdict

    job = simulate(3, **SILENT).run()
    job.wait(100)
    verdict = decide_verdict(job.outcome, job.hosts, started=0.0, ended=job.finished_at)
    assert verdict.exit_code == 124 and verdict.outcome == "stall" and "no progress" in verdict.headline
    assert any("3 ranks" in line for line in verdict.details)


IN_LOCK = IN_JAX.replace("site-packages/jax/_src/array.py", "threading.py").replace("_value", "wait")


def test_ranks_that_wait_are_told_of_and_the_job_goes_on(simulate):
    job = simulate(3, stall_notice=30.0).run()
    job.stacks = {0: IN_JAX, 1: IN_JAX, 2: IN_LOCK}
    job.wait(100)
    assert [round(at, -1) for at, _ in job.printed] == [30, 60] and job.outcome is None
    assert job.lines[0] == (
        "no progress for 30 s: rank 2 waits for a lock or another of its threads (threading.wait) at "
        "train.py:2 <module>, and ranks 0-1 wait for it in JAX (train.py:2 <module>) · more: Ctrl-\\ (SIGQUIT)"
    )
    assert job.done(0, 1, 2).exit(0, 0, 1, 2).outcome.reason == "ok"


def test_a_debugger_stops_the_stall_clock(simulate):
    job = simulate(2, stall_notice=30.0, **SILENT).run()
    job.stacks = {0: IN_JAX, 1: IN_LOCK}
    job.head._snapshots.hold_stall_clock(1)
    job.wait(600)
    assert job.outcome is None and job.printed == []
    job.head._snapshots.release_stall_clock(1)
    assert job.wait(100).outcome.reason == "stall"


def test_a_notice_without_an_explanation_says_where_the_ranks_are():
    waits = {0: "futex_do_wait", 1: "futex_do_wait", 2: ""}
    snapshot = Snapshot(0.0, dict.fromkeys(range(3), "h1"), {0: IN_JAX, 1: IN_JAX, 2: ""}, waits)
    assert format_stall_notice(snapshot, 31.4, Path("runs/3")) == (
        "no progress for 31 s: ranks 0-1 are at train.py:2 <module>, in JAX: _value; "
        "rank 2 gives no answer: it blocks signals, or is about to end · more: jaxrun stacks runs/3"
    )
