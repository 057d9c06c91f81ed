"""What the backends share that start agents on other hosts: the plan, as far as it can be made from here.

What depends on a host, its devices and cores, is decided once all agents have reported (head/agent_registry.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from jaxrun import RUNTIME
from jaxrun.job.environment import inherited_job_variables
from jaxrun.job.job import Job, check_rank_options
from jaxrun.job.plan import LaunchCommand, Plan, Worker


def plan_remote(
    job: Job,
    environ: Mapping[str, str],
    job_id: str,
    command: LaunchCommand,
    hosts: Sequence[str],
    notes: Sequence[str] = (),
) -> Plan:
    """Plan a job of `len(hosts)` processes; `hosts[rank]` is where a rank is expected, UNKNOWN_HOST if not known."""
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
    )
