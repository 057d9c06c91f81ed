"""Who gets which chunk: ranks say how large a chunk they want and how many they have room for, and get the next items.

Chunks are dealt in the items' order, one to each rank in turn, so that no rank waits while another has several.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(slots=True)
class RankWindow:
    """What a rank wants, and the `count` of items of each chunk that it has, by the chunk's start."""

    size: int
    capacity: int
    pending: dict[int, int] = field(default_factory=dict)

    @property
    def free(self) -> int:
        return self.capacity - len(self.pending)


@dataclass(slots=True)
class ChunkScheduler:
    """Deals `items` items, None if it is not known yet how many there are."""

    items: int | None
    windows: dict[int, RankWindow] = field(default_factory=dict)
    assigned: int = 0
    done: int = 0

    def next_chunks(self) -> Iterator[tuple[int, int, int]]:
        """(rank, start, size) for each chunk that can be dealt now; to be answered by `dealt_to` before the next.

        A chunk may hold fewer items than its size.
        """
        while self.windows and not self.exhausted:
            rank = min(self.windows, key=lambda rank: (-self.windows[rank].free, rank))
            if self.windows[rank].free <= 0:
                return
            yield rank, self.assigned, self.windows[rank].size

    def assign(self, rank: int, count: int) -> None:
        """The chunk that was offered last has been sent with `count` items; 0 says that there are no more."""
        if not count:
            self.items = self.assigned
            return
        self.windows[rank].pending[self.assigned] = count
        self.assigned += count

    def complete(self, rank: int, start: int, size: int, room: int) -> int:
        """The rank is done with the chunk at `start`, and wants the next ones so; how many items it was."""
        hand = self.windows[rank]
        count = hand.pending.pop(start)
        hand.size, hand.capacity = size, room
        self.done += count
        return count

    @property
    def exhausted(self) -> bool:
        """Whether all items have been dealt."""
        return self.items is not None and self.assigned >= self.items

    @property
    def finished(self) -> bool:
        """Whether all items are done."""
        return self.exhausted and self.done == self.assigned
