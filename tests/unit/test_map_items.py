"""The items of a map, made from the user's arguments."""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

import numpy as np
import pytest

from jaxrun.errors import UsageError
from jaxrun.map.items import NotTraceable, parse_chunk_size, parse_items, stack_items


class Point(NamedTuple):
    x: object
    y: object


def shapes(items):
    return [leaf.shape for leaf in items.mapped]


def test_the_first_axis_of_an_array_counts_the_items():
    items = parse_items(np.ones((5, 2)), 0)
    assert (items.template, items.count, shapes(items), items.specs[0].shape) == (0, 5, [(5, 2)], (2,))


def test_a_tree_of_arrays_is_mapped_leaf_by_leaf():
    items = parse_items({"b": np.ones(3), "a": Point(np.zeros((3, 2)), None)}, 0)
    assert items.template == {"b": 1, "a": Point(0, None)}
    assert shapes(items) == [(3, 2), (3,)]


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


@pytest.mark.parametrize(("chunk", "size"), [("auto", None), (1, 1), (300, 300)])
def test_a_chunk_is_chosen_or_a_number(chunk, size):
    assert parse_chunk_size(chunk) == size


@pytest.mark.parametrize("chunk", [0, -1, True, 2.5, "big", None])
def test_another_chunk_is_a_usage_error(chunk):
    with pytest.raises(UsageError, match="auto"):
        parse_chunk_size(chunk)
