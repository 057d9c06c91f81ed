"""The local backend: all workers are processes of this machine, which may pretend to be several hosts."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace

from jaxrun import RUNTIME
from jaxrun.planning.environment import stale
from jaxrun.planning.job import Job, check_ranks
from jaxrun.planning.layout import Layout, lay_out
from jaxrun.planning.machine import Machine
from jaxrun.planning.plan import Plan, Worker
from jaxrun.planning.settings import settings


def plan(job: Job, machine: Machine, environ: Mapping[str, str], job_id: str) -> Plan:
    """Where each worker goes and what it gets; UsageError if this machine cannot do what `job` asks for."""
    given = {**environ, **job.env}
    layout = lay_out(job, machine, given)
    check_ranks(job, layout.processes)
    set_env = {**job.env, **settings(job, layout, given, cores=len(machine.cores))}
    reason = _why_no_fork(job, layout)
    return Plan(
        job=replace(job, processes=layout.processes, platform=layout.platform),
        job_id=job_id,
        workers=_workers(job, layout, machine, job_id),
        argv=(sys.executable, "-m", RUNTIME, *(("-m",) if job.module else ()), *job.program),
        set_env=set_env,
        unset_env=stale(environ),
        local_devices=layout.per_process,
        device_names=layout.gpus.names,
        fork=not reason,
        notes=(*layout.notes, *((f"every worker is a fresh interpreter: {reason}",) if reason else ())),
    )


def _workers(job: Job, layout: Layout, machine: Machine, job_id: str) -> tuple[Worker, ...]:
    hosts = max(1, job.simulated_hosts)
    size = layout.processes // hosts
    # Measured: staying on one core pays when CPU workers outnumber the cores, and costs when they do not.
    crowded = layout.platform == "cpu" and layout.processes > len(machine.cores)
    workers = []
    for rank in range(layout.processes):
        host = f"h{rank // size + 1}" if job.simulated_hosts else machine.host
        take = layout.per_process if layout.gpus.names and layout.per_process else 0
        workers.append(
            Worker(
                rank=rank,
                local_rank=rank % size,
                local_size=size,
                host=host,
                local_device_ids=tuple(range(rank * take, (rank + 1) * take)),
                cpus=(machine.cores[rank % len(machine.cores)],) if crowded else (),
                simulated_boot_id=_boot_id(job_id, host) if job.simulated_hosts else "",
            )
        )
    return tuple(workers)


def _boot_id(job_id: str, host: str) -> str:
    import uuid

    return str(uuid.uuid5(uuid.UUID(hex=job_id), host))


def _why_no_fork(job: Job, layout: Layout) -> str:
    if layout.platform != "cpu":
        return f"{layout.platform} devices cannot be used after a fork"
    return job.no_fork
