"""A rank has left early: are the others stuck?"""

from jaxrun.head.hang_detectors import EarlyExitDetector
from jaxrun.protocol.agent_messages import SnapshotPurpose, SnapshotReply

JAX = """Thread 0x1 (most recent call first):
  File "/v/lib/python3.11/site-packages/jax/_src/array.py", line 1 in _value
  File "/home/me/train.py", line 2 in <module>
"""
USER = """Thread 0x1 (most recent call first):
  File "/v/lib/python3.11/queue.py", line 1 in get
  File "/home/me/train.py", line 2 in <module>
"""
FUTEX = {1: "futex_wait_queue", 2: "futex_wait_queue"}


def _look(watch, now, dumps, cpu, waits=FUTEX, left_behind=False):
    return watch.check(SnapshotReply(SnapshotPurpose.EARLY_EXIT, dumps, waits, cpu), now, left_behind=left_behind)


def _looks(*looks, **more):
    """The answers to looks of (now, dumps, CPU seconds); the first rank has finished at 0."""
    watch = EarlyExitDetector(0.0, has_calls=False)
    return [_look(watch, *look, **more) for look in looks]


STUCK = {1: JAX, 2: JAX}


def test_two_idle_looks_in_jax_are_needed():
    idle = {1: 4.0, 2: 5.0}
    assert _looks((10.0, STUCK, idle), (12.0, STUCK, idle)) == [False, True]


def test_a_rank_that_computes_is_not_stuck():
    assert _looks((10.0, STUCK, {1: 4.0, 2: 5.0}), (12.0, STUCK, {1: 4.0, 2: 5.5}))[1] is False


def test_a_little_cpu_time_is_no_work():
    assert _looks((10.0, STUCK, {1: 4.0, 2: 5.0}), (12.0, STUCK, {1: 4.09, 2: 5.0}))[1] is True


def test_one_rank_outside_of_jax_may_still_come():
    idle = {1: 4.0, 2: 5.0}
    mixed = {1: JAX, 2: USER}
    assert _looks((10.0, STUCK, idle), (12.0, mixed, idle), (22.0, STUCK, idle), (24.0, STUCK, idle)) == [
        False,
        False,
        False,
        True,
    ]


def test_a_rank_that_does_not_answer_is_not_judged():
    idle = {1: 4.0, 2: 5.0}
    silent = {1: JAX, 2: ""}
    assert _looks((10.0, silent, idle), (12.0, silent, idle)) == [False, False]
    assert _looks((10.0, {}, {}), (12.0, {}, {})) == [False, False]


def test_the_kernel_must_say_that_they_sleep():
    idle = {1: 4.0, 2: 5.0}
    running = {1: "futex_wait_queue", 2: ""}
    assert _looks((10.0, STUCK, idle), (12.0, STUCK, idle), waits=running) == [False, False]


def test_the_second_look_comes_soon_only_if_the_first_was_suspicious():
    watch = EarlyExitDetector(0.0, has_calls=False)
    assert watch.next_check_s == 10.0
    _look(watch, 10.0, {1: JAX}, {1: 1.0})
    assert watch.next_check_s == 2.0
    _look(watch, 12.0, {1: USER}, {1: 1.0})
    assert watch.next_check_s == 10.0


def test_who_has_gone_on_without_a_finished_rank_is_stuck_soon_even_if_it_polls():
    busy = {"waits": {1: "", 2: ""}, "left_behind": True}
    assert EarlyExitDetector(0.0, has_calls=True).next_check_s == 1.0
    assert _looks((1.0, STUCK, {1: 4.0, 2: 5.0}), (3.0, STUCK, {1: 6.0, 2: 7.0}), **busy) == [False, True]
    elsewhere = {1: JAX, 2: USER}
    assert _looks((1.0, elsewhere, {1: 4.0, 2: 5.0}), (3.0, elsewhere, {1: 6.0, 2: 7.0}), **busy) == [False, False]


def test_who_may_only_be_late_is_looked_at_after_ten_seconds():
    watch = EarlyExitDetector(100.0, has_calls=True)
    assert not _look(watch, 101.0, STUCK, {1: 4.0, 2: 5.0}) and watch.next_check_s == 9.0
    assert not _look(watch, 110.0, STUCK, {1: 4.0, 2: 5.0}) and watch.next_check_s == 2.0
    assert _look(watch, 112.0, STUCK, {1: 4.0, 2: 5.0})
