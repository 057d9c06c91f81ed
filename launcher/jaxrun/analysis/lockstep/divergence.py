"""Divergences, calls at which ranks were out of step: which ranks did what. From flights (compare.py) or calls."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from jaxrun.protocol.flight import Arrays, ProgramDetails
from jaxrun.protocol.worker_messages import Call
from jaxrun.text import agree, group_alike, plural


class OtherCall(NamedTuple):
    """The call in which ranks wait instead."""

    number: int
    group: str
    name: str
    place: str


@dataclass(frozen=True, slots=True)
class Absence:
    """What ranks do that make no such call: they have finished, or wait in another call.

    made: number of calls of the group that they have made; None if unknown
    """

    made: int | None = None
    waits_in: OtherCall | None = None

    def format(self, count: int = 1) -> str:
        """Write `has made only 4 calls and is finished`, in the plural for `count` ranks."""
        if self.waits_in is not None:
            number, group, name, place = self.waits_in
            return f"{agree('waits', count)} in call #{number} of ranks {group}, {name} at {place}"
        finished = f"{agree('is', count)} finished"
        if self.made is None:
            return finished
        calls = f"only {plural(self.made, 'call')}" if self.made else "no call"
        return f"{agree('has', count)} made {calls} and {finished}"


@dataclass(frozen=True, slots=True)
class CallGroup:
    """Ranks that did the same.

    If they made a call, `name` is the call's; rank `recorded_by` has recorded it as its program number `program`.
    Source, arguments, results, mesh and `hlo` (the lowered program, packed) come from the program's details, if known.
    If they made no call, there is an `absence`.
    """

    ranks: tuple[int, ...]
    name: str = ""
    key: str = ""
    code: str = ""
    source: str = ""
    place: str = ""
    arguments: Arrays = ()
    results: Arrays = ()
    mesh: str = ""
    hlo: str = field(default="", repr=False)
    absence: Absence | None = None
    recorded_by: int = -1
    program: int = 0

    @property
    def is_described(self) -> bool:
        return bool(self.arguments or self.results or self.mesh)

    def with_details(self, details: ProgramDetails | None) -> CallGroup:
        if details is None:
            return self
        return replace(
            self,
            source=details.source or self.source,
            arguments=details.arguments,
            results=details.results,
            mesh=details.mesh,
            hlo=details.text,
        )


@dataclass(frozen=True, slots=True)
class Divergence:
    """Ranks that did different things as call `number` of the ranks `group`; `call_groups` has the largest first.

    is_earlier:  all ranks make the same call here, but they were out of step before, in calls that are not recorded
    """

    group: str
    number: int
    call_groups: tuple[CallGroup, ...]
    is_earlier: bool = False

    @property
    def title(self) -> str:
        """The call's title: `cross-process call #12`."""
        return f"cross-process call #{self.number}" if self.number else "a program of replicated values"

    def with_program_details(self, details: Mapping[int, ProgramDetails]) -> Divergence:
        """Return a copy with what the recorders of the ranks `recorded_by` say about the programs."""
        call_groups = (group.with_details(details.get(group.recorded_by)) for group in self.call_groups)
        return replace(self, call_groups=tuple(call_groups))


def partition_by_program(identities: Mapping[int, tuple[str, str]]) -> tuple[tuple[int, ...], ...]:
    """Partition ranks into sets whose calls may be the same, by each rank's (key, code), the largest set first.

    An empty key or code is unknown and matches any other: such a rank joins the largest set that it matches.
    """
    alike: dict[tuple[str, str], list[int]] = defaultdict(list)
    for rank, identity in identities.items():
        alike[identity].append(rank)
    known = [identity for identity in alike if all(identity)]
    for identity in sorted(alike, key=lambda identity: not identity[0]):
        key, code = identity
        hosts = [other for other in known if key in ("", other[0]) and code in ("", other[1])]
        if not all(identity):
            if hosts:
                alike[max(hosts, key=lambda other: len(alike[other]))] += alike.pop(identity)
            else:
                known.append(identity)
    sets = (tuple(sorted(ranks)) for ranks in alike.values())
    return tuple(sorted(sets, key=lambda ranks: (-len(ranks), ranks)))


def divergence_of_calls(calls: Mapping[int, Call], absent: Mapping[int, Absence] | None = None) -> Divergence | None:
    """Compare the ranks' calls with one number in a group; None if they are the same, and every rank made the call.

    `absent` says what the ranks did that did not make it.
    """
    found = partition_by_program({rank: (call.key, call.code) for rank, call in calls.items()})
    if not calls or (len(found) < 2 and not absent):
        return None
    call_groups = [*(_caller(ranks, calls) for ranks in found), *absent_groups(absent or {})]
    first = next(iter(calls.values()))
    return Divergence(first.group, first.number, largest_first(call_groups))


def absent_groups(absent: Mapping[int, Absence]) -> list[CallGroup]:
    """Return the ranks that make no such call, as one call group for all ranks that do the same instead."""
    return [CallGroup(ranks, absence=absence) for absence, ranks in group_alike(absent)]


def largest_first(call_groups: Iterable[CallGroup]) -> tuple[CallGroup, ...]:
    return tuple(sorted(call_groups, key=lambda call_group: (-len(call_group.ranks), call_group.ranks)))


def _caller(ranks: tuple[int, ...], calls: Mapping[int, Call]) -> CallGroup:
    # Of the ranks whose calls may be the same, use the one that knows most about its call.
    recorded_by = max(ranks, key=lambda rank: (bool(calls[rank].key), bool(calls[rank].code)))
    call = calls[recorded_by]
    return CallGroup(
        ranks, call.name, call.key, call.code, place=call.source_line, recorded_by=recorded_by, program=call.program
    )
