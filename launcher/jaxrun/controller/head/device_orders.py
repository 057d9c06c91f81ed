"""The orders in which live_devices yields the devices of its ranks, with --keep-survivors and --max-restarts.

XLA keeps one communicator on CPU for a list of devices, for as long as a process lives. Once one of its processes has
died, these devices can never exchange anything again in this order. So the ranks that live get another order whenever
one of them has another process than when they had the last one:

    ranks 0-2 live            0 1 2
    rank 2 dies               0 1
    rank 2 is back            1 2 0    and so on, until the 6 orders of three ranks are used up

On GPUs the order stays: there XLA's communicators know the processes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from msgspec import Struct


class _Given(Struct):
    """The last order that these ranks have: its number, and the incarnation of each rank when they got it."""

    number: int
    incarnations: dict[int, int]


class DeviceOrders:
    def __init__(self, size: int) -> None:
        """`size` is the number of ranks of the job, which may connect them all in their own order by itself."""
        self._size = size
        self._given: dict[tuple[int, ...], _Given] = {}

    def choose(self, incarnations: Mapping[int, int], platform: str) -> tuple[int, ...] | None:
        """Return these ranks in the order of their devices; None on CPU if they have no other order left."""
        ranks = tuple(sorted(incarnations))
        if platform != "cpu" or len(ranks) < 2:
            return ranks
        first = int(len(ranks) == self._size and max(incarnations.values()) > 1)
        given = self._given.setdefault(ranks, _Given(first, dict(incarnations)))
        if given.incarnations != incarnations:
            if not self.has_another(ranks, platform):
                return None
            given.number += 1
            given.incarnations = dict(incarnations)
        return tuple(permute(ranks, given.number))

    def has_another(self, ranks: Collection[int], platform: str) -> bool:
        """Whether these ranks can be given another order once one of them has died and is back."""
        given = self._given.get(tuple(sorted(ranks)))
        return platform != "cpu" or given is None or given.number + 1 < math.factorial(len(ranks))


def permute(ranks: Sequence[int], number: int) -> list[int]:
    """Return the order of this number, of n! orders of n ranks; 0 is their own, and the first n are rotations."""
    left, ordered = list(ranks), []
    while left:
        number, first = divmod(number, len(left))
        left = left[first:] + left[:first]
        ordered.append(left.pop(0))
    return ordered
