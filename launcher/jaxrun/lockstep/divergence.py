"""A call at which ranks were out of step, as a value: who did what. Made from flights (compare.py) or from calls."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from jaxrun.protocol.worker_messages import Call
from jaxrun.text import plural

# Name, "float32[32,128]" and sharding of each.
Arrays = tuple[tuple[str, str, str], ...]


@dataclass(frozen=True, slots=True)
class CallGroup:
    """Ranks that did the same; of a call `witness`, one of them, recorded it as `program`.

    From its description, where that is known, come source, arguments, results, mesh and `text`, the lowered program as
    it stands there. Ranks that made no such call have no name but `state`: "has made only 4 calls and is finished".
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
    state: str = ""
    recorded_by: int = -1
    program: int = 0

    @property
    def is_described(self) -> bool:
        return bool(self.arguments or self.results or self.mesh)


@dataclass(frozen=True, slots=True)
class Divergence:
    """Parties, most ranks first, that did not make the same call as the group's `number`.

    before:  they do the same in it, but were out of step before; of that nothing is held any more
    oldest:  nothing older is held, so that it may not be the first
    extra:   ranks that made one call more: what they did next is what the others did in its place
    unread:  ranks that did something else again, but what is not known
    """

    group: str
    number: int
    call_groups: tuple[CallGroup, ...]
    is_earlier: bool = False
    is_oldest_recorded: bool = False
    extra_call_ranks: tuple[int, ...] = ()
    unread_ranks: tuple[int, ...] = ()

    def with_program_details(self, texts: Mapping[int, str]) -> Divergence:
        """The same with what the recorders say of the programs: the lines by witness."""
        return replace(
            self, call_groups=tuple(_described(party, texts.get(party.recorded_by, "")) for party in self.call_groups)
        )


def partition_by_program(identities: Mapping[int, tuple[str, str]]) -> tuple[tuple[int, ...], ...]:
    """Ranks whose calls may be the same, by rank's (key, code), most ranks first; one class if all are in step.

    What is not known matches anything: such a rank goes with the most ranks that it may be alike with.
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
    return sorted_rank_sets(alike.values())


def sorted_rank_sets(groups: Iterable[Iterable[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(sorted((tuple(sorted(ranks)) for ranks in groups), key=lambda ranks: (-len(ranks), ranks)))


def divergence_of_calls(calls: Mapping[int, Call], states: Mapping[int, str] | None = None) -> Divergence | None:
    """From the ranks' calls of one number of a group; None if they are alike, and no rank is anywhere else.

    `states` says of other ranks what they did instead: "has made only 4 calls and is finished".
    """
    found = partition_by_program({rank: (call.key, call.code) for rank, call in calls.items()})
    if not calls or (len(found) < 2 and not states):
        return None
    parties = [*(_caller(ranks, calls) for ranks in found), *absent_groups(states or {})]
    first = next(iter(calls.values()))
    return Divergence(first.group, first.number, largest_first(parties))


def absent_groups(states: Mapping[int, str]) -> list[CallGroup]:
    """The ranks that make no such call, one party for each state."""
    ranks: dict[str, list[int]] = defaultdict(list)
    for rank in sorted(states):
        ranks[states[rank]].append(rank)
    return [CallGroup(tuple(alike), state=text) for text, alike in ranks.items()]


def format_absent_state(made: int | None, doing: str) -> str:
    """Of ranks that do not make a call: `has made only 4 calls and is finished`; `made` None: not known how many."""
    if made is None:
        return doing
    return f"has made {'only ' + plural(made, 'call') if made else 'no call'} and {doing}"


def largest_first(parties: Iterable[CallGroup]) -> tuple[CallGroup, ...]:
    return tuple(sorted(parties, key=lambda party: (-len(party.ranks), party.ranks)))


def _caller(ranks: tuple[int, ...], calls: Mapping[int, Call]) -> CallGroup:
    # Of ranks that may be alike, one that knows the most speaks.
    witness = max(ranks, key=lambda rank: (bool(calls[rank].key), bool(calls[rank].code)))
    call = calls[witness]
    return CallGroup(
        ranks, call.name, call.key, call.code, place=call.source_line, recorded_by=witness, program=call.program
    )


def _described(party: CallGroup, text: str) -> CallGroup:
    """The party with what the line says; as it was if the line says nothing."""
    try:
        content = json.loads(text) if text else {}
        return replace(
            party,
            source=str(content.get("source") or party.source),
            arguments=_arrays(content.get("arguments", ())),
            results=_arrays(content.get("results", ())),
            mesh=str(content.get("mesh") or ""),
            hlo=str(content.get("text") or ""),
        )
    except (ValueError, TypeError, AttributeError, RecursionError):
        return party


def _arrays(rows: Iterable[Any]) -> Arrays:
    return tuple((str(name), str(kind), str(sharding)) for name, kind, sharding in rows)
