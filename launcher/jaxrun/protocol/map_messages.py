"""What a gang's parent and its ranks send each other in a map, and where chunks lie in the memory that they share.

    parent                                  rank
    device_map.serve(StartMap)  ─────────▶
                                ◀─────────  MapReady | CannotTrace
    SharedSlots                 ─────────▶            (where memory is shared)
    ItemChunk, ItemChunk …      ─────────▶            (at most max_chunks at a time)
                                ◀─────────  ChunkDone (for each, in their order), or ChunkFailed
    EndOfChunks                 ─────────▶            (and serve returns)

A Python function is called item by item: python_calls.serve takes any number of CallBatches, of one function or
several, and answers each with a BatchResult, until EndOfChunks.

A tree is made of dicts, lists, tuples, named tuples and None; it travels as a template, the same tree with the numbers
0, 1, 2 … for its leaves, and a tuple of the leaves. Arrays are numpy's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxrun.protocol.payload import SharedBuffer

_ALIGNED = 64  # bytes: XLA uses arrays that are so aligned without a copy


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

    code:              the pickled pair of the function and a dict of keyword arguments for it
    unpack_items:      whether an item is a tuple of the function's arguments
    template:          an item; its leaves are numbered, first those of `item_specs`, then those of `shared_leaves`
    item_specs:        the leaves that differ from item to item
    shared_leaves:     the leaves that all items share
    items_per_device:  of the gang, None if nobody knows
    chunk_size:        items in a chunk, None to choose it
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
    """How chunks must come.

    item_specs:             the leaves of an item, as the devices take them
    template, result_specs:  what the function returns for an item
    chunk_size, max_chunks:  items in a chunk, and chunks at a time
    largest_…:               the largest of these that the rank will ask for
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
    """JAX cannot trace the function, for this reason; `source_line` of the user's program, or ""."""

    reason: str
    source_line: str


@dataclass(frozen=True, slots=True)
class SharedSlots:
    """Shared memory in slots, each with `item_bytes` for a chunk's items, then `result_bytes` for its results."""

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
    """`count` items from number `start`, to be filled up to `size`; in `slot` of the SharedSlots, or in `leaves`."""

    start: int
    count: int
    size: int
    slot: int
    leaves: tuple[Any, ...] | None


@dataclass(frozen=True, slots=True)
class ChunkDone:
    """The results of the chunk at `start`, None if they lie in its slot; how large and how many the next may be."""

    start: int
    leaves: tuple[Any, ...] | None
    chunk_size: int
    max_chunks: int


@dataclass(frozen=True, slots=True)
class ChunkFailed:
    """A chunk has failed. After EndOfChunks the rank raises the exception."""


@dataclass(frozen=True, slots=True)
class EndOfChunks:
    """There are no more chunks."""


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
    """Return how many bytes the leaves of `count` items need."""
    return _offsets(specs, count)[-1]


def view_arrays(memory: memoryview, specs: Sequence[ArraySpec], count: int) -> Iterator[Any]:
    """Yield the leaves of `count` items that lie in `memory`, as arrays of shape [count, …]."""
    import numpy  # noqa: TID251

    for spec, at in zip(specs, _offsets(specs, count)[:-1], strict=True):
        yield numpy.ndarray((count, *spec.shape), spec.dtype, memory, at)


def _offsets(specs: Sequence[ArraySpec], count: int) -> list[int]:
    """Return where each leaf begins, and where the last one ends."""
    places = [0]
    for spec in specs:
        places.append(-(-(places[-1] + count * spec.nbytes) // _ALIGNED) * _ALIGNED)
    return places
