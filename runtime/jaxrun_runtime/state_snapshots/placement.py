"""Decides which rank keeps which part of the state, and whether the parts that are left are the whole. Pure.

An array is cut into regions according to its sharding. On each host that holds a region, one of its ranks keeps it. If
only one host holds the region, that rank also sends a copy to a rank of the next host, in a ring. So a host keeps no
byte of the state twice, and the state outlives any one host, and any hosts that are not neighbours.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

SLOTS = 2
DESCRIPTION = -1  # used instead of a leaf's number for the description of the whole state, which each host has
_HEADER_BYTES = 64  # at the start of each file
_AXIS_BYTES = 16
_PAGE_BYTES = 4096
Bounds = tuple[tuple[int, int], ...]  # of a region: start and stop along each axis


class Region(NamedTuple):
    """A part of the leaf `leaf` of the state."""

    leaf: int
    bounds: Bounds


class KeptRegion(NamedTuple):
    """A region, with the ranks that keep it because they hold it, and the ranks that keep a copy sent to them."""

    region: Region
    nbytes: int
    keepers: Sequence[int]
    copies: Sequence[int]


def share_out(regions: Iterable[tuple[Region, int, Iterable[int]]], hosts: Sequence[str]) -> list[KeptRegion]:
    """Decide which ranks keep the regions. The result is equal on all ranks; the ranks of a host take turns.

    regions:  each with its number of bytes and the ranks that hold it
    hosts:    the host of each rank
    """
    ranks_of: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks_of.setdefault(host, []).append(rank)
    following = dict(zip(ranks_of, [*ranks_of][1:] + [*ranks_of][:1], strict=True))
    shares = []
    for turn, (region, nbytes, holders) in enumerate(regions):
        by_host: dict[str, list[int]] = {}
        for rank in holders:
            by_host.setdefault(hosts[rank], []).append(rank)
        others = [ranks_of[following[host]] for host in by_host if len(by_host) == 1 < len(ranks_of)]
        keepers, copies = ([ranks[turn % len(ranks)] for ranks in groups] for groups in (by_host.values(), others))
        shares.append(KeptRegion(region, nbytes, keepers, copies))
    return shares


def memory_by_host(shares: Iterable[KeptRegion], hosts: Sequence[str]) -> Mapping[str, int]:
    """Return the number of bytes that one snapshot takes on each host."""
    total = Counter[str]()
    for kept in shares:
        for rank in (*kept.keepers, *kept.copies):
            total[hosts[rank]] += -(-(header_bytes(kept.region) + kept.nbytes) // _PAGE_BYTES) * _PAGE_BYTES
    return total


def header_bytes(region: Region) -> int:
    """Return the length of the header of the region's file."""
    return _HEADER_BYTES + _AXIS_BYTES * len(region.bounds)


class Room(NamedTuple):
    """The memory of a host in bytes: how much is free, and how much the files of each slot take."""

    free: int
    held: Sequence[int]


def lacks_room(room: Room, slot: int, nbytes: int) -> tuple[int, int] | None:
    """Whether the host lacks memory for a snapshot of `nbytes` in the slot, and later for another in the other slot.

    Returns the bytes needed and the bytes available; None if there is enough memory.
    """
    for needed, there in ((nbytes, room.free + room.held[slot]), (SLOTS * nbytes, room.free + sum(room.held))):
        if needed > there:
            return needed, there
    return None


# ---- what is left


class StateSnapshot(NamedTuple):
    """Identifies a snapshot. Of two snapshots, the later one is greater.

    number:     of the snapshot in the attempt; increases
    structure:  a digest of the facts of all leaves
    """

    attempt: int
    number: int
    step: int
    structure: str

    @property
    def slot(self) -> int:
        """The slot that has the snapshot on each host."""
        return self.number % SLOTS


def next_number(last: int, kept: StateSnapshot | None) -> int:
    """Return the number of the attempt's next snapshot after `last`, so that it does not use the slot of `kept`."""
    number = last + 1
    return number + 1 if kept is not None and number % SLOTS == kept.slot else number


Places = Mapping[int, Mapping[Bounds, int]]  # by leaf: a rank on whose host each region is


def gather(
    found: Iterable[tuple[int, StateSnapshot, Region]], hosts: Sequence[str], host: str
) -> dict[StateSnapshot, Places]:
    """Return where the regions of each snapshot are, from what all ranks found; prefers places on `host`."""
    snapshots: dict[StateSnapshot, dict[int, dict[Bounds, int]]] = {}
    for rank, snapshot, (leaf, bounds) in found:
        places = snapshots.setdefault(snapshot, {}).setdefault(leaf, {})
        if bounds not in places or hosts[rank] == host:
            places[bounds] = rank
    return dict(snapshots)


def cover(places: Places, leaf: int, bounds: Bounds) -> dict[Bounds, int] | None:
    """Return kept regions from which this region can be made, with their places; None if a part is missing."""
    kept = places.get(leaf, {})
    common = {there: part for there in kept if (part := overlap(there, bounds)) is not None}
    # The regions of a sharding do not overlap, so they cover the region if their volumes add up to its volume.
    is_whole = sum(map(volume, common.values())) == volume(bounds)
    return {there: kept[there] for there in common} if is_whole else None


def is_whole(places: Places, wholes: Mapping[int, Bounds]) -> bool:
    """Whether all leaves, given with their bounds, can be made from the kept regions."""
    return all(cover(places, leaf, bounds) is not None for leaf, bounds in wholes.items())


def overlap(one: Bounds, other: Bounds) -> Bounds | None:
    """Return the common part of two regions of an array; None if there is none."""
    both = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return both if all(start < stop for start, stop in both) else None


def volume(bounds: Bounds) -> int:
    return math.prod(stop - start for start, stop in bounds)
