"""A rank that has finished may be missed: when others wait for it in vain."""

from jaxrun.head.early_exit_detector import EarlyExitDetector
from jaxrun.protocol.snapshot_messages import SnapshotPurpose, SnapshotReply

IN_JAX = """Thread 0x1 (most recent call first):
  File "/v/lib/python3.11/site-packages/jax/_src/array.py", line 1 in _value
  File "/home/me/train.py", line 2 in <module>
"""
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
