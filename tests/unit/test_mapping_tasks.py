"""One Python function over many items: what is dealt, what has come, who waits."""

from __future__ import annotations

import itertools

import pytest

from jaxrun.map.tasks import Task
from jaxrun.protocol.map_messages import BatchResult

SLOW = 10.0


def answer(task, start, items, seconds=0.0, errors=None):
    task.took(BatchResult(task.number, start, list(items), errors or {}, seconds), 0, "h")


def words(error):
    return {
        "error": type(error).__name__,
        "message": str(error),
        "traceback": "",
        "notes": (),
        "status": 1,
        "time": 0.0,
        "home": "builtins",
        "exception": b"",
    }


def work(task, ranks=2, seconds=0.0):
    """Do it to its end, one errand after the other: how many items each had."""
    counts = []
    while not task.exhausted:
        start, items = task.take(ranks)
        if items:
            counts.append(len(items))
            answer(task, start, items, seconds * len(items))
    return counts


def test_results_stand_in_the_order_of_the_items():
    task = Task.over_all(b"", range(6), size=2)
    errands = [task.take(2) for _ in range(3)]
    assert task.take(2)[1] == [] and not task.over
    for start, items in reversed(errands):
        answer(task, start, [-item for item in items])
    assert task.over
    assert task.results() == [0, -1, -2, -3, -4, -5]


def test_errands_grow_until_they_take_ten_milliseconds():
    counts = work(Task(b"", iter(range(500))), seconds=0.001)
    assert counts[0] == 1
    assert max(counts) == 10


def test_slow_items_go_one_by_one():
    assert set(work(Task(b"", iter(range(5))), seconds=SLOW)) == {1}


def test_the_last_items_are_shared_by_all_ranks():
    counts = work(Task.over_all(b"", range(1000)), ranks=4)
    assert sum(counts) == 1000
    assert counts[1] == 125
    assert counts[-1] == 1


def test_a_rank_has_a_second_errand_only_if_they_are_short():
    task = Task.over_all(b"", range(100))
    assert task.errands_at_once(2) == 1
    answer(task, *task.take(2), seconds=0.001)
    assert task.errands_at_once(2) == 2
    answer(task, *task.take(2), seconds=SLOW * 100)
    assert task.errands_at_once(2) == 1


def test_an_item_that_raises_ends_a_task_and_is_named():
    task = Task.over_all(b"", range(10), size=2)
    task.take(2)
    start, items = task.take(2)
    called = []
    task.when_over(lambda: called.append(True))
    answer(task, start, items[:1], errors={1: words(ValueError("no"))})
    assert task.over and called == [True]
    with pytest.raises(Exception, match="no") as caught:
        task.results()
    assert caught.value.__notes__ == ["raised for item 3"]
    assert task.take(2)[1] == []


def test_where_results_are_asked_for_one_by_one_an_error_is_one_of_them():
    task = Task.over_all(b"", range(3), size=3, through=True)
    start, _ = task.take(1)
    answer(task, start, ["a", None, "c"], errors={1: words(ValueError("no"))})
    (a, none), (_, error), (c, nothing) = task.next_results(ordered=True)
    assert (a, none, c, nothing) == ("a", None, "c", None)
    assert str(error) == "ValueError: no"
    assert not task.consumed
    assert task.take(1)[1] == [] and task.consumed


def test_what_is_asked_for_bounds_what_is_dealt():
    task = Task(b"", itertools.count(), size=1, through=True)
    taken = list(itertools.takewhile(lambda errand: errand[1], (task.take(2) for _ in range(1000))))
    assert len(taken) < 100
    assert task.take(2)[1] == []
    answer(task, *taken[0])
    assert task.next_results(ordered=True) == [(0, None)]
    assert task.take(2)[1] == [len(taken)]


def test_order_is_kept_only_where_it_is_asked_for():
    task = Task(b"", iter(range(4)), size=2, through=True)
    task.take(1)
    answer(task, *task.take(1))
    assert task.next_results(ordered=True) is None
    assert task.next_results(ordered=False) == [(2, None), (3, None)]


def test_an_iterator_that_raises_ends_the_task():
    def items():
        yield 1
        raise OSError("no more")

    task = Task(b"", items(), size=1)
    answer(task, *task.take(1))
    assert task.take(1)[1] == []
    with pytest.raises(OSError, match="no more"):
        task.results()


def test_who_comes_late_is_told_at_once():
    task = Task.over_all(b"", [])
    task.take(1)
    called = []
    task.when_over(lambda: called.append(True))
    assert called == [True]
