"""A map of a plain Python function: batches, the order of results and errors, and the calls on a rank."""

from __future__ import annotations

import itertools
import multiprocessing
import pickle
from concurrent.futures import Future

import cloudpickle
import pytest

from jaxrun.frontends.map.python_map import BatchOutcome, PythonMap
from jaxrun.protocol.map_messages import BatchResult, CallBatch, EndOfChunks
from jaxrun_runtime.gang import calls
from jaxrun_runtime.map import python_calls

SLOW_S = 10.0


class FakeExecutor:
    """Runs the oldest batch when somebody waits, or the newest; each item takes `item_s` seconds that do not pass."""

    def __init__(self, function=lambda item: item, processes=2, item_s=0.0, newest_first=False):
        self.processes = processes
        self.sizes = []
        self.most_waiting = 0
        self._function, self._item_s, self._newest_first = function, item_s, newest_first
        self._waiting = []

    def submit(self, batch):
        future = Future()
        self._waiting.append((batch, future))
        self.sizes.append(len(batch.items))
        self.most_waiting = max(self.most_waiting, len(self._waiting))
        return future

    def wait(self, batches, timeout):
        if timeout is not None:
            return
        batch, future = self._waiting.pop(-1 if self._newest_first else 0)
        results, errors = [], {}
        for place, item in enumerate(batch.items):
            try:
                results.append(self._function(item))
            except Exception as error:
                errors[place] = error
                if not batch.continue_on_error:
                    break
                results.append(None)
        future.set_result(BatchOutcome(results, errors, self._item_s * len(results)))


def fails_at_3(item):
    if item == 3:
        raise ValueError("no")
    return item


@pytest.mark.parametrize("newest_first", [False, True])
def test_results_come_in_the_order_of_the_items(newest_first):
    executor = FakeExecutor(lambda item: -item, newest_first=newest_first)
    run = PythonMap(executor, b"", range(6), batch_size=2)
    assert run.results() == [0, -1, -2, -3, -4, -5]
    assert (run.item_count, run.largest_batch, executor.sizes) == (6, 2, [2, 2, 2])


def test_an_iterators_order_is_kept_only_if_requested():
    executor = FakeExecutor(newest_first=True)
    assert list(PythonMap(executor, b"", range(4), batch_size=2)) == [0, 1, 2, 3]
    assert list(PythonMap(executor, b"", range(4), batch_size=2, ordered=False)) == [2, 3, 0, 1]
    assert list(PythonMap(executor, b"", [])) == PythonMap(executor, b"", []).results() == []


