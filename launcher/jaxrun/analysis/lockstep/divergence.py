"""Divergences, calls at which ranks were out of step: which ranks did what. From flights (compare.py) or calls."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from enum import Enum, auto
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from jaxrun.protocol.flight import Arrays, ProgramDetails
from jaxrun.protocol.hidden_fields import HidesFields
from jaxrun.protocol.worker_messages import Call
from jaxrun.text import agree, group_alike, plural


class OtherCall(NamedTuple):
    """The call in which ranks wait instead."""

    number: int
    group: str
    name: str
    place: str


class Absence(Struct, frozen=True):
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


class CallGroup(HidesFields, frozen=True):
    """Ranks that did the same.

    If they made a call, `name` is the call's; rank `recorded_by` has recorded it as its program number `program`.
    Source, arguments, results, mesh and `hlo` (the lowered program, packed) come from the program's details, if known.
    If they made no call, there is an `absence`.
    """

    hidden = frozenset({"hlo"})

    ranks: tuple[int, ...]
    name: str = ""
    key: str = ""
    code: str = ""
    source: str = ""
    place: str = ""
    arguments: Arrays = ()
    results: Arrays = ()
    mesh: str = ""
    hlo: str = ""
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


class CallOrder(Enum):
    """What the calls around a divergence show. They are of the line that made the call in which ranks differ."""

    UNKNOWN = auto()
    NAN_SEARCH = auto()  # one of the calls belongs to a search for a NaN, which stops at another operation on each rank
    REORDERED = auto()  # these ranks make the same calls, one after another, in different orders
    NO_BATCHES = auto()  # what the ranks have called there before does not show a loop over batches of one size
    BATCHES = auto()  # it may have been such a loop
    UNREAD = auto()  # a rank has not told its calls yet

    @property
    def is_open(self) -> bool:
        """Whether further calls may show something else."""
        return self in (CallOrder.NO_BATCHES, CallOrder.BATCHES, CallOrder.UNREAD)


class Divergence(Struct, frozen=True):
    """Ranks that did different things as call `number` of the ranks `group`; `call_groups` has the largest first.

    is_earlier:  all ranks make the same call here, but they were out of step before, in calls that are not recorded
    order:       what the calls before and after it show
    """

    group: str
    number: int
    call_groups: tuple[CallGroup, ...]
    is_earlier: bool = False
    order: CallOrder = CallOrder.UNKNOWN

    @property
    def title(self) -> str:
        """The call's title: `cross-process call #12`."""
        return f"cross-process call #{self.number}" if self.number else "a program of replicated values"

    def is_in_call(self, other: Divergence) -> bool:
        """Whether both are in the same call."""
        return (self.group, self.number) == (other.group, other.number)

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
