"""Which rank gets which chunk: each rank says how large its chunks should be and how many it may have at a time.

Chunks are assigned in the items' order, one to each rank in turn, so that no rank waits while another has several.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(slots=True)
class RankWindow:
    """The chunks of one rank: `size` items in the next one, at most `capacity` at a time.

    pending:  the number of items of each chunk that it has, by the number of the chunk's first item
    """

    size: int
    capacity: int
    pending: dict[int, int] = field(default_factory=dict)

    @property
    def free(self) -> int:
        return self.capacity - len(self.pending)


@dataclass(slots=True)
class ChunkScheduler:
    """Assigns `items` items, None if their number is not known yet, to ranks by their windows."""

    items: int | None
    windows: dict[int, RankWindow] = field(default_factory=dict)
    assigned: int = 0
    done: int = 0

    def next_chunks(self) -> Iterator[tuple[int, int, int]]:
        """Yield (rank, start, size) for each chunk that a rank has room for; call `assign` after each.

        A chunk may turn out to hold fewer items than its size.
        """
        while self.windows and not self.exhausted:
            rank = min(self.windows, key=lambda rank: (-self.windows[rank].free, rank))
            if self.windows[rank].free <= 0:
                return
            yield rank, self.assigned, self.windows[rank].size

    def assign(self, rank: int, count: int) -> None:
        """Record that the chunk yielded last has been sent with `count` items; 0 says that there are no more."""
        if not count:
            self.items = self.assigned
            return
        self.windows[rank].pending[self.assigned] = count
        self.assigned += count

    def complete(self, rank: int, start: int, size: int, capacity: int) -> int:
        """Record that a rank is done with the chunk at `start`, and what it wants next; the chunk's number of items."""
        window = self.windows[rank]
        count = window.pending.pop(start)
        window.size, window.capacity = size, capacity
        self.done += count
        return count

    @property
    def exhausted(self) -> bool:
        """Whether all items have been assigned."""
        return self.items is not None and self.assigned >= self.items

    @property
    def finished(self) -> bool:
        """Whether all items are done."""
        return self.exhausted and self.done == self.assigned
