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

from jaxrun.protocol.payload import SharedBuffer

_ALIGNED = 64  # bytes: what lies so, XLA uses where it lies


class ArraySpec(NamedTuple):
    """One leaf of one item; `dtype` is numpy's."""

    shape: tuple[int, ...]
    dtype: Any

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * int(self.dtype.itemsize)


@dataclass(frozen=True, slots=True)
class StartMap:
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
    unpack_items: bool
    template: Any
    item_specs: tuple[ArraySpec, ...]
    shared_leaves: tuple[Any, ...]
    items_per_device: int | None
    chunk_size: int | None


@dataclass(frozen=True, slots=True)
class MapReady:
    """How chunks must come: `mapped` as the devices take it, `size` items in each, at most `room` at a time.

    `template` and `results` are of what the function returns; `most_size` and `most_room` are the largest that will
    be asked for.
    """

    item_specs: tuple[ArraySpec, ...]
    template: Any
    result_specs: tuple[ArraySpec, ...]
    chunk_size: int
    max_chunks: int
    largest_chunk_size: int
    largest_max_chunks: int


@dataclass(frozen=True, slots=True)
class CannotTrace:
    """JAX cannot trace the function: what it says, and the user's line that it was at, or ""."""

    reason: str
    source_line: str


@dataclass(frozen=True, slots=True)
class SharedSlots:
    """Shared memory: each slot has so many bytes for a chunk's items, and then for its results."""

    buffer: SharedBuffer
    item_bytes: int
    result_bytes: int

    def items(self, slot: int) -> memoryview:
        at = slot * (self.item_bytes + self.result_bytes)
        return self.buffer.memory[at : at + self.item_bytes]

    def results(self, slot: int) -> memoryview:
        at = slot * (self.item_bytes + self.result_bytes) + self.item_bytes
        return self.buffer.memory[at : at + self.result_bytes]


@dataclass(frozen=True, slots=True)
class ItemChunk:
    """`count` items from number `start`, to be filled up to `size`; in `slot` of the places, or in `leaves`."""

    start: int
    count: int
    size: int
    slot: int
    leaves: tuple[Any, ...] | None


@dataclass(frozen=True, slots=True)
class ChunkDone:
    """The chunk at `start`: its results, or None if they lie in its slot. The next ones are to be as said."""

    start: int
    leaves: tuple[Any, ...] | None
    chunk_size: int
    max_chunks: int


@dataclass(frozen=True, slots=True)
class ChunkFailed:
    """A chunk has failed. After Finish the rank raises why."""


@dataclass(frozen=True, slots=True)
class EndOfChunks:
    """No more chunks come."""


@dataclass(frozen=True, slots=True)
class CallBatch:
    """Call a Python function for each of `items`.

    code:               as in StartMap; None if the rank's last batch had the same one
    unpack_items:       whether an item is a tuple of the function's arguments
    continue_on_error:  whether to go on after an item that has raised
    """

    code: bytes | None
    unpack_items: bool
    items: list[Any]
    continue_on_error: bool


@dataclass(frozen=True, slots=True)
class BatchResult:
    """A result for each item of a CallBatch as far as it got, which took `seconds`.

    `errors` describes what items raised, by their position, as a gang's rank describes what its function raised.
    """

    results: list[Any]
    errors: dict[int, dict[str, Any]]
    seconds: float


def packed_nbytes(specs: Sequence[ArraySpec], count: int) -> int:
    """The bytes that the leaves of `count` items need."""
    return _offsets(specs, count)[-1]


def view_arrays(memory: memoryview, specs: Sequence[ArraySpec], count: int) -> Iterator[Any]:
    """The leaves of `count` items that lie in `memory`, as arrays of shape [count, …]."""
    import numpy  # noqa: TID251

    for spec, at in zip(specs, _offsets(specs, count)[:-1], strict=True):
        yield numpy.ndarray((count, *spec.shape), spec.dtype, memory, at)


def _offsets(specs: Sequence[ArraySpec], count: int) -> list[int]:
    """Where the leaves begin, one after the other, and where the last one ends."""
    places = [0]
    for spec in specs:
        places.append(-(-(places[-1] + count * spec.nbytes) // _ALIGNED) * _ALIGNED)
    return places
