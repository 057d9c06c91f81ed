"""Batches of calls of a plain Python function, on a rank whose parent is a list of messages, and as pickles."""

from __future__ import annotations

import pickle

import cloudpickle
import pytest

from jaxrun.protocol.map_messages import BatchResult, CallBatch, EndOfChunks
from jaxrun_runtime.gang import calls
from jaxrun_runtime.map import python_calls


class Call:
    """The rank's side of a call of a gang: receives `messages`, keeps what is sent."""

    rank = 0

    def __init__(self, *messages):
        self._messages = list(messages)
        self.sent = []
        self.cannot_be_sent = 0

    def receive(self):
        return self._messages.pop(0)

    def send(self, value):
        if self.cannot_be_sent:
            self.cannot_be_sent -= 1
            raise TypeError("cannot pickle that")
        self.sent.append(value)


@pytest.fixture
def results_of(monkeypatch):
    def results_of(*batches, cannot_be_sent=0):
        call = Call(*batches, EndOfChunks())
        call.cannot_be_sent = cannot_be_sent
        monkeypatch.setattr(calls, "current_call", lambda: call)
        python_calls.serve()
        assert all(isinstance(result, BatchResult) for result in call.sent)
        return call.sent

    return results_of


def batch(function, *items, unpack=False, go_on=False):
    return CallBatch(cloudpickle.dumps((function, {})), unpack, list(items), go_on)


def test_there_is_a_result_for_each_item(results_of):
    again = CallBatch(None, False, [5], False)
    assert [result.results for result in results_of(batch(str, 3, 4), again)] == [["3", "4"], ["5"]]


def test_an_item_may_be_the_arguments(results_of):
    code = cloudpickle.dumps((lambda x, y, z: (x, y, z), {"z": 3}))
    assert results_of(CallBatch(code, True, [(1, 2)], False))[0].results == [(1, 2, 3)]
    assert results_of(batch(len, (1, 2)))[0].results == [2]


@pytest.mark.parametrize(("go_on", "results"), [(False, [1.0]), (True, [1.0, None, 0.5])])
def test_an_item_that_raises_is_reported_with_its_position(results_of, go_on, results):
    (result,) = results_of(batch(lambda x: 1 / x, 1, 0, 2, go_on=go_on))
    assert result.results == results
    assert list(result.errors) == [1]
    assert result.errors[1]["error"] == "ZeroDivisionError"


def test_a_function_that_cannot_be_loaded_fails_its_items(results_of):
    (result,) = results_of(CallBatch(b"no pickle", False, [1, 2], False))
    assert result.errors[0]["error"] == "UnpicklingError"


def test_results_that_cannot_be_sent_are_errors(results_of):
    (result,) = results_of(batch(str, 1), cannot_be_sent=1)
    assert result.errors[0]["message"] == "cannot pickle that"


def test_a_pickled_batch_has_a_pickled_result():
    result = pickle.loads(python_calls.run_pickled(cloudpickle.dumps(batch(str, 3, 4))))
    assert (result.results, result.errors) == (["3", "4"], {})


@pytest.mark.parametrize("data", [b"no pickle", cloudpickle.dumps(batch(lambda x: (_ for _ in ()), 1))])
def test_what_cannot_be_unpickled_or_pickled_is_an_error(data):
    result = pickle.loads(python_calls.run_pickled(data))
    assert result.errors[0]["error"] in ("UnpicklingError", "TypeError")
