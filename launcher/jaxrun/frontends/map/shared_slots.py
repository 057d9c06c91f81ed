"""The memory that a map shares with a rank on the same machine: slots, each for one chunk's items and its results.

To touch a page for the first time costs more than the copy that goes into it. So slots are few and used again, and the
memory is kept for the gang's next map; results are copied from there into arrays of the user's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxrun.protocol.map_messages import ArraySpec, SharedSlots, packed_nbytes, view_arrays
from jaxrun.protocol.payload import SharedBuffer


class SlotPool:
    """`slots` slots for chunks of up to `chunk_size` items; in `buffer`, if there is one and it is large enough."""

    def __init__(
        self,
        item_specs: Sequence[ArraySpec],
        result_specs: Sequence[ArraySpec],
        chunk_size: int,
        slots: int,
        buffer: SharedBuffer | None,
    ) -> None:
        self.item_specs, self.result_specs = item_specs, result_specs
        item_bytes, result_bytes = packed_nbytes(item_specs, chunk_size), packed_nbytes(result_specs, chunk_size)
        needed = max(1, (item_bytes + result_bytes) * slots)
        self.buffer = buffer if buffer is not None and buffer.nbytes >= needed else SharedBuffer(needed)
        self.shared = SharedSlots(self.buffer, item_bytes, result_bytes)
        self._free = list(range(slots))

    def acquire(self) -> int:
        """Return a free slot: the one used last, which is still in the processor's cache."""
        return self._free.pop()

    def release(self, slot: int) -> None:
        self._free.append(slot)

    def write_items(self, slot: int, size: int, leaves: Sequence[Any]) -> None:
        """Write items into the slot, as the types that the rank takes, laid out for a chunk of `size`."""
        import numpy  # noqa: TID251

        for view, leaf in zip(view_arrays(self.shared.items(slot), self.item_specs, size), leaves, strict=True):
            numpy.copyto(view[: len(leaf)], leaf, casting="unsafe")

    def read_results(self, slot: int, count: int) -> list[Any]:
        """Return views of the results in the slot, which are valid until it is released."""
        return list(view_arrays(self.shared.results(slot), self.result_specs, count))
