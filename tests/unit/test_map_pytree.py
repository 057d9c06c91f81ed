"""Trees as JAX flattens them, without jax."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrun.errors import UsageError
from jaxrun.map import pytree as trees

pytestmark = pytest.mark.jax_version


class Point(NamedTuple):
    x: object
    y: object


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


@given(containers)
def test_leaves_are_ordered_as_jax_orders_them(tree):
    assert trees.leaves(tree) == jax.tree.leaves(tree)


@given(containers)
def test_a_tree_is_put_together_from_its_template(tree):
    flat, structure = jax.tree.flatten(tree)
    rebuilt = trees.unflatten(jax.tree.unflatten(structure, range(len(flat))), flat)
    assert rebuilt == tree
    assert jax.tree.structure(rebuilt) == structure


@given(containers, containers)
def test_trees_are_alike_if_jax_says_so(one, other):
    assert trees.same_structure(one, other) == (jax.tree.structure(one) == jax.tree.structure(other))


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
