"""A rank's share of a map, with a caller that is a list: on devices, in chunks, and as plain Python."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrun.protocol.map_messages import ArraySpec, MapTask, NotTraceable, Part, map_leaves
from jaxrun_runtime.gang import calls, map_share
from jaxrun_runtime.gang.compiled_function import CompiledFunction, compiled_function


class Point(NamedTuple):
    x: object
    y: object


class RankCall:
    """The rank's side of a gang call: receives `messages`, keeps what is sent."""

    def __init__(self, *messages):
        self._messages = list(messages)
        self.sent = []

    def receive(self):
        return self._messages.pop(0)

    def send(self, value, file=None):
        if any(callable(one) for one in value.content):
            raise TypeError("cannot pickle that")
        self.sent.append(value)


@pytest.fixture
def call_with(monkeypatch):
    def call_with(*messages):
        call = RankCall(*messages, None)
        monkeypatch.setattr(calls, "current_call", lambda: call)
        return call

    return call_with


FOUR = np.arange(4.0)


def task_of(function, *leaves, template=0, unpack=False, shared=(), part=4, chunk=None, key=b"", **static):
    specs = tuple(ArraySpec(np.shape(leaf)[1:], np.asarray(leaf).dtype) for leaf in leaves)
    shared = tuple(map(np.asarray, shared))
    return MapTask(key or repr(function).encode(), function, static, unpack, template, specs, shared, part, chunk)


def results_of(call_with, task, *parts):
    """The results of these parts in the containers that the function returns, and how many were in each chunk."""
    call = call_with(*parts)
    found = map_share.serve_on_devices(task)
    assert [part.start for part in call.sent] == [part.start for part in parts]
    chunks = [chunk for part in call.sent for chunk in part.content]
    leaves = [np.concatenate(column) for column in zip(*chunks, strict=True)]
    assert [(leaf.shape[1:], leaf.dtype) for leaf in leaves] == [tuple(spec) for spec in found.specs]
    return map_leaves(leaves.__getitem__, found.template), [len(chunk[0]) for chunk in chunks]


@pytest.mark.jax_version
class TestOnDevices:
    def test_parts_are_cut_into_chunks_and_answered_in_order_without_padding(self, call_with):
        xs = np.arange(17.0, dtype=np.float32)
        parts = [Part(0, [xs[:10]]), Part(30, [xs[10:]])]
        result, chunks = results_of(call_with, task_of(lambda x: 2 * x, xs, part=10, chunk=4), *parts)
        assert result.tolist() == (2 * xs).tolist()
        assert chunks == [4, 4, 2, 4, 3]

    def test_padding_repeats_an_item(self, call_with):
        """Others, such as 0, could be out of the function's domain."""
        fives = np.full(3, 5.0, np.float32)
        with jax.debug_nans(True):
            result, _ = results_of(call_with, task_of(lambda x: x / x, fives, chunk=4), Part(0, [fives]))
        assert result.tolist() == [1.0] * 3

    def test_items_and_results_may_be_trees(self, call_with):
        def f(item):
            return {"sum": item["a"] + item["b"][0], "pair": Point(item["a"], None)}

        task = task_of(f, FOUR, FOUR, template={"a": 0, "b": (1,)})
        result, _ = results_of(call_with, task, Part(0, [FOUR, 10 * FOUR]))
        assert result["sum"].tolist() == (11 * FOUR).tolist()
        assert result["pair"].x.tolist() == FOUR.tolist()
        assert result["pair"].y is None

    def test_a_shared_array_is_not_mapped(self, call_with):
        rows = np.ones((4, 3))
        task = task_of(lambda item: item[0] @ item[1], rows, template=(-1, 0), shared=[np.ones((2, 3))])
        assert results_of(call_with, task, Part(0, [rows]))[0].shape == (4, 2)

    def test_an_item_may_be_the_arguments_and_static_ones_are_python_values(self, call_with):
        def f(x, y, *, n, kind):
            return x + y * n if kind == "times" else x

        task = task_of(f, FOUR, FOUR, template=(0, 1), unpack=True, n=3, kind="times")
        assert results_of(call_with, task, Part(0, [FOUR, FOUR]))[0].tolist() == (4 * FOUR).tolist()

    def test_types_are_those_that_jax_takes_and_integers_that_do_not_fit_are_refused(self, call_with):
        narrow = task_of(lambda x: x, np.arange(2))
        assert CompiledFunction(narrow).specs == CompiledFunction(narrow).result.specs
        assert CompiledFunction(narrow).specs == (ArraySpec((), np.dtype("int32")),)
        with pytest.raises(OverflowError, match="jax_enable_x64"):
            results_of(call_with, narrow, Part(0, [np.array([1, 2**40])]))

    def test_a_chunk_that_fails_on_its_device_raises(self, call_with, monkeypatch):
        def fail(result):
            raise RuntimeError("out of memory")

        monkeypatch.setattr(np, "asarray", fail)
        call_with(Part(0, [FOUR.astype(np.float32)]))
        with pytest.raises(RuntimeError, match="out of memory"):
            map_share.serve_on_devices(task_of(lambda x: x, jnp.zeros(4)))

    def test_a_function_is_kept_for_its_next_map(self):
        function = compiled_function(task_of(lambda x: x + 1, FOUR, key=b"f"))
        assert compiled_function(task_of(lambda x: x + 1, FOUR, key=b"f", part=7, chunk=5)) is function
        assert compiled_function(task_of(lambda x: x + 1, np.ones((4, 2)), key=b"f")) is not function

    @pytest.mark.parametrize(("items", "size"), [(1, 1), (7, 7), (100, 112), (131_072, 131_072), (131_073, 81_920)])
    def test_chunks_are_equally_full_and_of_few_sizes(self, items, size):
        assert CompiledFunction(task_of(lambda x: x, FOUR.astype(np.float32))).choose_size(items) == size

    def test_a_chunk_has_fewer_items_where_each_needs_scratch_memory(self):
        def heavy(x):
            return jnp.linalg.inv(jnp.eye(20) + x).sum()

        function = CompiledFunction(task_of(heavy, FOUR))
        size = function.choose_size(4096)
        assert 20 < size < 1000
        assert function.choose_size(4096) == size


