"""map without processes: the items from the user's arguments, and a rank's share, with a parent that is a list."""

from collections import OrderedDict
from fractions import Fraction
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrun.errors import UsageError
from jaxrun.frontends.gang.map_items import parse_items
from jaxrun.protocol.map_messages import ArraySpec, MapTask, NotTraceable, Part, map_leaves
from jaxrun_runtime.gang import calls, map_share
from jaxrun_runtime.gang.compiled_function import CompiledFunction, compiled_function


class Point(NamedTuple):
    x: object
    y: object


# ---- items


def shapes(items):
    return [leaf.shape for leaf in items.mapped]


def test_the_first_axis_of_each_array_counts_the_items():
    items = parse_items(np.ones((5, 2)), 0)
    assert (items.template, items.count, shapes(items), items.specs[0].shape) == (0, 5, [(5, 2)], (2,))
    items = parse_items({"b": np.ones(3), "a": Point(np.zeros((3, 2)), None)}, 0)
    assert (items.template, shapes(items)) == ({"b": 0, "a": Point(1, None)}, [(3,), (3, 2)])


@pytest.mark.parametrize(
    ("in_axes", "template", "mapped", "shared"),
    [
        ((None, 1, 0), (-1, 0, {"c": 1, "d": (2,)}), [(3, 7), (3,), (3, 4)], [(2, 3)]),
        ((None, 1, {"c": None, "d": 0}), (-1, 0, {"c": -2, "d": (1,)}), [(3, 7), (3, 4)], [(2, 3), (3,)]),
    ],
)
def test_an_axis_may_stand_for_a_tree_and_what_is_not_mapped_is_shared(in_axes, template, mapped, shared):
    xs = (np.ones((2, 3)), np.zeros((7, 3)), {"c": [1, 2, 3], "d": (np.ones((3, 4)),)})
    items = parse_items(xs, in_axes)
    assert (items.template, shapes(items)) == (template, mapped)
    assert [leaf.shape for leaf in items.shared] == shared


@pytest.mark.parametrize(
    ("xs", "template", "leaf_shapes"),
    [
        ([1, 2, 3], 0, [(3,)]),
        ([np.ones(2), np.ones(2), np.ones(2)], 0, [(3, 2)]),
        ([[1, 2], [3, 4], [5, 6]], 0, [(3, 2)]),
        ([(1, np.ones(2)), (2, np.ones(2))], (0, 1), [(2,), (2, 2)]),
        ([{"b": 1, "a": 2.5}], {"b": 0, "a": 1}, [(1,), (1,)]),
        ([Point(1, None), Point(2, None)], Point(0, None), [(2,)]),
    ],
)
def test_a_list_of_items_is_stacked(xs, template, leaf_shapes):
    items = parse_items(xs, 0)
    assert (items.template, shapes(items)) == (template, leaf_shapes)


@pytest.mark.parametrize(
    "xs",
    [
        ["a", "b"],
        [object()],
        [Fraction(1, 2)],
        [1, "a"],
        [np.ones(2), np.ones(3)],
        [[1, 2], [3]],
        [(1, 2), (3,)],
        [{"a": 1}, {"b": 1}],
        {"a": np.array(["x"])},
        np.array([object()]),
    ],
)
def test_what_is_no_array_of_numbers_is_not_for_jax(xs):
    with pytest.raises(NotTraceable):
        parse_items(xs, 0)


@pytest.mark.parametrize(
    ("xs", "in_axes", "text"),
    [
        ((np.ones(3), np.ones(4)), 0, r"\[3, 4\]"),
        (np.ones(3), None, "nothing to map over"),
        (np.ones(3), 1, r"shape \(3,\) has no axis 1"),
        (np.ones(3), (0, 0), "where there is one array"),
        (np.float32(1), 0, "no axis 0"),
        ([1, 2], 1, "one axis"),
        ([None, None], 0, "nothing in an item"),
        ([()], 0, "nothing in an item"),
        *[
            ({"a": np.ones(3), "b": (np.ones(3), np.ones(3))}, axes, "in_axes has")
            for axes in ({"a": 0}, (0, 0), {"a": (0, 0), "b": 0}, {"a": 0, "b": (0,)}, {"a": "x", "b": 0})
        ],
    ],
)
def test_axes_that_do_not_fit_are_a_usage_error(xs, in_axes, text):
    with pytest.raises(UsageError, match=text):
        parse_items(xs, in_axes)


containers = st.recursive(
    st.text(max_size=1) | st.none(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=2), inner, max_size=3)
        | st.dictionaries(st.text(max_size=2), inner, max_size=3).map(OrderedDict)
        | st.tuples(inner, inner).map(lambda pair: Point(*pair))
    ),
    max_leaves=8,
)


@pytest.mark.jax_version
@given(containers)
def test_trees_are_rebuilt_as_jax_does(tree):
    flat, structure = jax.tree.flatten(tree)
    rebuilt = map_leaves(flat.__getitem__, jax.tree.unflatten(structure, range(len(flat))))
    assert rebuilt == tree
    assert jax.tree.structure(rebuilt) == structure


# ---- a rank's share


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


# ---- plain Python


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
