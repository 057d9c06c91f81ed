"""What a map has chosen, and how fast it was."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from jaxrun.frontends.gang.gang import Gang


@dataclass(frozen=True, slots=True)
class MapStats:
    """The figures of one map, as text one line. `chunk_size`: items that went together at the end."""

    method: str
    processes: int
    devices: int
    platform: str
    chunk_size: int
    items: int
    seconds: float

    @classmethod
    def of_gang(cls, gang: Gang, method: str, chunk: int, items: int, seconds: float) -> Self:
        first = gang.workers[0]
        return cls(method, len(gang.workers), first.devices, first.platform, chunk, items, seconds)

    def __str__(self) -> str:
        processes = f"{self.processes} process{'es' * (self.processes > 1)}"
        shape = f"{processes} x {self.devices} device{'s' * (self.devices > 1)} ({self.platform})"
        rate = self.items / self.seconds if self.seconds else 0.0
        amount = f"{self.items} items in {self.seconds:.3g} s, {rate:.3g}/s"
        return f"{self.method}, {shape}, chunks of {self.chunk_size}: {amount}"


_last: weakref.WeakKeyDictionary[Gang, MapStats] = weakref.WeakKeyDictionary()


def record_stats(gang: Gang, stats: MapStats) -> None:
    _last[gang] = stats


def last_stats(gang: Gang) -> MapStats | None:
    """Return the figures of the last map of `gang` that has ended."""
    return _last.get(gang)
