"""The input of a map for devices: arrays whose first axis counts the items, made from the user's input."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Number
from typing import Any

from msgspec import Struct

from jaxrun.errors import UsageError
from jaxrun.protocol.map_messages import ArraySpec, NotTraceable, tree_parts, with_parts

_KINDS = "biufcV"  # of numpy's types: bool, int, unsigned, float, complex; bfloat16 and similar types have the kind V


class MapItems(Struct, frozen=True):
    """The leaves of all items.

    template:  one item with numbers for its leaves: 0, 1 … of `mapped`, -1, -2 … of `shared`
    mapped:    arrays of shape [items, …]
    shared:    arrays that are the same for all items
    """

    template: Any
    mapped: tuple[Any, ...]
    shared: tuple[Any, ...] = ()

    @property
    def count(self) -> int:
        return len(self.mapped[0])

    @property
    def specs(self) -> tuple[ArraySpec, ...]:
        return tuple(ArraySpec(leaf.shape[1:], leaf.dtype) for leaf in self.mapped)


def parse_items(xs: Any, in_axes: Any) -> MapItems:
    """Turn an array, or arrays in dicts and tuples, into items along `in_axes`; or a list of items, each a tree.

    Raises UsageError if the axes do not fit, NotTraceable if a leaf is not an array of numbers.
    """
    mapped: list[Any] = []
    shared: list[Any] = []
    if isinstance(xs, list):
        if in_axes != 0:
            raise UsageError(f"a list of items has one axis, so in_axes={in_axes!r} cannot be; give arrays")
        template = _stack(xs, mapped)
    else:
        template = _place(xs, in_axes, mapped, shared)
    counts = sorted({len(leaf) for leaf in mapped})
    if not counts:
        why = f"in_axes={in_axes!r} leaves no array" if shared else "there is nothing in an item"
        raise UsageError(f"there is nothing to map over: {why}")
    if len(counts) > 1:
        raise UsageError(
            f"the arrays must have equally many items along the axes to map over, but have {counts}; check in_axes"
        )
    return MapItems(template, tuple(mapped), tuple(shared))


def _place(tree: Any, axes: Any, mapped: list[Any], shared: list[Any]) -> Any:
    """Return the template of a tree of arrays, which go into `mapped` or `shared`; a list is one array.

    As in vmap, an axis may stand for all of the tree below it.
    """
    is_axis = axes is None or isinstance(axes, int)
    parts = None if isinstance(tree, list) else tree_parts(tree)
    if parts is not None:
        wanted = dict.fromkeys(parts, axes) if is_axis else tree_parts(axes)
        if wanted is None or wanted.keys() != parts.keys():
            raise UsageError(f"in_axes has {axes!r} where the inputs have {list(parts)}; give each an axis, or None")
        return with_parts(tree, [_place(part, wanted[key], mapped, shared) for key, part in parts.items()])
    if not is_axis:
        raise UsageError(f"in_axes has {axes!r} where there is one array; give an axis, or None")
    array = _as_array(tree)
    if axes is None:
        shared.append(array)
        return -len(shared)
    mapped.append(_axis_first(array, axes))
    return len(mapped) - 1


def _stack(items: Sequence[Any], mapped: list[Any]) -> Any:
    """Return the template of at least one item, each a tree, whose leaves become arrays in `mapped`.

    Raises NotTraceable if the trees are not alike.
    """
    first = items[0]
    parts = None if isinstance(first, list) else tree_parts(first)
    if parts is None:
        mapped.append(_column(items))
        return len(mapped) - 1
    held = [tree_parts(item) for item in items]
    for item, own in zip(items, held, strict=True):
        if type(item) is not type(first) or own is None or own.keys() != parts.keys():
            raise NotTraceable(f"the items are not alike: {_brief(first)} and {_brief(item)}")
    return with_parts(first, [_stack([own[key] for own in held if own is not None], mapped) for key in parts])


def _column(leaves: Sequence[Any]) -> Any:
    import numpy  # noqa: TID251

    try:
        if isinstance(leaves[0], (Number, list)):
            return _numeric(numpy.asarray(leaves), leaves[0])
        return numpy.stack([_as_array(leaf) for leaf in leaves])
    except ValueError as error:
        raise NotTraceable(f"the items have different shapes: {error}") from None


def _as_array(leaf: Any) -> Any:
    """Return a numpy array of numbers. Raises NotTraceable if `leaf` cannot be one."""
    import numpy  # noqa: TID251

    try:
        return _numeric(numpy.asarray(leaf), leaf)
    except ValueError as error:
        raise NotTraceable(f"{_brief(leaf)} is not an array: {error}") from None


def _numeric(array: Any, made_of: Any) -> Any:
    if array.dtype.kind not in _KINDS or array.dtype.names:
        raise NotTraceable(
            f"{_brief(made_of)} is not an array of numbers, so JAX cannot map over it; jax=False takes anything"
        )
    return array


def _axis_first(array: Any, axis: int) -> Any:
    import numpy  # noqa: TID251

    if not -array.ndim <= axis < array.ndim:
        raise UsageError(f"an array of shape {array.shape} has no axis {axis} to map over; check in_axes")
    return numpy.moveaxis(array, axis, 0)


def _brief(value: Any) -> str:
    text = f"{type(value).__name__} {value!r}"
    return text if len(text) <= 60 else f"{text[:57]}..."
