"""What the backends share that start agents on other hosts: the plan, as far as it can be made from here.

What depends on a host, its devices, cores and its own name, is decided once all agents have reported (head/muster.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from jaxrun import RUNTIME
from jaxrun.planning.environment import stale
from jaxrun.planning.job import Job, check_ranks
from jaxrun.planning.plan import Plan, Worker
from jaxrun.planning.starter import Starter


def plan(
    job: Job, environ: Mapping[str, str], job_id: str, starter: Starter, hosts: Sequence[str], notes: Sequence[str] = ()
) -> Plan:
    """The plan for a job of one process for each of `hosts`: where each rank is expected, UNKNOWN_HOST if not known."""
    check_ranks(job, len(hosts))
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
        unset_env=stale(environ),
        local_devices=None,
        device_names=(),
        fork=False,
        notes=tuple(notes),
        starter=starter,
    )
