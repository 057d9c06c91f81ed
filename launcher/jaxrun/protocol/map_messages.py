"""The messages between a gang's parent and its ranks in a map.

    parent                                  rank
    serve(task)                 ─────────▶
    Part, Part …                ─────────▶  (items)
                                ◀─────────  Part  (their results; the parent keeps them, and sends the next)
    None                        ─────────▶  (there are no more parts, and serve returns)

In a map over devices, a part holds slices of arrays, and serve returns a MapResult; in a map of plain Python, a part
holds a list of items.

A rank with devices has PARTS_AHEAD parts at a time. So either side may reuse the memory file of a message for the
message PARTS_AHEAD later: allocating new memory costs the kernel more than copying into it.

A tree consists of dicts, lists, tuples, named tuples and None. It travels as a template, the same tree with the numbers
0, 1, 2 … as its leaves, and a sequence of the leaves. Arrays are numpy's.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from msgspec import Struct

PARTS_AHEAD = 3


class NotTraceable(TypeError):
    """JAX cannot trace the function, or its items are not arrays. `jax=False` calls it as plain Python instead.

    >>> with jaxrun.pool(1) as pool:
    ...     pool.map(lambda x: x if x > 0 else -x, [1.0, -1.0])
    Traceback (most recent call last):
    jaxrun.protocol.map_messages.NotTraceable: …
    """


class ArraySpec(NamedTuple):
    """One leaf of one item; `dtype` is numpy's."""

    shape: tuple[int, ...]
    dtype: Any

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * int(self.dtype.itemsize)


class MapTask(Struct, frozen=True):
    """A function of one item, to be compiled for chunks of items on all of the rank's devices.

    key:           equal for the same function and the same `static`
    static:        keyword arguments of the function
    unpack_items:  whether an item is a tuple of the function's arguments
    template:      an item whose leaves are the numbers 0, 1 … of `specs`, and -1, -2 … of `shared`
    specs:         the leaves that differ from item to item
    shared:        the leaves that all items share
    part_size:     the largest number of items in a part
    chunk_size:    number of items that a device computes at once; None to choose one
    """

    key: bytes
    function: Callable[..., Any]
    static: Mapping[str, Any]
    unpack_items: bool
    template: Any
    specs: tuple[ArraySpec, ...]
    shared: tuple[Any, ...]
    part_size: int
    chunk_size: int | None


class MapResult(NamedTuple):
    """What the function returns for an item."""

    template: Any
    specs: tuple[ArraySpec, ...]


class Part(NamedTuple):
    """The items from number `start`, or their results.

    content:  for devices, the leaves of all items; the results are a list of leaves for each chunk.
              For plain Python, a list of items, or of results
    """

    start: int
    content: Any


def tree_parts(tree: Any) -> dict[Any, Any] | None:
    """Return the parts of a container, by key or by number; None for a leaf."""
    if tree is None:
        return {}
    if isinstance(tree, (list, tuple)):
        return dict(enumerate(tree))
    return dict(tree) if isinstance(tree, dict) else None


def with_parts(tree: Any, parts: Iterable[Any]) -> Any:
    """Return a container like `tree` with these parts."""
    if isinstance(tree, dict):
        made = dict(zip(tree, parts, strict=True))
        return OrderedDict(made) if isinstance(tree, OrderedDict) else made
    if hasattr(tree, "_fields"):
        return type(tree)(*parts)
    return None if tree is None else list(parts) if isinstance(tree, list) else tuple(parts)


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """Return the same tree with `function` applied to each leaf."""
    parts = tree_parts(tree)
    if parts is None:
        return function(tree)
    return with_parts(tree, [map_leaves(function, part) for part in parts.values()])
