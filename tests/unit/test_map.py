"""map without processes: the items from the user's arguments, and a rank's share, with a parent that is a list."""

from collections import OrderedDict
from fractions import Fraction
from typing import NamedTuple

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrun.errors import UsageError
from jaxrun.frontends.gang.map_items import parse_items
from jaxrun.protocol.map_messages import NotTraceable, map_leaves


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
def test_values_that_are_not_arrays_of_numbers_are_not_for_jax(xs):
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
