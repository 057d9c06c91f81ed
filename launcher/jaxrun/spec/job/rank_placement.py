"""Which hosts and agents have which ranks in an attempt, as a frozen value, and what losses make of it.

    --exclude-hosts, --quarantine ──▶ left_out ──▶ the backend ──▶ hosts, spares, agents of the first attempt
    each later attempt:  use_spares ──▶ leave_out_lost ──▶ take_back ──▶ assign_agents
    within an attempt:   replace_host, while the ranks on the other hosts go on

supervisor/next_attempt_hosts.py decides which hosts are lost, and which are back.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from msgspec import Struct, field
from msgspec.structs import replace

from jaxrun.protocol.agent_id import AgentId
from jaxrun.text import plural

LOST = "lost"  # why a host is left out that the job itself has lost


class Placement(Struct, frozen=True):
    """Which hosts and agents have which ranks, as far as that is decided.

    hosts:     the host of each rank; empty while the backend may still choose
    spares:    the hosts that may replace a lost one
    left_out:  the hosts that the job must not use, or has lost, with the reasons
    whole:     the host of each rank when no host is missing
    agents:    each agent's ranks, by its number; empty while it waits on a spare host
    awaited:   the agents that the attempt waits for (--wait-hosts), and the hosts on which they were lost
    notes:     what was changed in the course of the job, for people
    """

    hosts: tuple[str, ...] = ()
    spares: tuple[str, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)
    whole: tuple[str, ...] = ()
    agents: Mapping[AgentId, tuple[int, ...]] = field(default_factory=dict)
    awaited: Mapping[AgentId, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def is_smaller(self) -> bool:
        """Whether the attempt runs on fewer hosts than the job could."""
        return len(self.hosts) < len(self.whole)

    def is_served_by(self, usable: Collection[AgentId]) -> bool:
        """Whether the usable agents are all that its ranks need, except those that it waits for."""
        needed = (agent for agent, ranks in self.agents.items() if ranks)
        return all(agent in usable or agent in self.awaited for agent in needed)


UNPLACED = Placement()


# ---- hosts


def use_spares(placement: Placement, lost: Collection[str]) -> Placement:
    """Let spare hosts take all ranks of lost hosts, in the order of ranks, until no spare host is left."""
    to_replace = [host for host in dict.fromkeys(placement.hosts) if host in lost]
    taken = dict(zip(to_replace, placement.spares, strict=False))
    return replace(
        placement,
        hosts=tuple(taken.get(host, host) for host in placement.hosts),
        whole=tuple(taken.get(host, host) for host in placement.whole),
        spares=placement.spares[len(taken) :],
        left_out=_without_used({**placement.left_out, **dict.fromkeys(taken, LOST)}, taken.values()),
        notes=(*placement.notes, *(f"{spare} takes the place of {host}" for host, spare in taken.items())),
    )


def leave_out_lost(placement: Placement, lost: Collection[str], min_hosts: int | None) -> Placement:
    """Leave out lost hosts, in the order of ranks, while more than `min_hosts` are left; none if that is None."""
    hosts, left_out, notes = placement.hosts, {**placement.left_out}, [*placement.notes]
    for host in dict.fromkeys(placement.hosts):
        if host in lost and min_hosts is not None and len(set(hosts)) > min_hosts:
            hosts = tuple(name for name in hosts if name != host)
            left_out[host] = LOST
            notes.append(f"{host} is left out: {describe_size(hosts)}")
    return replace(placement, hosts=hosts, left_out=left_out, notes=tuple(notes))


def take_back(placement: Placement, found: Collection[str]) -> Placement:
    """Put hosts that have come back where hosts are missing, each in its former place if that is free."""
    used = dict.fromkeys(placement.hosts)
    missing = [host for host in dict.fromkeys(placement.whole) if host not in used]
    own = [host for host in missing if host in found]
    others = [host for host in found if host not in used and host not in own]
    places = dict.fromkeys(own) | dict(zip([host for host in missing if host not in own], others, strict=False))
    taken = {host: other or host for host, other in places.items()}
    if not taken:
        return placement
    whole = tuple(taken.get(host, host) for host in placement.whole)
    hosts = tuple(host for host in whole if host in used or host in taken.values())
    note = f"{' and '.join(taken.values())} taken back: {describe_size(hosts)}"
    left_out = _without_used(placement.left_out, hosts)
    return replace(placement, hosts=hosts, whole=whole, left_out=left_out, notes=(*placement.notes, note))


def _without_used(left_out: Mapping[str, str], used: Collection[str]) -> dict[str, str]:
    return {host: why for host, why in left_out.items() if host not in used}


# ---- agents


def agents_by_rank(size: int, count: int = 0) -> dict[AgentId, tuple[int, ...]]:
    """Return one agent for each of `size` ranks, numbered like the rank, and up to `count` agents that wait."""
    return {AgentId(number): (number,) if number < size else () for number in range(max(size, count))}


def assign_agents(
    hosts: Sequence[str], there: Mapping[AgentId, str], spares: Collection[str] = (), *, share: bool = False
) -> dict[AgentId, tuple[int, ...]] | None:
    """Give each rank an agent on its host, of those in `hosts`; None if a host has too few agents.

    `there` has the remaining agents and their hosts. Agents on `spares` wait, and get no rank. With `share`, the ranks
    of a host may have one agent in common.
    """
    by_host: dict[str, list[AgentId]] = {}
    for agent in sorted(there):
        by_host.setdefault(there[agent], []).append(agent)
    ranks_of: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks_of.setdefault(host, []).append(rank)
    agents: dict[AgentId, tuple[int, ...]] = {}
    for host, ranks in ranks_of.items():
        if not (on_host := _divide(ranks, by_host.pop(host, []), share=share)):
            return None
        agents |= on_host
    return agents | {agent: () for spare in spares for agent in by_host.get(spare, ())}


def replace_host(
    placement: Placement, lost: str, waiting: Mapping[AgentId, str], *, share: bool = False
) -> Placement | None:
    """Let a spare host take all ranks of a lost one, with the agents that wait there; None if none has enough agents.

    `waiting` has these agents and their hosts; `share` is as in `assign_agents`.
    """
    ranks = [rank for rank, host in enumerate(placement.hosts) if host == lost]
    for spare in placement.spares:
        on_spare = sorted(agent for agent, host in waiting.items() if host == spare)
        if taken := _divide(ranks, on_spare, share=share):
            others = [host for host in placement.spares if host != spare]
            placed = use_spares(replace(placement, spares=(spare, *others)), {lost})
            kept = {agent: own for agent, own in placement.agents.items() if set(own).isdisjoint(ranks)}
            return replace(placed, agents={**kept, **taken})
    return None


def _divide(ranks: Sequence[int], agents: Sequence[AgentId], *, share: bool) -> dict[AgentId, tuple[int, ...]]:
    """Divide the ranks of a host among its agents; empty if these are too few."""
    size, count = len(ranks), min(len(agents), len(ranks))
    if count < size and not share:
        return {}
    bounds = [(index * size // count, (index + 1) * size // count) for index in range(count)]
    return {agent: tuple(ranks[start:stop]) for agent, (start, stop) in zip(agents, bounds, strict=False)}


# ---- for people


def describe_size(hosts: Sequence[str]) -> str:
    """Write `4 ranks on 2 hosts`."""
    return f"{plural(len(hosts), 'rank')} on {plural(len(dict.fromkeys(hosts)), 'host')}"


def describe_left_out(left_out: Mapping[str, str], quarantine: Path | None) -> str:
    """Write `without h3 (bad-hosts: lost); to use a host again, delete its line in bad-hosts`; empty for no host."""
    if not left_out:
        return ""
    again = f"; to use a host again, delete its line in {quarantine}" if quarantine else ""
    return f"without {', '.join(f'{host} ({why})' for host, why in left_out.items())}{again}"
