"""The memory that a map shares with a rank of its machine: a slot for each chunk on its way, and for its results.

A page that is touched for the first time costs more than the copy that goes into it. So slots are few and used again,
and the memory is kept for the gang's next map; results are copied from there into arrays of the user's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxrun.protocol.map_messages import ArraySpec, SharedSlots, packed_nbytes, view_arrays
from jaxrun.protocol.payload import SharedBuffer


class SlotPool:
    """`slots` slots for chunks of up to `most` items; in `block`, if that is there and large enough."""

    def __init__(
        self,
        items: Sequence[ArraySpec],
        results: Sequence[ArraySpec],
        most: int,
        slots: int,
        block: SharedBuffer | None,
    ) -> None:
        self.items, self.results = items, results
        halves = packed_nbytes(items, most), packed_nbytes(results, most)
        needed = max(1, sum(halves) * slots)
        self.block = block if block is not None and block.nbytes >= needed else SharedBuffer(needed)
        self.shared = SharedSlots(self.block, *halves)
        self._free = list(range(slots))

    def acquire(self) -> int:
        """A slot that is free: the one used last, which is still in the processor's cache."""
        return self._free.pop()

    def release(self, slot: int) -> None:
        self._free.append(slot)

    def write_items(self, slot: int, size: int, leaves: Sequence[Any]) -> None:
        """Put items into the slot, as the types that the ranks take, laid out for a chunk of `size`."""
        import numpy  # noqa: TID251

        for there, leaf in zip(view_arrays(self.shared.items(slot), self.items, size), leaves, strict=True):
            numpy.copyto(there[: len(leaf)], leaf, casting="unsafe")

    def read_results(self, slot: int, count: int) -> list[Any]:
        """The results in the slot, which are valid until it is given back."""
        return list(view_arrays(self.shared.results(slot), self.results, count))
