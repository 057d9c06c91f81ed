"""The plan of jobs whose agents are on other hosts, as far as it can be made from here: of backends, and of attach.

What depends on a host, its devices and cores, is decided once all agents have reported (head/agent_registry.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from jaxrun import RUNTIME
from jaxrun.errors import UsageError
from jaxrun.spec.job.cluster_env import CLUSTER_ENVS, RankInfo
from jaxrun.spec.job.combinations import check_rank_options
from jaxrun.spec.job.environment import inherited_job_variables
from jaxrun.spec.job.job import Job
from jaxrun.spec.job.plan import AGENT_ARGV, LaunchCommand, Plan, Worker
from jaxrun.spec.job.spare_hosts import agents_by_rank
from jaxrun.text import UNKNOWN_HOST, plural


def plan_remote(
    job: Job,
    environ: Mapping[str, str],
    job_id: str,
    command: LaunchCommand,
    hosts: Sequence[str],
    notes: Sequence[str] = (),
    spares: Sequence[str] = (),
) -> Plan:
    """Plan a job of `len(hosts)` processes; `hosts[rank]` is where a rank is expected, UNKNOWN_HOST if not known.

    `spares` are hosts that may take the place of another.
    """
    if job.min_hosts is not None and job.min_hosts > len(set(hosts)):
        raise UsageError(
            f"--min-hosts {job.min_hosts}, but the job has {plural(len(set(hosts)), 'host')} to begin with"
        )
    if (job.spares or job.min_hosts) and UNKNOWN_HOST in hosts:
        option = "--spares" if job.spares else "--min-hosts"
        raise UsageError(
            f"{option} needs the names of the hosts, and leaves it to jaxrun to place the ranks: -H, or Slurm"
        )
    check_rank_options(job, len(hosts))
    sizes = Counter(hosts)
    seen = dict.fromkeys(sizes, 0)
    workers = []
    for rank, host in enumerate(hosts):
        workers.append(Worker(rank=rank, local_rank=seen[host], local_size=sizes[host], host=host))
        seen[host] += 1
    return Plan(
        job=replace(job, processes=len(hosts)),
        job_id=job_id,
        workers=tuple(workers),
        argv=("python", "-m", RUNTIME, *(("-m",) if job.module else ()), *job.program),
        set_env=job.env,
        unset_env=inherited_job_variables(environ),
        local_devices=None,
        device_names=(),
        fork=False,
        notes=tuple(notes),
        launch_command=command,
        spare_hosts=tuple(spares),
        agents=agents_by_rank(len(hosts), len(command.agent_hosts)),
    )


def plan_attached(job: Job, rank_info: RankInfo, environ: Mapping[str, str], job_id: str) -> Plan:
    """Plan `jaxrun attach` on rank 0: the processes are there, and it starts its own agent as the others start theirs.

    The hosts of the ranks are known when their agents report.
    """
    titles = {engine.key: engine.title for engine in CLUSTER_ENVS}
    command = LaunchCommand(
        engine=rank_info.engine,
        title="the agent of rank 0",
        argv=(*AGENT_ARGV, "0", str(rank_info.size)),
        attached_to=titles.get(rank_info.engine, "processes started by hand"),
    )
    return plan_remote(job, environ, job_id, command, [UNKNOWN_HOST] * rank_info.size)
