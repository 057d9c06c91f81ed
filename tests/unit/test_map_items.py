"""The items of a map from the user's arguments, trees as JAX flattens them, and the functions that are for JAX."""

from __future__ import annotations

import functools
import math
from collections import OrderedDict, abc
from fractions import Fraction
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrun.errors import UsageError
from jaxrun.frontends.map import pytree as trees
from jaxrun.frontends.map.items import NotTraceable, parse_chunk_size, parse_items, stack_items
from jaxrun.frontends.map.jax_detection import uses_jax


class Point(NamedTuple):
    x: object
    y: object


def shapes(items):
    return [leaf.shape for leaf in items.mapped]


def test_the_first_axis_of_each_array_counts_the_items():
    items = parse_items(np.ones((5, 2)), 0)
    assert (items.template, items.count, shapes(items), items.specs[0].shape) == (0, 5, [(5, 2)], (2,))
    items = parse_items({"b": np.ones(3), "a": Point(np.zeros((3, 2)), None)}, 0)
    assert (items.template, shapes(items)) == ({"b": 1, "a": Point(0, None)}, [(3, 2), (3,)])


def test_what_is_not_mapped_is_numbered_above_what_is():
    items = parse_items((np.ones((2, 3)), np.zeros((7, 3)), [1, 2, 3]), (None, 1, 0))
    assert items.template == (2, 0, 1)
    assert shapes(items) == [(3, 7), (3,)]
    assert [leaf.shape for leaf in items.shared] == [(2, 3)]


@pytest.mark.parametrize(
    ("xs", "template", "leaf_shapes"),
    [
        ([1, 2, 3], 0, [(3,)]),
        (range(4), 0, [(4,)]),
        ((x for x in (1.0, 2.0)), 0, [(2,)]),
        ([np.ones(2), np.ones(2), np.ones(2)], 0, [(3, 2)]),
        ([[1, 2], [3, 4], [5, 6]], 0, [(3, 2)]),
        ([(1, np.ones(2)), (2, np.ones(2))], (0, 1), [(2,), (2, 2)]),
        ([{"b": 1, "a": 2.5}], {"b": 1, "a": 0}, [(1,), (1,)]),
    ],
)
def test_a_list_of_items_is_stacked(xs, template, leaf_shapes):
    items = parse_items(xs, 0)
    assert (items.template, shapes(items)) == (template, leaf_shapes)


def test_python_numbers_are_distinguished_from_arrays():
    assert stack_items([1, 2]).exact == (True,)
    assert stack_items([np.int64(1), np.int64(2)]).exact == (False,)
    assert parse_items({"a": [1, 2], "b": np.array([1, 2])}, 0).exact == (True, False)


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
        (np.float32(1), 0, "no axis 0"),
        ([1, 2], 1, "one axis"),
        ([None, None], 0, "nothing in an item"),
        ([()], 0, "nothing in an item"),
    ],
)
def test_axes_that_do_not_fit_are_a_usage_error(xs, in_axes, text):
    with pytest.raises(UsageError, match=text):
        parse_items(xs, in_axes)


def test_a_chunk_is_chosen_or_a_number():
    assert [parse_chunk_size(chunk) for chunk in ("auto", 1, 300)] == [None, 1, 300]
    for chunk in (0, -1, True, 2.5, "big", None):
        with pytest.raises(UsageError, match="auto"):
            parse_chunk_size(chunk)


# ---- trees

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
@settings(deadline=None, max_examples=50)
@given(containers, containers)
def test_trees_are_flattened_rebuilt_and_compared_as_jax_does(tree, other):
    assert trees.leaves(tree) == jax.tree.leaves(tree)
    flat, structure = jax.tree.flatten(tree)
    rebuilt = trees.unflatten(jax.tree.unflatten(structure, range(len(flat))), flat)
    assert rebuilt == tree
    assert jax.tree.structure(rebuilt) == structure
    assert trees.same_structure(tree, other) == (structure == jax.tree.structure(other))
    assert trees.same_structure(tree, rebuilt)


def test_a_list_of_numbers_is_one_leaf():
    assert trees.leaves({"a": [1, 2.5], "b": [[1], [2]], "c": ["x", 3]}) == [[1, 2.5], [[1], [2]], "x", 3]


@pytest.mark.parametrize(
    ("axes", "each"),
    [
        (0, {"a": 0, "b": (0, 0)}),
        (None, {"a": None, "b": (None, None)}),
        ({"a": None, "b": 1}, {"a": None, "b": (1, 1)}),
        ({"a": 2, "b": (None, 0)}, {"a": 2, "b": (None, 0)}),
        ({"a": 2, "b": [None, 0]}, {"a": 2, "b": (None, 0)}),
    ],
)
def test_axes_are_a_prefix_as_for_vmap(axes, each):
    assert trees.map_with_axes(lambda leaf, axis: axis, {"a": "x", "b": ("y", "z")}, axes) == each


@pytest.mark.parametrize("axes", [{"a": 0}, (0, 0), {"a": (0, 0), "b": 0}, {"a": 0, "b": (0,)}, {"a": "x", "b": 0}])
def test_axes_that_do_not_fit_are_refused(axes):
    with pytest.raises(UsageError, match="in_axes"):
        trees.map_with_axes(lambda leaf, axis: axis, {"a": "x", "b": ("y", "z")}, axes)


# ---- functions

TABLE = jnp.arange(3)
LIST = [1, 2]


def direct(x):
    return jnp.sin(x)


def indirect(x):
    return helper(x) + 1


def helper(x):
    return direct(x)


def imports_it(x):
    import jax.numpy

    return jax.numpy.cos(x)


def nested(x):
    def inner(y):
        return jnp.cos(y)

    return inner(x)


def closing_over(function):
    return lambda x: function(x)


class Model:
    def __call__(self, x):
        return jnp.dot(x, x)


@functools.wraps(direct)
def wrapper(x):
    return x


def plain(x):
    return math.sqrt(x) + len(LIST) + np.sin(x)


def recursive(x):
    return recursive(x - 1) if x else 0


FOR_JAX = {
    "direct": direct,
    "indirect": indirect,
    "imports it": imports_it,
    "an array": lambda x: x + TABLE,
    "nested": nested,
    "closure": closing_over(direct),
    "argument": functools.partial(max, direct),
    "partial": functools.partial(direct),
    "jit": jax.jit(lambda x: x),
    "of jax.numpy": jnp.sin,
    "vmap": jax.vmap(lambda x: x),
    "callable": Model(),
    "wrapper": wrapper,
}
PLAIN = {
    "plain": plain,
    "recursive": recursive,
    "alike": lambda x: (abc.Sized, x.jax),
    "builtin": len,
    "class": str,
    "of math": math.sqrt,
    "of numpy": np.sin,
    "method": "a".join,
    "closure": closing_over(plain),
    "partial": functools.partial(plain),
}


@pytest.mark.jax_version
def test_a_function_that_names_jax_is_for_jax_and_any_other_stays_plain_python():
    assert [name for name, function in FOR_JAX.items() if not uses_jax(function)] == []
    assert [name for name, function in PLAIN.items() if uses_jax(function)] == []
