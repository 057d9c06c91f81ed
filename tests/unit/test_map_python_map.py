"""A map of a plain Python function: how items are cut into batches, in which order results come, and what errors do."""

from __future__ import annotations

import itertools
import multiprocessing
from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import Any

import pytest

from jaxrun.map.python_map import BatchOutcome, PythonMap
from jaxrun.protocol.map_messages import CallBatch

SLOW_S = 10.0
Futures = Collection[Future[BatchOutcome]]


def identity(item: Any) -> Any:
    return item


class FakeExecutor:
    """Runs the oldest batch when somebody waits, or the newest; each item takes `item_s` seconds that do not pass."""

    def __init__(
        self,
        function: Callable[[Any], Any] = identity,
        processes: int = 2,
        item_s: float = 0.0,
        newest_first: bool = False,
    ) -> None:
        self.processes = processes
        self.sizes: list[int] = []
        self.most_waiting = 0
        self._function, self._item_s, self._newest_first = function, item_s, newest_first
        self._waiting: list[tuple[CallBatch, Future[BatchOutcome]]] = []

    def submit(self, batch: CallBatch) -> Future[BatchOutcome]:
        future: Future[BatchOutcome] = Future()
        self._waiting.append((batch, future))
        self.sizes.append(len(batch.items))
        self.most_waiting = max(self.most_waiting, len(self._waiting))
        return future

    def wait(self, batches: Futures, timeout: float | None) -> None:
        if timeout is not None:
            return
        batch, future = self._waiting.pop(-1 if self._newest_first else 0)
        results: list[Any] = []
        errors: dict[int, BaseException] = {}
        for place, item in enumerate(batch.items):
            try:
                results.append(self._function(item))
            except Exception as error:
                errors[place] = error
                if not batch.continue_on_error:
                    break
                results.append(None)
        future.set_result(BatchOutcome(results, errors, self._item_s * len(results)))


def fails_at_3(item: int) -> int:
    if item == 3:
        raise ValueError("no")
    return item


@pytest.mark.parametrize("newest_first", [False, True])
def test_results_come_in_the_order_of_the_items(newest_first: bool) -> None:
    executor = FakeExecutor(lambda item: -item, newest_first=newest_first)
    run = PythonMap(executor, b"", range(6), batch_size=2)
    assert run.results() == [0, -1, -2, -3, -4, -5]
    assert (run.item_count, run.largest_batch, executor.sizes) == (6, 2, [2, 2, 2])


def test_batches_grow_until_they_take_twenty_milliseconds() -> None:
    executor = FakeExecutor(item_s=0.001)
    PythonMap(executor, b"", iter(range(500))).results()
    assert executor.sizes[0] == 1
    assert max(executor.sizes) == 20


def test_batches_are_larger_where_a_large_function_travels_with_them() -> None:
    executor = FakeExecutor(item_s=0.001)
    PythonMap(executor, bytes(10**6), iter(range(2000))).results()
    assert max(executor.sizes) == pytest.approx(120, abs=1)


def test_slow_items_go_one_by_one() -> None:
    executor = FakeExecutor(item_s=SLOW_S)
    PythonMap(executor, b"", iter(range(5))).results()
    assert set(executor.sizes) == {1}


def test_the_last_items_are_shared_by_all_processes() -> None:
    executor = FakeExecutor(processes=4)
    PythonMap(executor, b"", range(1000)).results()
    assert sum(executor.sizes) == 1000
    assert executor.sizes[:5] == [1, 1, 1, 1, 125]
    assert executor.sizes[-1] == 1


@pytest.mark.parametrize(("item_s", "most"), [(0.001, 4), (SLOW_S, 2)])
def test_only_short_batches_wait_behind_others(item_s: float, most: int) -> None:
    executor = FakeExecutor(item_s=item_s)
    PythonMap(executor, b"", range(100)).results()
    assert executor.most_waiting == most


def test_an_item_that_raises_ends_a_map_and_is_named() -> None:
    executor = FakeExecutor(fails_at_3)
    with pytest.raises(ValueError, match="no") as caught:
        PythonMap(executor, b"", itertools.count(), batch_size=2).results()
    assert caught.value.__notes__ == ["raised for item 3"]
    assert len(executor.sizes) <= 6


def test_an_iterator_raises_an_items_error_in_its_place_and_goes_on() -> None:
    run = PythonMap(FakeExecutor(fails_at_3), b"", range(5), batch_size=5, continue_on_error=True)
    assert [next(run) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match="no"):
        next(run)
    assert list(run) == [4]


def test_the_results_consumed_bound_what_is_submitted() -> None:
    executor = FakeExecutor()
    run = PythonMap(executor, b"", itertools.count(), batch_size=1)
    assert list(itertools.islice(run, 50)) == list(range(50))
    assert sum(executor.sizes) <= 50 + 8 * executor.processes


def test_all_that_is_left_is_submitted_before_the_executor_is_closed() -> None:
    executor = FakeExecutor()
    run = PythonMap(executor, b"", iter(range(100)), batch_size=1)
    assert next(run) == 0
    run.submit_all()
    assert sum(executor.sizes) == 100
    assert list(run) == list(range(1, 100))


def test_order_is_kept_only_if_requested() -> None:
    executor = FakeExecutor(newest_first=True)
    assert list(PythonMap(executor, b"", range(4), batch_size=2)) == [0, 1, 2, 3]
    assert list(PythonMap(executor, b"", range(4), batch_size=2, ordered=False)) == [2, 3, 0, 1]


def test_a_caller_does_not_wait_longer_than_it_wants_to() -> None:
    run = PythonMap(FakeExecutor(), b"", range(4))
    with pytest.raises(multiprocessing.TimeoutError):
        run.next(timeout=0.001)
    assert list(run) == [0, 1, 2, 3]


def test_items_that_raise_end_the_map_after_the_results_before_them() -> None:
    def items() -> Any:
        yield 1
        raise OSError("no more")

    with pytest.raises(OSError, match="no more"):
        PythonMap(FakeExecutor(), b"", items()).results()
    run = PythonMap(FakeExecutor(), b"", items())
    assert next(run) == 1
    with pytest.raises(OSError, match="no more"):
        next(run)
    assert list(run) == []


def test_items_that_cannot_be_sent_are_named() -> None:
    class Refusing(FakeExecutor):
        def submit(self, batch: CallBatch) -> Future[BatchOutcome]:
            raise TypeError("cannot pickle that")

    with pytest.raises(TypeError, match="pickle") as caught:
        PythonMap(Refusing(), b"", range(4), batch_size=3).results()
    assert caught.value.__notes__ == ["an item of 0 to 2 cannot be sent to another process"]


def test_a_process_that_dies_ends_the_map() -> None:
    class Dying(FakeExecutor):
        def wait(self, batches: Futures, timeout: float | None) -> None:
            for batch in batches:
                batch.set_exception(RuntimeError("died"))

    with pytest.raises(RuntimeError, match="died"):
        PythonMap(Dying(), b"", range(4)).results()
    with pytest.raises(RuntimeError, match="died"):
        list(PythonMap(Dying(), b"", range(4)))


def test_no_items_have_no_results() -> None:
    assert PythonMap(FakeExecutor(), b"", []).results() == []
    assert list(PythonMap(FakeExecutor(), b"", [])) == []


def test_a_started_map_goes_on_while_nobody_waits() -> None:
    executor = FakeExecutor()
    run = PythonMap(executor, b"", itertools.count(), batch_size=1)
    run.start()
    bound = 8 * executor.processes
    for _ in range(bound):
        executor.wait((), None)
    assert len(executor.sizes) == bound
