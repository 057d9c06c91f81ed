"""The memory that a map shares with a rank of its machine: a slot for each chunk on its way, and for its results.

A page that is touched for the first time costs more than the copy that goes into it. So slots are few and used again,
and the memory is kept for the gang's next map; results are copied from there into arrays of the user's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxrun.contract.mapping import Places, Spec, arrays, stride
from jaxrun.contract.parcel import Block


class Ring:
    """`slots` slots for chunks of up to `most` items; in `block`, if that is there and large enough."""

    def __init__(
        self, items: Sequence[Spec], results: Sequence[Spec], most: int, slots: int, block: Block | None
    ) -> None:
        self.items, self.results = items, results
        halves = stride(items, most), stride(results, most)
        needed = max(1, sum(halves) * slots)
        self.block = block if block is not None and block.nbytes >= needed else Block(needed)
        self.places = Places(self.block, *halves)
        self._free = list(range(slots))

    def take(self) -> int:
        """A slot that is free: the one used last, which is still in the processor's cache."""
        return self._free.pop()

    def give_back(self, slot: int) -> None:
        self._free.append(slot)

    def fill(self, slot: int, size: int, leaves: Sequence[Any]) -> None:
        """Put items into the slot, as the types that the ranks take, laid out for a chunk of `size`."""
        import numpy  # noqa: TID251

        for there, leaf in zip(arrays(self.places.items(slot), self.items, size), leaves, strict=True):
            numpy.copyto(there[: len(leaf)], leaf, casting="unsafe")

    def take_out(self, slot: int, count: int) -> list[Any]:
        """The results in the slot, which are valid until it is given back."""
        return list(arrays(self.places.results(slot), self.results, count))
