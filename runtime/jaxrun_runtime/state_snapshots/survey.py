"""Finds out which snapshots the hosts have, and decides which one is restored, or explains why none is. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from jaxrun_runtime.state_snapshots import placement, structure
from jaxrun_runtime.state_snapshots.placement import DESCRIPTION, Bounds, Places, Region, StateSnapshot
from jaxrun_runtime.state_snapshots.structure import NUMBERS, Description, LeafFacts

_MAX_DIFFERENCES = 5
_GO_ON = "continue from the checkpoint on disk"
_UNFINISHED = "the attempt before ended while {} was written"


class Listing(NamedTuple):
    """The files that one rank has found in the memory of its host.

    files:  the whole files
    slots:  the slots that have any file, whole or not
    """

    files: Sequence[tuple[StateSnapshot, Region]]
    slots: Sequence[int]

    @classmethod
    def from_json(cls, files: Sequence[Any], slots: Sequence[int]) -> Listing:
        found = [
            (StateSnapshot(*snapshot), Region(leaf, tuple((start, stop) for start, stop in bounds)))
            for snapshot, (leaf, bounds) in files
        ]
        return cls(found, slots)


class Survey(NamedTuple):
    """The files that all ranks have found.

    places:        where the regions of each snapshot are
    descriptions:  the descriptions of snapshots that a host has
    """

    listings: Sequence[Listing]
    hosts: Sequence[str]
    places: Mapping[StateSnapshot, Places]
    descriptions: Mapping[StateSnapshot, Description]

    def wholes(self) -> list[StateSnapshot]:
        """Return the snapshots that have every leaf, the latest first."""
        whole = (
            snapshot
            for snapshot, description in self.descriptions.items()
            if placement.is_whole(self.places[snapshot], _wholes_of(description.leaves))
        )
        return sorted(whole, reverse=True)

    def choose(self, like: Sequence[LeafFacts]) -> StateSnapshot | None:
        """Return the latest whole snapshot that fits `like`, or None."""
        found = (one for one in self.wholes() if not structure.list_differences(self.descriptions[one].leaves, like))
        return next(found, None)

    def explain_none(self, like: Sequence[LeafFacts]) -> str:
        """Return why no snapshot is chosen, as text; empty if no snapshot was taken."""
        if whole := self.wholes():
            differences = structure.list_differences(self.descriptions[whole[0]].leaves, like)
            more = f"; and {len(differences) - _MAX_DIFFERENCES} more" if len(differences) > _MAX_DIFFERENCES else ""
            different = f"{'; '.join(differences[:_MAX_DIFFERENCES])}{more}"
            return f"the snapshot of step {whole[0].step} in memory does not fit `like`: {different}; {_GO_ON}"
        if not self.places:
            is_begun = any(listing.slots for listing in self.listings)
            return f"no snapshot in memory is whole: {_UNFINISHED.format('the first')}; {_GO_ON}" if is_begun else ""
        latest = max(self.places)
        if lost := self._hosts_without(latest):
            what = f"the parts of step {latest.step} on {' and '.join(lost)} are lost"
            return f"no snapshot in memory is whole, because {what}; {_GO_ON}"
        return f"no snapshot in memory is whole: {_UNFINISHED.format(f'that of step {latest.step}')}; {_GO_ON}"

    def _hosts_without(self, snapshot: StateSnapshot) -> list[str]:
        """Return the hosts of the job that took the snapshot which have no file of it, not even a void one."""
        described = self.descriptions.get(snapshot)
        there = {self.hosts[rank] for rank, listing in enumerate(self.listings) if snapshot.slot in listing.slots}
        return [host for host in described.hosts if host not in there] if described is not None else []


def gather(listings: Sequence[Listing], hosts: Sequence[str], host: str) -> Mapping[StateSnapshot, Places]:
    found = ((rank, *file) for rank, listing in enumerate(listings) for file in listing.files)
    return placement.gather(found, hosts, host)


def description_owners(listings: Sequence[Listing]) -> Mapping[StateSnapshot, int]:
    """Return, for each snapshot, the first rank whose host has its description."""
    owners: dict[StateSnapshot, int] = {}
    for rank, listing in enumerate(listings):
        for snapshot, region in listing.files:
            if region.leaf == DESCRIPTION:
                owners.setdefault(snapshot, rank)
    return owners


def slots_of(names: Collection[str]) -> list[int]:
    """Return the slots that have a file."""
    return sorted({int(name[0]) for name in names if name[:2] in {f"{slot}_" for slot in range(placement.SLOTS)}})


def _wholes_of(leaves: Sequence[LeafFacts]) -> Mapping[int, Bounds]:
    return {
        number: tuple((0, length) for length in facts.shape)
        for number, facts in enumerate(leaves)
        if facts.kind not in NUMBERS
    }
