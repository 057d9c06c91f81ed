"""A job that makes no progress, or waits for ranks that have finished, is found to hang."""

import pytest

from jaxrun.head.hang_detectors import EarlyExitDetector, StallDetector
from jaxrun.protocol.agent_messages import SnapshotPurpose, SnapshotReply
from jaxrun.protocol.flight import Flight
from jaxrun.protocol.flight_file import EVERY_CALL
from jaxrun.protocol.worker_messages import ChildForked
from jaxrun.verdict.decide import decide

IN_JAX = """Thread 0x1 (most recent call first):
  File "/v/lib/python3.11/site-packages/jax/_src/array.py", line 1 in _value
  File "/home/me/train.py", line 2 in <module>
"""
TRACING = IN_JAX.replace("line 1 in _value", "line 7 in trace")
SILENT = {"stall": 60.0}


def test_without_progress_the_job_is_warned_once_and_stopped(simulate):
    job = simulate(3, **SILENT).run()
    job.wait(59)
    assert job.outcome is None and len(job.printed) == 1
    at, text = job.printed[0]
    assert 30 <= at <= 46 and "no output, no call and no CPU time in any rank" in text and "after 60 s of it" in text
    job.wait(20)
    assert job.outcome.reason == "stall" and set(job.outcome.stacks) == {0, 1, 2}
    assert 60 <= job.outcome.decided_at <= 62 and job.kills() != []


def test_without_the_option_nothing_is_checked(simulate):
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


def test_what_was_silent_for_long_and_goes_on_may_be_silent_again(simulate):
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


def snapshot(dump, cpu, **flight):
    flight = Flight(level=EVERY_CALL, **flight)
    return SnapshotReply(SnapshotPurpose.STALL, {0: dump}, {0: ""}, {0: cpu}, {0: 0}, {0: flight})


def idle_after(*snapshots):
    stall = StallDetector(60.0, 0.0)
    return [stall.update(reply, 15.0 * (turn + 1)) for turn, reply in enumerate(snapshots)][-1]


def test_polling_in_jax_is_no_progress():
    assert idle_after(snapshot(IN_JAX, 1.0), snapshot(IN_JAX, 16.0), snapshot(IN_JAX, 31.0)) == 45.0


@pytest.mark.parametrize(
    "second",
    [
        snapshot(TRACING, 16.0),
        snapshot(IN_JAX, 16.0, compiling=("jit(step)", 3.0)),
        snapshot(IN_JAX, 16.0, call_counts={"0-3": 5}),
        SnapshotReply(SnapshotPurpose.STALL, {0: IN_JAX}, {0: ""}, {0: 16.0}, {0: 0}),
    ],
    ids=["another place", "compiles", "a call", "no recorder"],
)
def test_computing_in_jax_is_progress(second):
    first = snapshot(IN_JAX, 1.0, call_counts={"0-3": 4})
    assert idle_after(first, second) == 0.0


# ---- early exit


IN_QUEUE = """Thread 0x1 (most recent call first):
  File "/v/lib/python3.11/queue.py", line 1 in get
  File "/home/me/train.py", line 2 in <module>
"""
FUTEX = {1: "futex_wait_queue", 2: "futex_wait_queue"}


def _check(detector, now, dumps, cpu, waits=FUTEX, left_behind=False):
    return detector.check(SnapshotReply(SnapshotPurpose.EARLY_EXIT, dumps, waits, cpu), now, left_behind=left_behind)


def _check_all(*snapshots, **more):
    """What successive snapshots (now, dumps, CPU seconds) show; the first rank has finished at 0."""
    detector = EarlyExitDetector(0.0, has_calls=False)
    return [_check(detector, *snapshot, **more) for snapshot in snapshots]


STUCK = {1: IN_JAX, 2: IN_JAX}


def test_two_idle_snapshots_in_jax_are_needed():
    idle = {1: 4.0, 2: 5.0}
    assert _check_all((10.0, STUCK, idle), (12.0, STUCK, idle)) == [False, True]


def test_a_rank_that_computes_is_not_stuck():
    assert _check_all((10.0, STUCK, {1: 4.0, 2: 5.0}), (12.0, STUCK, {1: 4.0, 2: 5.5}))[1] is False


def test_a_little_cpu_time_is_no_work():
    assert _check_all((10.0, STUCK, {1: 4.0, 2: 5.0}), (12.0, STUCK, {1: 4.09, 2: 5.0}))[1] is True


def test_one_rank_outside_of_jax_may_still_come():
    idle = {1: 4.0, 2: 5.0}
    mixed = {1: IN_JAX, 2: IN_QUEUE}
    assert _check_all((10.0, STUCK, idle), (12.0, mixed, idle), (22.0, STUCK, idle), (24.0, STUCK, idle)) == [
        False,
        False,
        False,
        True,
    ]


def test_a_rank_that_does_not_answer_is_not_judged():
    idle = {1: 4.0, 2: 5.0}
    silent = {1: IN_JAX, 2: ""}
    assert _check_all((10.0, silent, idle), (12.0, silent, idle)) == [False, False]
    assert _check_all((10.0, {}, {}), (12.0, {}, {})) == [False, False]


def test_ranks_count_as_hung_only_if_the_kernel_reports_them_asleep():
    idle = {1: 4.0, 2: 5.0}
    running = {1: "futex_wait_queue", 2: ""}
    assert _check_all((10.0, STUCK, idle), (12.0, STUCK, idle), waits=running) == [False, False]


def test_the_second_check_comes_soon_only_if_the_first_was_suspicious():
    detector = EarlyExitDetector(0.0, has_calls=False)
    assert detector.next_check_s == 10.0
    _check(detector, 10.0, {1: IN_JAX}, {1: 1.0})
    assert detector.next_check_s == 2.0
    _check(detector, 12.0, {1: IN_QUEUE}, {1: 1.0})
    assert detector.next_check_s == 10.0


def test_ranks_that_went_on_without_a_finished_rank_are_stuck_soon_even_if_they_poll():
    busy = {"waits": {1: "", 2: ""}, "left_behind": True}
    assert EarlyExitDetector(0.0, has_calls=True).next_check_s == 1.0
    assert _check_all((1.0, STUCK, {1: 4.0, 2: 5.0}), (3.0, STUCK, {1: 6.0, 2: 7.0}), **busy) == [False, True]
    elsewhere = {1: IN_JAX, 2: IN_QUEUE}
    assert _check_all((1.0, elsewhere, {1: 4.0, 2: 5.0}), (3.0, elsewhere, {1: 6.0, 2: 7.0}), **busy) == [False, False]


def test_ranks_that_may_only_be_late_are_checked_after_ten_seconds():
    detector = EarlyExitDetector(100.0, has_calls=True)
    assert not _check(detector, 101.0, STUCK, {1: 4.0, 2: 5.0}) and detector.next_check_s == 9.0
    assert not _check(detector, 110.0, STUCK, {1: 4.0, 2: 5.0}) and detector.next_check_s == 2.0
    assert _check(detector, 112.0, STUCK, {1: 4.0, 2: 5.0})