def _branches(x):
    return 1 if x > 0 else 2


@pytest.mark.jax_version
@pytest.mark.parametrize(
    "function",
    [
        _branches,
        lambda x: float(x),
        lambda x: [1, 2][x],
        lambda x: np.linalg.eigvals(x),
        lambda x: x.upper(),
        lambda x: "text",
        lambda x: {1: 2}[x],
        lambda x: jnp.arange(10)[jnp.arange(10) > x],
    ],
)
def test_a_function_that_cannot_be_traced_is_refused(function):
    with pytest.raises(NotTraceable, match=r"jax=False"):
        CompiledFunction(task_of(function, np.arange(3)))


def test_a_refusal_names_the_users_line():
    with pytest.raises(NotTraceable) as caught:
        CompiledFunction(task_of(_branches, FOUR))
    reason, where, advice = str(caught.value).splitlines()
    assert reason.startswith("JAX cannot trace _branches, so it cannot be compiled: TracerBoolConversionError: ")
    assert where.startswith(f"  at {__file__}:") and where.endswith("in _branches: return 1 if x > 0 else 2")
    assert advice.endswith("or run it as plain Python, item by item: jax=False")


@pytest.mark.parametrize(
    ("function", "error"),
    [(lambda x: x + 1 / 0, ZeroDivisionError), (lambda x: jax.tree_util.Partial(max, x), TypeError)],
    ids=["of the user's", "a result that the parent could not put together"],
)
def test_another_error_stays_what_it_is(function, error):
    with pytest.raises(error, match=r"division by zero|return a dict"):
        CompiledFunction(task_of(function, FOUR))


def test_there_is_a_result_for_each_item_which_may_be_the_arguments(call_with):
    call = call_with(Part(0, [3, (1, 2)]), Part(2, [5]))
    map_share.serve_python(str, {}, False)
    assert call.sent == [(0, ["3", "(1, 2)"]), (2, ["5"])]
    call = call_with(Part(0, [(1, 2)]))
    map_share.serve_python(lambda x, y, z: (x, y, z), {"z": 3}, True)
    assert call.sent == [(0, [(1, 2, 3)])]


@pytest.mark.parametrize(
    ("function", "note"),
    [
        (lambda x: 1 / (x - 5), "raised for item 11"),
        (lambda x: print, "while pickling what the function returned for items 10 to 12"),
    ],
)
def test_an_item_that_raises_or_whose_result_cannot_be_sent_is_named(call_with, function, note):
    call_with(Part(10, [4, 5, 6]))
    with pytest.raises((ZeroDivisionError, TypeError)) as caught:
        map_share.serve_python(function, {}, False)
    assert caught.value.__notes__ == [note]
