"""Plans jobs whose agents are on other hosts, as far as this host can, and plans them again after a loss of hosts.

Everything that depends on a host, its devices and cores, is decided once all agents have reported
(head/worker_assignment.py).

In a job that has lost hosts, spare hosts replace them, or the job continues smaller; every other rank keeps its host.
If the agents of the other hosts survive the loss, the job continues with them: each agent keeps its number, and gets
ranks in each attempt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from jaxrun.errors import UsageError
from jaxrun.protocol.agent_id import AgentId
from jaxrun.protocol.worker_command import worker_argv
from jaxrun.spec.job.combinations import check_hosts
from jaxrun.spec.job.environment import inherited_job_variables
from jaxrun.spec.job.job import Job
from jaxrun.spec.job.plan import LaunchCommand, Plan, Worker, describe_left_out
from jaxrun.text import plural


def plan_remote(
    job: Job,
    environ: Mapping[str, str],
    job_id: str,
    command: LaunchCommand,
    hosts: Sequence[str],
    notes: Sequence[str] = (),
    spares: Sequence[str] = (),
    left_out: Sequence[str] = (),
) -> Plan:
    """Plan a job of `len(hosts)` processes.

    hosts:     the expected host of each rank, UNKNOWN_HOST if not known
    spares:    hosts that may replace another
    left_out:  the hosts that `leave_out` has returned
    """
    check_hosts(job, hosts)
    return Plan(
        job=replace(job, processes=len(hosts)),
        job_id=job_id,
        workers=make_workers(hosts),
        argv=worker_argv("python", job.program, is_module=job.module),
        set_env=job.env,
        unset_env=inherited_job_variables(environ),
        local_devices=None,
        device_names=(),
        fork=False,
        notes=tuple(notes),
        launch_command=command,
        spare_hosts=tuple(spares),
        agents=starting_agents(command, len(hosts)),
        left_out=tuple(left_out),
        whole=tuple(hosts),
    )


def make_workers(hosts: Sequence[str]) -> tuple[Worker, ...]:
    """Return a worker for each rank, numbered on its host."""
    sizes = Counter(hosts)
    seen = dict.fromkeys(sizes, 0)
    workers = []
    for rank, host in enumerate(hosts):
        workers.append(Worker(rank=rank, local_rank=seen[host], local_size=sizes[host], host=host))
        seen[host] += 1
    return tuple(workers)


def leave_out(job: Job, offered: Sequence[str]) -> tuple[Job, tuple[str, ...]]:
    """Leave out the excluded ones of these hosts; returns the job for the others, and the names of those left out.

    The number of spare hosts decreases first, then, down to --min-hosts, the job's own. Raises UsageError.
    """
    left_out = tuple(host for host in offered if host in job.excluded)
    if not left_out:
        return job, ()
    there, wanted = len(offered) - len(left_out), job.hosts or len(offered) - job.spares
    hosts = min(there, job.hosts) if job.hosts else None
    if there < max(1, job.min_hosts or job.hosts or 1):
        raise UsageError(
            f"{plural(there, 'host')} of {len(offered)} {'is' if there == 1 else 'are'} left, too few for the job, "
            f"which goes {describe_left_out(job, left_out)}; or name more, or ask for fewer with -N or --min-hosts"
        )
    processes = job.processes * hosts // job.hosts if job.processes and job.hosts and hosts else job.processes
    return replace(job, hosts=hosts, processes=processes, spares=max(0, min(job.spares, there - wanted))), left_out


def count_without_spares(job: Job, there: int) -> int:
    """Return how many of `there` hosts the job runs on besides its --spares. Raises UsageError if there are too few."""
    wanted = job.hosts or there - job.spares
    if wanted < 1 or wanted + job.spares > there:
        jobs = f"-N {job.hosts} and " if job.hosts else ""
        raise UsageError(
            f"{jobs}--spares {job.spares} {'take' if jobs else 'leave'} "
            + (f"{wanted + job.spares} hosts" if jobs else "no host for the job")
            + f", but there {'is' if there == 1 else 'are'} {plural(there, 'host')}; name more, or give fewer spares"
        )
    return wanted


class HostChoice(Struct, frozen=True):
    """The hosts of the next attempt.

    placement:  the host of each rank
    spares:     the remaining spare hosts
    left_out:   the hosts that are no longer used
    notes:      what was changed, for people
    whole:      the host of each rank when no host is missing
    """

    placement: tuple[str, ...]
    spares: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()


def agents_by_rank(size: int, count: int = 0) -> dict[AgentId, tuple[int, ...]]:
    """Return one agent for each of `size` ranks, numbered like the rank, and up to `count` agents that wait."""
    return {AgentId(number): (number,) if number < size else () for number in range(max(size, count))}


def starting_agents(command: LaunchCommand, size: int) -> dict[AgentId, tuple[int, ...]]:
    """Return the ranks of each agent as this command starts it, in a job of `size` ranks."""
    return dict(command.agents) or agents_by_rank(size, len(command.agent_hosts))


def assign_agents(
    placement: Sequence[str], there: Mapping[AgentId, str], spares: Collection[str] = (), *, share: bool = False
) -> dict[AgentId, tuple[int, ...]] | None:
    """Give each rank of `placement` an agent on its host; None if a host has too few agents.

    `there` has the remaining agents and their hosts. Agents on `spares` wait, and get no rank. With `share`, the ranks
    of a host may have one agent in common.
    """
    by_host: dict[str, list[AgentId]] = {}
    for agent in sorted(there):
        by_host.setdefault(there[agent], []).append(agent)
    ranks_of: dict[str, list[int]] = {}
    for rank, host in enumerate(placement):
        ranks_of.setdefault(host, []).append(rank)
    agents: dict[AgentId, tuple[int, ...]] = {}
    for host, ranks in ranks_of.items():
        on_host = by_host.pop(host, [])
        count = min(len(on_host), len(ranks))
        if not on_host or (count < len(ranks) and not share):
            return None
        for index, agent in enumerate(on_host[:count]):
            agents[agent] = tuple(ranks[index * len(ranks) // count : (index + 1) * len(ranks) // count])
    return agents | {agent: () for spare in spares for agent in by_host.get(spare, ())}


def replace_hosts(
    placement: Sequence[str],
    spares: Sequence[str],
    bad: Collection[str],
    min_hosts: int | None,
    whole: Sequence[str] = (),
) -> HostChoice:
    """Replace the bad hosts by spare ones, then leave hosts out down to `min_hosts`; None if too few would be left."""
    places, left, all_places = list(placement), list(spares), list(whole)
    left_out, notes = [], []
    for host in dict.fromkeys(name for name in placement if name in bad):
        if left:
            spare = left.pop(0)
            places, all_places = ([spare if name == host else name for name in one] for one in (places, all_places))
            notes.append(f"{spare} takes the place of {host}")
        elif min_hosts is not None and len(dict.fromkeys(places)) > min_hosts:
            places = [name for name in places if name != host]
            notes.append(f"{host} is left out: {describe_size(places)}")
        else:
            continue
        left_out.append(host)
    return HostChoice(tuple(places), tuple(left), tuple(left_out), tuple(notes), tuple(all_places))


def take_back(choice: HostChoice, there: Collection[str]) -> HostChoice:
    """Put hosts that have come back where hosts are missing, each in its former place if that is free."""
    used = dict.fromkeys(choice.placement)
    missing = [host for host in dict.fromkeys(choice.whole) if host not in used]
    own = [host for host in missing if host in there]
    others = [host for host in there if host not in used and host not in own]
    places = dict.fromkeys(own) | dict(zip([host for host in missing if host not in own], others, strict=False))
    taken = {host: other or host for host, other in places.items()}
    if not taken:
        return choice
    whole = tuple(taken.get(host, host) for host in choice.whole)
    placement = tuple(host for host in whole if host in used or host in taken.values())
    note = f"{' and '.join(taken.values())} taken back: {describe_size(placement)}"
    return replace(choice, placement=placement, whole=whole, notes=(*choice.notes, note))


def describe_size(placement: Sequence[str]) -> str:
    """Write `4 ranks on 2 hosts`."""
    return f"{plural(len(placement), 'rank')} on {plural(len(dict.fromkeys(placement)), 'host')}"
