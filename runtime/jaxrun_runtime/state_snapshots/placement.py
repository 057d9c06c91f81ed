"""Which rank keeps which part of the state, and whether what is left of it is the whole: values and decisions.

An array is cut into regions, as its sharding has it. Of the ranks of a host that hold a region, one keeps it; and it
sends a copy to a rank of the next host, in a ring, if no other host holds that region. So a host keeps no byte of the
state twice, and the state outlives each host, and any hosts that are not neighbours.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

SLOTS = 2
DESCRIPTION = -1  # stands for a leaf: the description of the whole state, which each host has
_HEADER_BYTES = 64  # at the start of a file, which has one region
_AXIS_BYTES = 16
_PAGE_BYTES = 4096
Bounds = tuple[tuple[int, int], ...]  # of a region: start and stop along each axis


class Region(NamedTuple):
    """A part of the leaf `leaf` of the state."""

    leaf: int
    bounds: Bounds


class KeptRegion(NamedTuple):
    """Which ranks keep a region as they hold it, and which ones copies that are sent to them."""

    region: Region
    nbytes: int
    keepers: Sequence[int]
    copies: Sequence[int]


def share_out(regions: Iterable[tuple[Region, int, Iterable[int]]], hosts: Sequence[str]) -> list[KeptRegion]:
    """Who keeps the regions, given with their bytes and holders, where the rank r is on `hosts[r]`.

    Equal on all ranks; those of a host take turns.
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
    """How many bytes one snapshot takes on each host."""
    total = Counter[str]()
    for kept in shares:
        for rank in (*kept.keepers, *kept.copies):
            total[hosts[rank]] += -(-(header_bytes(kept.region) + kept.nbytes) // _PAGE_BYTES) * _PAGE_BYTES
    return total


def header_bytes(region: Region) -> int:
    """How long the header is of the file that has the region."""
    return _HEADER_BYTES + _AXIS_BYTES * len(region.bounds)


class Room(NamedTuple):
    """The memory of a host, in bytes: what is free, and what the files of each slot take."""

    free: int
    held: Sequence[int]


def lacks_room(room: Room, slot: int, nbytes: int) -> tuple[int, int] | None:
    """What is needed to write a snapshot of so many bytes into the slot, and later one into the other, and what is
    there for that; None if it is enough.
    """
    for needed, there in ((nbytes, room.free + room.held[slot]), (SLOTS * nbytes, room.free + sum(room.held))):
        if needed > there:
            return needed, there
    return None


# ---- what is left


class StateSnapshot(NamedTuple):
    """One snapshot. The later one of two is greater.

    number:     of the snapshot in the attempt; those of an attempt grow
    structure:  a digest of what the state is made of
    """

    attempt: int
    number: int
    step: int
    structure: str

    @property
    def slot(self) -> int:
        """The one of each host's two slots that has it."""
        return self.number % SLOTS


def next_number(last: int, kept: StateSnapshot | None) -> int:
    """The number of the next snapshot of the attempt after `last`, whose slot is not that of the one to be kept."""
    number = last + 1
    return number + 1 if kept is not None and number % SLOTS == kept.slot else number


Places = Mapping[int, Mapping[Bounds, int]]  # by leaf: a rank on whose host each region is


def gather(
    found: Iterable[tuple[int, StateSnapshot, Region]], hosts: Sequence[str], host: str
) -> dict[StateSnapshot, Places]:
    """Of each snapshot where its regions are, of what ranks have found: on `host` rather than on another one."""
    snapshots: dict[StateSnapshot, dict[int, dict[Bounds, int]]] = {}
    for rank, snapshot, (leaf, bounds) in found:
        places = snapshots.setdefault(snapshot, {}).setdefault(leaf, {})
        if bounds not in places or hosts[rank] == host:
            places[bounds] = rank
    return dict(snapshots)


def cover(places: Places, leaf: int, bounds: Bounds) -> dict[Bounds, int] | None:
    """The kept regions of which this one can be made, with their places; None if some of it is not there."""
    kept = places.get(leaf, {})
    common = {there: part for there in kept if (part := overlap(there, bounds)) is not None}
    # As the regions of a sharding do not overlap, they cover what they add up to.
    is_whole = sum(map(volume, common.values())) == volume(bounds)
    return {there: kept[there] for there in common} if is_whole else None


def is_whole(places: Places, wholes: Mapping[int, Bounds]) -> bool:
    """Whether all leaves are there, whose bounds these are."""
    return all(cover(places, leaf, bounds) is not None for leaf, bounds in wholes.items())


def overlap(one: Bounds, other: Bounds) -> Bounds | None:
    """What two regions of an array have in common, if anything."""
    both = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return both if all(start < stop for start, stop in both) else None


def volume(bounds: Bounds) -> int:
    return math.prod(stop - start for start, stop in bounds)
