"""Decides on which hosts a job goes on that has lost some: spare ones take their places, or it goes on smaller.

Pure functions over the hosts of its ranks, so that every rank keeps its host but those that cannot. Where the agents of
the other hosts outlive the loss, it goes on with them: each agent keeps its number, and has ranks in each attempt.
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


def agents_by_rank(size: int, count: int = 0) -> dict[int, tuple[int, ...]]:
    """An agent for each of `size` ranks, whose number is its rank, and behind them, up to `count`, those that wait."""
    return {number: (number,) if number < size else () for number in range(max(size, count))}


def assign_agents(
    placement: Sequence[str], there: Mapping[int, str], spares: Collection[str] = ()
) -> dict[int, tuple[int, ...]] | None:
    """Give each rank of `placement` an agent of its host, by number; None where a host has too few.

    `there` are the agents that are left, with their hosts: on `spares` they wait, and have no rank.
    """
    by_host: dict[str, list[int]] = {}
    for number in sorted(there, reverse=True):
        by_host.setdefault(there[number], []).append(number)
    agents: dict[int, tuple[int, ...]] = {}
    for rank, host in enumerate(placement):
        if not by_host.get(host):
            return None
        agents[by_host[host].pop()] = (rank,)
    return agents | {number: () for spare in spares for number in by_host.get(spare, ())}


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
