"""How many items a chunk has: enough for about 5 ms of a device's work, within the memory that it may take.

How long an item takes can only be measured. The first chunk is small; chunks grow until one takes long enough, and are
never made smaller because one takes long: a function that runs many steps takes as long for few items as for many.
Every size costs a compilation, so a size that was found is used from then on, for more and for fewer items.
"""

from __future__ import annotations

from dataclasses import dataclass, field

TARGET_CHUNK_S = 0.005
FIRST_CHUNK_ITEMS = 2048
_TELLING = 0.0005  # seconds below which a chunk's time is that of sending it
_GROWTH = 64
_SEVERAL = 4
_LEAST = 0.001  # seconds that a chunk should take: to send it costs about a tenth of that


@dataclass(slots=True)
class ChunkSizer:
    """Chooses the sizes of one function's chunks.

    most:      the largest size that the memory allows
    chosen:    the size that was found, 0 while it is being sought
    compiled:  the sizes that need no compilation any more
    """

    most: int
    chosen: int = 0
    item_seconds: float = 0.0
    compile_seconds: float = 0.0
    spent: float = 0.0  # seconds of work that were not worth a compilation, each time alone
    compiled: set[int] = field(default_factory=set)

    def initial_size(self, share: int | None) -> int:
        """Return the size for a map of `share` items for each device, None if their number is not known."""
        wanted = min(self.most, self.chosen or FIRST_CHUNK_ITEMS)
        if share is not None:
            share = max(1, share)
            if (
                self.chosen > FIRST_CHUNK_ITEMS
            ):  # items are light: several chunks, so that one is copied while another is computed
                wanted = min(
                    wanted, max(round_up(-(-share // _SEVERAL)), int(_LEAST / self.item_seconds), FIRST_CHUNK_ITEMS)
                )
            rounds = -(-share // wanted)
            wanted = min(self.most, round_up(-(-share // rounds)))  # equally full
        larger = min((size for size in self.compiled if size >= wanted), default=0)
        if larger and larger * self.item_seconds < self.compile_seconds:
            return larger
        return wanted

    def next_size(self, size: int, seconds: float, left: int | None) -> int:
        """Return the next size after a chunk of `size` took `seconds`; `left` items for each device are to come."""
        self.item_seconds = seconds / size
        better = size * _GROWTH if seconds < _TELLING else power_of_two(int(size * TARGET_CHUNK_S / seconds))
        better = max(size, min(better, self.most))
        if better < 2 * size:
            self.chosen = size
        if self.chosen:
            return self.chosen
        self.spent += self.compile_seconds if left is None else left * self.item_seconds
        return better if self.spent >= self.compile_seconds else size


def power_of_two(number: int) -> int:
    """Return the largest power of two up to `number`, at least 1."""
    return 1 << max(0, number.bit_length() - 1)


def round_up(number: int) -> int:
    """Round up to a quarter of a power of two: few different sizes, and at most a fifth of padding."""
    step = max(1, power_of_two(number) // 4)
    return -(-number // step) * step
