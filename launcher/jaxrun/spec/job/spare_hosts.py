"""Decides on which hosts a job goes on that has lost some: spare ones take their places, or it goes on smaller.

Pure functions over the hosts of its ranks, so that every rank keeps its host but those that cannot. Where the agents of
the other hosts outlive the loss, it goes on with them: each agent has a number, which it keeps, and a rank in each
attempt.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from jaxrun.text import plural


@dataclass(frozen=True, slots=True)
class HostChoice:
    """Where the next attempt runs.

    placement:  the host of each rank
    spares:     the hosts that are left to take another's place
    left_out:   those that it runs on no longer
    notes:      what was done, for people
    """

    placement: tuple[str, ...]
    spares: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class AgentNumbers:
    """Which agents one attempt has, by their numbers among those that the launch command has started.

    of_ranks:  the number of each rank's agent; empty where it is the rank
    waiting:   those of the agents on spare hosts, which have no rank
    """

    of_ranks: tuple[int, ...] = ()
    waiting: frozenset[int] = frozenset()

    def includes(self, number: int) -> bool:
        """Whether the attempt has a use for this agent, as far as is known here."""
        return not self.of_ranks or number in self.of_ranks or number in self.waiting

    def of_rank(self, rank: int) -> int:
        return self.of_ranks[rank] if rank < len(self.of_ranks) else rank

    @property
    def ranks(self) -> dict[int, int]:
        """The rank of each agent by its number, as far as it is another."""
        return {number: rank for rank, number in enumerate(self.of_ranks)}


AGENTS_BY_RANK = AgentNumbers()  # each agent has the rank that is its number


def assign_agents(
    placement: Sequence[str], agents: Mapping[int, str], spares: Collection[str] = ()
) -> AgentNumbers | None:
    """Give each rank of `placement` an agent of its host; None where a host has too few.

    `agents` are those that are there, with their hosts by number: on `spares` they wait.
    """
    by_host: dict[str, list[int]] = {}
    for number in sorted(agents, reverse=True):
        by_host.setdefault(agents[number], []).append(number)
    numbers = tuple(by_host[host].pop() if by_host.get(host) else None for host in placement)
    if None in numbers:
        return None
    waiting = frozenset(number for spare in spares for number in by_host.get(spare, ()))
    return AgentNumbers(tuple(number for number in numbers if number is not None), waiting)


def replace_hosts(
    placement: Sequence[str], spares: Sequence[str], bad: Collection[str], min_hosts: int | None
) -> HostChoice:
    """Leave out the bad hosts, as long as there are spare ones, and then down to `min_hosts`; None: all are needed."""
    places, left = list(placement), list(spares)
    left_out, notes = [], []
    for host in dict.fromkeys(name for name in placement if name in bad):
        if left:
            spare = left.pop(0)
            places = [spare if name == host else name for name in places]
            notes.append(f"{spare} takes the place of {host}")
        elif min_hosts is not None and len(dict.fromkeys(places)) > min_hosts:
            places = [name for name in places if name != host]
            hosts = len(dict.fromkeys(places))
            notes.append(f"{host} is left out: {plural(len(places), 'rank')} on {plural(hosts, 'host')}")
        else:
            continue
        left_out.append(host)
    return HostChoice(tuple(places), tuple(left), tuple(left_out), tuple(notes))