@pytest.mark.parametrize(("code", "item_s", "largest"), [(0, 0.001, 20), (10**6, 0.001, 120), (0, SLOW_S, 1)])
def test_batches_grow_until_they_take_twenty_milliseconds_or_more_with_a_large_function(code, item_s, largest):
    executor = FakeExecutor(item_s=item_s)
    PythonMap(executor, bytes(code), iter(range(2000))).results()
    assert executor.sizes[0] == 1
    assert max(executor.sizes) == pytest.approx(largest, abs=code // 10**6)


def test_the_last_items_are_shared_by_all_processes():
    executor = FakeExecutor(processes=4)
    PythonMap(executor, b"", range(1000)).results()
    assert sum(executor.sizes) == 1000
    assert executor.sizes[:5] == [1, 1, 1, 1, 125]
    assert executor.sizes[-1] == 1


@pytest.mark.parametrize(("item_s", "most"), [(0.001, 4), (SLOW_S, 2)])
def test_only_short_batches_wait_behind_others(item_s, most):
    executor = FakeExecutor(item_s=item_s)
    PythonMap(executor, b"", range(100)).results()
    assert executor.most_waiting == most


def test_an_item_that_raises_ends_a_map_and_is_named_and_an_iterator_goes_on():
    executor = FakeExecutor(fails_at_3)
    with pytest.raises(ValueError, match="no") as caught:
        PythonMap(executor, b"", itertools.count(), batch_size=2).results()
    assert caught.value.__notes__ == ["raised for item 3"]
    assert len(executor.sizes) <= 6
    run = PythonMap(FakeExecutor(fails_at_3), b"", range(5), batch_size=5, continue_on_error=True)
    assert [next(run) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match="no"):
        next(run)
    assert list(run) == [4]


def test_the_results_consumed_bound_what_is_submitted():
    executor = FakeExecutor()
    run = PythonMap(executor, b"", itertools.count(), batch_size=1)
    assert list(itertools.islice(run, 50)) == list(range(50))
    assert sum(executor.sizes) <= 50 + 8 * executor.processes


def test_a_started_map_goes_on_while_nobody_waits_and_all_is_submitted_on_request():
    executor = FakeExecutor()
    run = PythonMap(executor, b"", iter(range(100)), batch_size=1)
    run.start()
    bound = 8 * executor.processes
    for _ in range(bound):
        executor.wait((), None)
    assert len(executor.sizes) == bound
    run.submit_all()
    assert sum(executor.sizes) == 100
    assert list(run) == list(range(100))


def test_a_caller_does_not_wait_longer_than_it_wants_to():
    run = PythonMap(FakeExecutor(), b"", range(4))
    with pytest.raises(multiprocessing.TimeoutError):
        run.next(timeout=0.001)
    assert list(run) == [0, 1, 2, 3]


def test_items_that_raise_end_the_map_after_the_results_before_them():
    def items():
        yield 1
        raise OSError("no more")

    with pytest.raises(OSError, match="no more"):
        PythonMap(FakeExecutor(), b"", items()).results()
    run = PythonMap(FakeExecutor(), b"", items())
    assert next(run) == 1
    with pytest.raises(OSError, match="no more"):
        next(run)
    assert list(run) == []


def test_items_that_cannot_be_sent_are_named():
    class Refusing(FakeExecutor):
        def submit(self, batch):
            raise TypeError("cannot pickle that")

    with pytest.raises(TypeError, match="pickle") as caught:
        PythonMap(Refusing(), b"", range(4), batch_size=3).results()
    assert caught.value.__notes__ == ["an item of 0 to 2 cannot be sent to another process"]


@pytest.mark.parametrize("collect", [PythonMap.results, list])
def test_a_process_that_dies_ends_the_map(collect):
    class Dying(FakeExecutor):
        def wait(self, batches, timeout):
            for batch in batches:
                batch.set_exception(RuntimeError("died"))

    with pytest.raises(RuntimeError, match="died"):
        collect(PythonMap(Dying(), b"", range(4)))


# ---- on a rank


class Call:
    """The rank's side of a call of a gang: receives `messages`, keeps what is sent, the first `refused` excepted."""

    rank = 0

    def __init__(self, messages, refused):
        self._messages, self._refused = list(messages), refused
        self.sent = []

    def receive(self):
        return self._messages.pop(0)

    def send(self, value):
        if self._refused:
            self._refused -= 1
            raise TypeError("cannot pickle that")
        self.sent.append(value)


@pytest.fixture
def results_of(monkeypatch):
    def results_of(*batches, refused=0):
        call = Call([*batches, EndOfChunks()], refused)
        monkeypatch.setattr(calls, "current_call", lambda: call)
        python_calls.serve()
        assert all(isinstance(result, BatchResult) for result in call.sent)
        return call.sent

    return results_of


def batch(function, *items, continue_on_error=False):
    return CallBatch(cloudpickle.dumps((function, {})), False, list(items), continue_on_error)


def test_there_is_a_result_for_each_item_which_may_be_the_arguments(results_of):
    again = CallBatch(None, False, [5], False)
    assert [result.results for result in results_of(batch(str, 3, 4), again)] == [["3", "4"], ["5"]]
    code = cloudpickle.dumps((lambda x, y, z: (x, y, z), {"z": 3}))
    assert results_of(CallBatch(code, True, [(1, 2)], False))[0].results == [(1, 2, 3)]
    assert results_of(batch(len, (1, 2)))[0].results == [2]


@pytest.mark.parametrize(("go_on", "results"), [(False, [1.0]), (True, [1.0, None, 0.5])])
def test_an_item_that_raises_is_reported_with_its_position(results_of, go_on, results):
    (result,) = results_of(batch(lambda x: 1 / x, 1, 0, 2, continue_on_error=go_on))
    assert result.results == results
    assert list(result.errors) == [1]
    assert result.errors[1]["error"] == "ZeroDivisionError"


def test_what_cannot_be_loaded_or_sent_is_an_error(results_of):
    (result,) = results_of(CallBatch(b"no pickle", False, [1, 2], False))
    assert result.errors[0]["error"] == "UnpicklingError"
    (result,) = results_of(batch(str, 1), refused=1)
    assert result.errors[0]["message"] == "cannot pickle that"


def test_a_pickled_batch_has_a_pickled_result():
    result = pickle.loads(python_calls.run_pickled(cloudpickle.dumps(batch(str, 3, 4))))
    assert (result.results, result.errors) == (["3", "4"], {})
    for data, error in ((b"no pickle", "UnpicklingError"), (batch(lambda x: (_ for _ in ()), 1), "TypeError")):
        pickled = data if isinstance(data, bytes) else cloudpickle.dumps(data)
        assert pickle.loads(python_calls.run_pickled(pickled)).errors[0]["error"] == error
