"""Plans jobs whose agents are on other hosts, as far as this host can.

Everything that depends on a host, its devices and cores, is decided once all agents have reported
(spec/job/worker_assignment.py). After a loss of hosts, spec/job/rank_placement.py says where the ranks are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from jaxrun.errors import UsageError
from jaxrun.protocol.agent_id import AgentId
from jaxrun.protocol.worker_command import worker_argv
from jaxrun.spec.job.combinations import check_hosts
from jaxrun.spec.job.environment import inherited_job_variables
from jaxrun.spec.job.job import Job
from jaxrun.spec.job.plan import LaunchCommand, Plan, Worker
from jaxrun.spec.job.rank_placement import Placement, agents_by_rank, describe_left_out
from jaxrun.text import plural

_NOBODY: Mapping[str, str] = {}


def plan_remote(
    job: Job,
    environ: Mapping[str, str],
    job_id: str,
    command: LaunchCommand,
    hosts: Sequence[str],
    notes: Sequence[str] = (),
    spares: Sequence[str] = (),
    left_out: Mapping[str, str] = _NOBODY,
) -> Plan:
    """Plan a job of `len(hosts)` processes.

    hosts:     the expected host of each rank, UNKNOWN_HOST if not known
    spares:    hosts that may replace another
    left_out:  the hosts that `leave_out` has returned, with the reasons
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
        placement=Placement(
            tuple(hosts), tuple(spares), left_out, whole=tuple(hosts), agents=starting_agents(command, len(hosts))
        ),
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


def leave_out(job: Job, offered: Sequence[str], excluded: Mapping[str, str]) -> tuple[Job, dict[str, str]]:
    """Leave out the excluded ones of these hosts; returns the job for the others, and those left out, with reasons.

    The number of spare hosts decreases first, then, down to --min-hosts, the job's own. Raises UsageError.
    """
    left_out = {host: excluded[host] for host in offered if host in excluded}
    if not left_out:
        return job, {}
    there, wanted = len(offered) - len(left_out), job.hosts or len(offered) - job.spares
    hosts = min(there, job.hosts) if job.hosts else None
    if there < max(1, job.min_hosts or job.hosts or 1):
        raise UsageError(
            f"{plural(there, 'host')} of {len(offered)} {'is' if there == 1 else 'are'} left, too few for the job, "
            f"which goes {describe_left_out(left_out, job.quarantine)}; or name more, or ask for fewer with -N or "
            "--min-hosts"
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


def starting_agents(command: LaunchCommand, size: int) -> dict[AgentId, tuple[int, ...]]:
    """Return the ranks of each agent as this command starts it, in a job of `size` ranks."""
    return dict(command.agents) or agents_by_rank(size, len(command.agent_hosts))
