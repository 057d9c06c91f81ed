"""The input of a map: arrays whose first axis counts the items, made of what the user has given."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from numbers import Number
from typing import Any, Protocol

from jaxrun.errors import UsageError
from jaxrun.frontends.map import pytree
from jaxrun.protocol.map_messages import ArraySpec

_KINDS = "biufcV"  # of numpy's types: bool, int, unsigned, float, complex; V is how it calls bfloat16 and its like


class NotTraceable(TypeError):
    """JAX cannot trace the function, or its items are not arrays; `jax=False` runs it as Python instead."""


@dataclass(frozen=True, slots=True)
class MapInput:
    """The leaves of all items.

    template:  one item with numbers for its leaves, the mapped ones first
    mapped:    arrays of shape [items, …]
    shared:    arrays that are the same for all items
    exact:     for each mapped leaf, whether it was made of Python numbers, which JAX takes only if they fit
    """

    template: Any
    mapped: tuple[Any, ...]
    shared: tuple[Any, ...]
    exact: tuple[bool, ...]

    @property
    def count(self) -> int:
        return len(self.mapped[0])

    @property
    def specs(self) -> tuple[ArraySpec, ...]:
        return tuple(ArraySpec(leaf.shape[1:], leaf.dtype) for leaf in self.mapped)


def parse_items(xs: Any, in_axes: Any) -> MapInput:
    """Take a tree of arrays, to be mapped over `in_axes`, or a list of items, each a tree, which are stacked.

    Raises UsageError if the axes do not fit, NotTraceable if a leaf is not an array of numbers.
    """
    if not _is_tree_of_arrays(xs):
        return stack_items(list(xs), in_axes)
    mapped: list[Any] = []
    whole: list[Any] = []
    exact: list[bool] = []

    def place(leaf: Any, axis: int | None) -> _Place:
        array = as_array(leaf)
        if axis is None:
            whole.append(array)
            return _Place(len(whole) - 1, whole=True)
        mapped.append(_axis_first(array, axis))
        exact.append(array is not leaf and isinstance(leaf, (list, tuple)))
        return _Place(len(mapped) - 1, whole=False)

    template = pytree.map_with_axes(place, xs, in_axes)
    counts = sorted({len(leaf) for leaf in mapped})
    if len(counts) != 1:
        raise UsageError(
            f"the arrays must have equally many items along the axes to map over, but have {counts}; check in_axes"
            if counts
            else f"there is nothing to map over: in_axes={in_axes!r} leaves no array"
        )
    return MapInput(_numbered(template, len(mapped)), tuple(mapped), tuple(whole), tuple(exact))


def stack_items(items: Sequence[Any], in_axes: Any = 0) -> MapInput:
    """Make arrays of at least one item, each a tree. Raises NotTraceable if the trees are not alike."""
    if in_axes != 0:
        raise UsageError(f"a list of items has one axis, so in_axes={in_axes!r} cannot be; give arrays")
    columns: list[list[Any]] = [list(items)]
    template: Any = 0
    if pytree.children(items[0]) is not None:  # numbers are not looked at one by one
        columns = _columns(items)
        numbers = iter(range(len(columns)))
        template = pytree.map_leaves(lambda _: next(numbers), items[0])
    arrays = tuple(_column(column) for column in columns)
    if not arrays:
        raise UsageError(f"there is nothing in an item to map over: {_brief(items[0])}")
    return MapInput(template, arrays, (), tuple(_of_python(column[0]) for column in columns))


class ItemSource(Protocol):
    """Where the items of a map come from."""

    def read(self, start: int, size: int) -> tuple[Any, ...]:
        """Return the leaves of up to `size` items from number `start`; an empty tuple if there are no more."""


class ArraySource:
    """Items that are all in memory."""

    def __init__(self, items: MapInput) -> None:
        self._items = items

    def read(self, start: int, size: int) -> tuple[Any, ...]:
        return tuple(leaf[start : start + size] for leaf in self._items.mapped)


class IteratorSource:
    """Items from an iterator; `first` is the first one alone, None if there is no item."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        head = list(itertools.islice(iterator, 1))
        self._iterator = itertools.chain(head, iterator)
        self._example = head[:1]
        self.first = stack_items(head) if head else None

    def read(self, start: int, size: int) -> tuple[Any, ...]:
        import numpy  # noqa: TID251

        assert self.first is not None
        found = list(itertools.islice(self._iterator, size))
        if not found:
            return ()
        leaves = stack_items([*self._example, *found]).mapped
        for leaf, spec in zip(leaves, self.first.specs, strict=True):
            if leaf.shape[1:] != spec.shape or not numpy.can_cast(leaf.dtype, spec.dtype, "same_kind"):
                raise TypeError(
                    f"items {start} to {start + len(found) - 1} are {leaf.dtype}, the first is {spec.dtype}"
                )
        return tuple(leaf[1:] for leaf in leaves)


def parse_chunk_size(chunk: int | str) -> int | None:
    """Return None for "auto". Raises UsageError if `chunk` is neither that nor a number of items from 1."""
    if chunk == "auto":
        return None
    if isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1:
        raise UsageError(f'chunk is a number of items from 1, or "auto", not {chunk!r}')
    return chunk


def _columns(items: Sequence[Any]) -> list[list[Any]]:
    """Return the leaves at each position of the items' trees. Raises NotTraceable if the trees differ."""
    for item in items:
        if not pytree.same_structure(items[0], item):
            raise NotTraceable(f"the items are not alike: {_brief(items[0])} and {_brief(item)}")
    return [list(column) for column in zip(*map(pytree.leaves, items), strict=True)]


def _column(leaves: list[Any]) -> Any:
    import numpy  # noqa: TID251

    try:
        if _of_python(leaves[0]):
            return _numeric(numpy.asarray(leaves), leaves[0])
        return numpy.stack([as_array(leaf) for leaf in leaves])
    except ValueError as error:
        raise NotTraceable(f"the items have different shapes: {error}") from None


def _of_python(leaf: Any) -> bool:
    return isinstance(leaf, (Number, list)) and not hasattr(leaf, "dtype")


def as_array(leaf: Any) -> Any:
    """Return a numpy array of numbers. Raises NotTraceable if `leaf` cannot be one."""
    import numpy  # noqa: TID251

    try:
        return _numeric(numpy.asarray(leaf), leaf)
    except ValueError as error:
        raise NotTraceable(f"{_brief(leaf)} is no array: {error}") from None


def _numeric(array: Any, made_of: Any) -> Any:
    if array.dtype.kind not in _KINDS or array.dtype.names:
        raise NotTraceable(f"{_brief(made_of)} is no array of numbers, which is what JAX maps over")
    return array


def _is_tree_of_arrays(xs: Any) -> bool:
    return isinstance(xs, (dict, tuple)) or hasattr(xs, "__array__")


@dataclass(frozen=True, slots=True)
class _Place:
    number: int
    whole: bool


def _numbered(template: Any, n_mapped: int) -> Any:
    return pytree.map_leaves(lambda place: place.number + (n_mapped if place.whole else 0), template)


def _axis_first(array: Any, axis: int) -> Any:
    import numpy  # noqa: TID251

    if not -array.ndim <= axis < array.ndim:
        raise UsageError(f"an array of shape {array.shape} has no axis {axis} to map over; check in_axes")
    return numpy.moveaxis(array, axis, 0)


def _brief(value: Any) -> str:
    text = f"{type(value).__name__} {value!r}"
    return text if len(text) <= 60 else f"{text[:57]}..."
