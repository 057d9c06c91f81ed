"""Which rank keeps which part of the state, and whether what is left of it is the whole: values and decisions.

An array is cut into regions, as its sharding has it. Of the ranks of a host that hold a region, one keeps it; and it
sends a copy to a rank of the next host, in a ring, if no other host holds that region. So a host keeps no byte of the
state twice, and the state outlives each host, and any hosts that are not neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

EVERYBODY = -1
ALIGNMENT = 64
Bounds = tuple[tuple[int, int], ...]  # of a region: start and stop along each axis


@dataclass(frozen=True, slots=True)
class Region:
    """A part of the leaf `leaf` of the state, which the ranks `holders` hold on their devices.

    owner:  the rank whose array it is, where no other rank knows of it; else EVERYBODY
    turn:   by which the ranks of a host divide the work
    """

    leaf: int
    owner: int
    bounds: Bounds
    nbytes: int
    turn: int
    holders: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StatePiece:
    """A region as it is kept in a file, from the byte `offset` on."""

    leaf: int
    owner: int
    bounds: Bounds
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class RankShare:
    """What one rank keeps; the first `sole_bytes` of it are those regions that no other host holds."""

    pieces: tuple[StatePiece, ...]
    sole_bytes: int
    nbytes: int


def share_out(regions: Iterable[Region], hosts: Sequence[str]) -> list[RankShare]:
    """What each rank keeps, where the rank r is on `hosts[r]`; equal on all ranks, which take turns."""
    sole: list[list[Region]] = [[] for _ in hosts]
    others: list[list[Region]] = [[] for _ in hosts]
    has_peers = len(set(hosts)) > 1
    for region in regions:
        by_host: dict[str, list[int]] = {}
        for rank in region.holders:
            by_host.setdefault(hosts[rank], []).append(rank)
        kept = sole if len(by_host) == 1 and has_peers else others
        for ranks in by_host.values():
            kept[ranks[region.turn % len(ranks)]].append(region)
    return [_lay(*both) for both in zip(sole, others, strict=True)]


def _lay(sole: Sequence[Region], others: Sequence[Region]) -> RankShare:
    pieces, end, sole_bytes = [], 0, 0
    for number, region in enumerate((*sole, *others)):
        pieces.append(StatePiece(region.leaf, region.owner, region.bounds, end, region.nbytes))
        end = -(-(end + region.nbytes) // ALIGNMENT) * ALIGNMENT
        if number < len(sole):
            sole_bytes = end
    return RankShare(tuple(pieces), sole_bytes, end)


def keeper_of_copy(rank: int, hosts: Sequence[str]) -> int | None:
    """The rank on the next host that keeps the copy of what `rank` alone keeps; None where there is one host only."""
    ring = list(dict.fromkeys(hosts))
    if len(ring) == 1:
        return None
    following = ring[(ring.index(hosts[rank]) + 1) % len(ring)]
    mine, theirs = ([r for r, host in enumerate(hosts) if host == name] for name in (hosts[rank], following))
    return theirs[mine.index(rank) % len(theirs)]


def memory_by_host(shares: Sequence[RankShare], hosts: Sequence[str]) -> dict[str, int]:
    """How many bytes one snapshot takes on each host, the copies that it keeps for another host included."""
    total = dict.fromkeys(hosts, 0)
    for rank, share in enumerate(shares):
        total[hosts[rank]] += share.nbytes
        keeper = keeper_of_copy(rank, hosts)
        if keeper is not None:
            total[hosts[keeper]] += share.sole_bytes
    return total


# ---- what is left


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a file has of a snapshot.

    attempt, step:  of which snapshot; `structure` says what state it is of, and must be that of the state to restore
    pieces:         that it has
    checksums:      of each chunk of the file: from which byte on, how many, and their digest
    """

    attempt: int
    step: int
    structure: str
    nbytes: int
    pieces: tuple[StatePiece, ...]
    checksums: tuple[tuple[int, int, bytes], ...]

    def of_copy(self, nbytes: int) -> Manifest:
        """That of the first bytes alone."""
        pieces = tuple(piece for piece in self.pieces if piece.offset < nbytes)
        return replace(self, nbytes=nbytes, pieces=pieces, checksums=tuple(c for c in self.checksums if c[0] < nbytes))


@dataclass(frozen=True, slots=True)
class SnapshotFile:
    """A whole file on a host."""

    host: str
    name: str
    manifest: Manifest


@dataclass(frozen=True, slots=True)
class PlacedPiece:
    """A piece, and where it can be read."""

    piece: StatePiece
    file: SnapshotFile


Pieces = Mapping[tuple[int, int], Sequence[PlacedPiece]]  # by leaf and owner


def gather(files: Iterable[SnapshotFile], host: str) -> Pieces:
    """The pieces of these files, each once, on this host if it is there."""
    found: dict[tuple[int, int, Bounds], PlacedPiece] = {}
    for file in files:
        for piece in file.manifest.pieces:
            key = (piece.leaf, piece.owner, piece.bounds)
            if key not in found or file.host == host:
                found[key] = PlacedPiece(piece, file)
    by_leaf: dict[tuple[int, int], list[PlacedPiece]] = {}
    for (leaf, owner, _), placed in found.items():
        by_leaf.setdefault((leaf, owner), []).append(placed)
    return by_leaf


def cover(pieces: Pieces, leaf: int, owner: int, bounds: Bounds) -> list[PlacedPiece] | None:
    """The pieces of which this region can be made; None if some of it is not there.

    An array of all ranks may have been one that each rank had for itself, and the other way round.
    """
    owners = [owner, EVERYBODY] if owner != EVERYBODY else [EVERYBODY, *sorted(o for n, o in pieces if n == leaf)]
    for candidate in owners:
        there = pieces.get((leaf, candidate), ())
        found = [placed for placed in there if overlap(placed.piece.bounds, bounds) is not None]
        # As the regions of a sharding do not overlap, they cover what they add up to.
        if sum(_volume(overlap(placed.piece.bounds, bounds)) for placed in found) == _volume(bounds):
            return found
    return None


def overlap(one: Bounds, other: Bounds) -> Bounds | None:
    """What two regions of an array have in common, if anything."""
    both = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return both if all(start < stop for start, stop in both) else None


def _volume(bounds: Bounds | None) -> int:
    return 0 if bounds is None else math.prod(stop - start for start, stop in bounds)


def by_snapshot(files: Iterable[SnapshotFile]) -> Iterator[tuple[tuple[int, int], list[SnapshotFile]]]:
    """The files of each snapshot, the latest first."""
    found: dict[tuple[int, int], list[SnapshotFile]] = {}
    for file in files:
        found.setdefault((file.manifest.attempt, file.manifest.step), []).append(file)
    yield from sorted(found.items(), reverse=True)
