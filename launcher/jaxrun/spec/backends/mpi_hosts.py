"""Which rank goes to which host under mpirun: by -H or --hostfile, by Slurm's allocation, or as mpirun itself knows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from jaxrun.errors import UsageError
from jaxrun.spec.backends.slurm_allocation import Allocation, spread_tasks
from jaxrun.spec.job.hosts import HostSlots, count_without_spares, parse_host_list, place_ranks, read_hostfile
from jaxrun.spec.job.job import Job
from jaxrun.text import UNKNOWN_HOST, plural


def named_hosts(job: Job) -> tuple[HostSlots, ...]:
    """Return the hosts of -H or --hostfile. Raises UsageError for one that cannot stand on mpirun's command line."""
    hosts = read_hostfile(job.hostfile) if job.hostfile else parse_host_list(job.host_list) if job.host_list else ()
    for host in hosts:
        if ":" in host.name:
            raise UsageError(
                f"mpirun cannot take the address [{host.name}]; give this host a name, in /etc/hosts or DNS"
            )
    return hosts


def place_on_hosts(job: Job, named: Sequence[HostSlots], allocation: Allocation | None) -> tuple[str, ...]:
    """Return the host of each rank, UNKNOWN_HOST where only mpirun knows. Raises UsageError if numbers do not fit."""
    if job.placement:
        return job.placement
    hosts = named or (_allocated_hosts(job, allocation) if allocation else ())
    if not hosts:
        return (UNKNOWN_HOST,) * _process_count(job)
    if job.spares:
        job = replace(job, hosts=count_without_spares(job, len(hosts)))
    if job.hosts is None:
        return place_ranks(hosts, job.processes, job.processes_per_host)
    if job.hosts > len(hosts):
        there = f"there {'is' if len(hosts) == 1 else 'are'} {plural(len(hosts), 'host')}"
        raise UsageError(f"-N {job.hosts}, but {there}; lower -N, or name more hosts")
    return _place_on_each(job, hosts[: job.hosts])


def spare_hosts(job: Job, named: Sequence[HostSlots], allocation: Allocation | None) -> tuple[str, ...]:
    """Return the hosts behind those of the job that wait to take the place of one."""
    if not job.spares:
        return ()
    names = [host.name for host in named] or list(allocation.nodes if allocation else ())
    used = count_without_spares(job, len(names)) if names else 0
    return tuple(names[used : used + job.spares])


def _allocated_hosts(job: Job, allocation: Allocation) -> tuple[HostSlots, ...]:
    """Return the nodes of the allocation, with a slot for each task that srun would put there, unless all are alike."""
    alike = job.processes_per_host or (job.hosts and job.processes)
    processes = None if alike else job.processes or allocation.tasks
    if processes is None:
        return tuple(HostSlots(node, None) for node in allocation.nodes)
    counts = spread_tasks(processes, [cpus // (allocation.cpus_per_task or 1) for cpus in allocation.cpus])
    return tuple(HostSlots(node, count) for node, count in zip(allocation.nodes, counts, strict=True) if count)


def _place_on_each(job: Job, hosts: Sequence[HostSlots]) -> tuple[str, ...]:
    """Place at least one rank on each of the hosts of -N."""
    processes, each = job.processes, job.processes_per_host
    if processes is None or each is not None:
        return place_ranks(hosts, processes, each)
    place_ranks(hosts, processes, None)  # refuses more than there are slots
    unlimited = all(host.slots is None for host in hosts)
    counts = spread_tasks(processes, [processes if unlimited else host.slots or 1 for host in hosts])
    return tuple(host.name for host, count in zip(hosts, counts, strict=True) for _ in range(count))


def _process_count(job: Job) -> int:
    """Return the number of processes where only mpirun knows the hosts. Raises UsageError if it is not given."""
    if job.hosts is not None:
        raise UsageError(f"-N {job.hosts} needs the names of the hosts; give them with -H or --hostfile")
    if job.processes is None:
        raise UsageError(
            "--backend mpirun cannot tell how many processes are wanted: say how many with -n, or on which hosts with "
            "-H h1:4,h2:4 or --hostfile FILE"
        )
    return job.processes
