"""What a gang's parent and its ranks say to each other in a map, and where chunks lie in the memory that they share.

    parent                                rank
    mapping.serve(Batched)   ──────────▶
                             ◀──────────  Ready | Refused
    Places                   ──────────▶            (where memory is shared)
    Chunk, Chunk …           ──────────▶            (as many as it has room for)
                             ◀──────────  Done      (for each, in their order), or Broken
    Finish                   ──────────▶            (and serve returns)

A Python function is called item by item: mapping.errands takes any number of Errands, of one task or several,
and answers each with a Back, until Finish.

A tree is made of dicts, lists, tuples, named tuples and None; it travels as a template, the same tree with the numbers
0, 1, 2 … for its leaves, and a tuple of the leaves. Arrays are numpy's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxrun.contract.parcel import Block

_ALIGNED = 64  # bytes: what lies so, XLA uses where it lies


class Spec(NamedTuple):
    """One leaf of one item; `dtype` is numpy's."""

    shape: tuple[int, ...]
    dtype: Any

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * int(self.dtype.itemsize)


@dataclass(frozen=True, slots=True)
class Batched:
    """Map a function of one item over chunks of items, on all of the rank's devices.

    code:      the pickled pair of the function and a dict of keyword arguments for it
    star:      whether an item is a tuple of the function's arguments
    template:  an item; a leaf is numbered in `mapped`, or above those in `whole`
    mapped:    what differs from item to item
    whole:     the leaves that all items share
    share:     items for each device of the gang, None if nobody knows
    size:      items in a chunk, None to choose it
    """

    code: bytes
    star: bool
    template: Any
    mapped: tuple[Spec, ...]
    whole: tuple[Any, ...]
    share: int | None
    size: int | None


@dataclass(frozen=True, slots=True)
class Ready:
    """How chunks must come: `mapped` as the devices take it, `size` items in each, at most `room` at a time.

    `template` and `results` are of what the function returns; `most_size` and `most_room` are the largest that will
    be asked for.
    """

    mapped: tuple[Spec, ...]
    template: Any
    results: tuple[Spec, ...]
    size: int
    room: int
    most_size: int
    most_room: int


@dataclass(frozen=True, slots=True)
class Refused:
    """JAX cannot trace the function: what it says, and the user's line that it was at, or ""."""

    reason: str
    where: str


@dataclass(frozen=True, slots=True)
class Places:
    """Shared memory: each slot has so many bytes for a chunk's items, and then for its results."""

    block: Block
    for_items: int
    for_results: int

    def items(self, slot: int) -> memoryview:
        at = slot * (self.for_items + self.for_results)
        return self.block.buffer[at : at + self.for_items]

    def results(self, slot: int) -> memoryview:
        at = slot * (self.for_items + self.for_results) + self.for_items
        return self.block.buffer[at : at + self.for_results]


@dataclass(frozen=True, slots=True)
class Chunk:
    """`count` items from number `start`, to be filled up to `size`; in `slot` of the places, or in `leaves`."""

    start: int
    count: int
    size: int
    slot: int
    leaves: tuple[Any, ...] | None


@dataclass(frozen=True, slots=True)
class Done:
    """The chunk at `start`: its results, or None if they lie in its slot. The next ones are to be as said."""

    start: int
    leaves: tuple[Any, ...] | None
    size: int
    room: int


@dataclass(frozen=True, slots=True)
class Broken:
    """A chunk has failed. After Finish the rank raises why."""


@dataclass(frozen=True, slots=True)
class Finish:
    """No more chunks come."""


@dataclass(frozen=True, slots=True)
class Errand:
    """Call a Python function for each of `items`, the first of which is number `start` of its task.

    code:     as in Batched; None if the rank's last errand was of the same task
    through:  whether to go on after an item that has raised
    """

    task: int
    code: bytes | None
    star: bool
    start: int
    items: list[Any]
    through: bool


@dataclass(frozen=True, slots=True)
class Back:
    """What came of an Errand, in `seconds`: a result for each item, as far as it got, and what items raised.

    `errors` says it by the item's place in the errand, as a gang's rank says what its function raised.
    """

    task: int
    start: int
    results: list[Any]
    errors: dict[int, dict[str, Any]]
    seconds: float


def stride(specs: Sequence[Spec], count: int) -> int:
    """The bytes that the leaves of `count` items need."""
    return _offsets(specs, count)[-1]


def arrays(memory: memoryview, specs: Sequence[Spec], count: int) -> Iterator[Any]:
    """The leaves of `count` items that lie in `memory`, as arrays of shape [count, …]."""
    import numpy  # noqa: TID251

    for spec, at in zip(specs, _offsets(specs, count)[:-1], strict=True):
        yield numpy.ndarray((count, *spec.shape), spec.dtype, memory, at)


def _offsets(specs: Sequence[Spec], count: int) -> list[int]:
    """Where the leaves begin, one after the other, and where the last one ends."""
    places = [0]
    for spec in specs:
        places.append(-(-(places[-1] + count * spec.nbytes) // _ALIGNED) * _ALIGNED)
    return places
