"""The local backend: all workers are processes of this machine, which may pretend to be several hosts."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace

from jaxrun import RUNTIME
from jaxrun.errors import UsageError
from jaxrun.planning.environment import CPU_DEVICES_VARIABLE, PLATFORMS_VARIABLE, common, stale
from jaxrun.planning.job import Job, Ranks
from jaxrun.planning.layout import Layout, lay_out
from jaxrun.planning.machine import Machine
from jaxrun.planning.plan import Plan, Worker

_XLA_THREADS = "NPROC"


def plan(job: Job, machine: Machine, environ: Mapping[str, str], job_id: str) -> Plan:
    """Where each worker goes and what it gets; UsageError if this machine cannot do what `job` asks for."""
    given = {**environ, **job.env}
    layout = lay_out(job, machine, given)
    _check_ranks("--quiet-ranks", job.quiet_ranks, layout.processes)
    _check_ranks("--only-rank", job.only_ranks, layout.processes)
    set_env = {**job.env, **common(given, cores=len(machine.cores), workers=layout.processes)}
    set_env |= _platform_env(job, layout, given)
    set_env |= _xla_threads(layout, len(machine.cores), given)
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


def _platform_env(job: Job, layout: Layout, given: Mapping[str, str]) -> dict[str, str]:
    """JAX's own variables for the platform and its simulated devices."""
    values = {}
    listed = [name.strip() for name in given.get(PLATFORMS_VARIABLE, "").split(",")]
    if listed[0] != layout.platform:
        # With an accelerator named, JAX fails if it cannot use it; CPU stays usable for work on the host.
        values[PLATFORMS_VARIABLE] = "cpu" if layout.platform == "cpu" else f"{layout.platform},cpu"
    if layout.platform == "cpu" and job.devices_per_process is not None:
        values[CPU_DEVICES_VARIABLE] = str(job.devices_per_process)
    return values


def _xla_threads(layout: Layout, cores: int, given: Mapping[str, str]) -> dict[str, str]:
    """The size of XLA's thread pool on CPU, where several simulated devices wait in one process for each other.

    Measured with JAX 0.8 to 0.10: with fewer than two threads a device, a loop of collectives that reads no result
    hangs.
    """
    devices = layout.per_process or 1
    if layout.platform != "cpu" or devices == 1 or _XLA_THREADS in given:
        return {}
    return {_XLA_THREADS: str(max(cores, 2 * devices))}


def _why_no_fork(job: Job, layout: Layout) -> str:
    if layout.platform != "cpu":
        return f"{layout.platform} devices cannot be used after a fork"
    return job.no_fork


def _check_ranks(option: str, ranks: Ranks, size: int) -> None:
    last = max((span[-1] for span in ranks), default=0)
    if last >= size:
        raise UsageError(f"{option} names rank {last}, but the ranks of this job are 0 to {size - 1}")
