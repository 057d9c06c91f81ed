"""The local backend: all workers are processes of this machine, which may simulate several hosts."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping

from msgspec.structs import replace

from jaxrun.errors import UsageError
from jaxrun.protocol.agent_id import AgentId
from jaxrun.protocol.probe_messages import Machine
from jaxrun.protocol.worker_command import worker_argv
from jaxrun.spec.job.binding import RankCores, choose_cores
from jaxrun.spec.job.combinations import check_rank_options
from jaxrun.spec.job.devices import probe_machine
from jaxrun.spec.job.environment import inherited_job_variables
from jaxrun.spec.job.job import Job
from jaxrun.spec.job.layout import FORKED_PLATFORMS, Layout, decide_layout, wanted_platforms
from jaxrun.spec.job.plan import Plan, Worker
from jaxrun.spec.job.rank_placement import Placement
from jaxrun.spec.job.worker_variables import worker_variables


def plan(job: Job, environ: Mapping[str, str], job_id: str, machine: Machine | None = None) -> Plan:
    """Plan the workers of this machine, which is probed unless `machine` is given.

    Raises UsageError if the machine cannot do what `job` asks for.
    """
    given = {**environ, **job.env}
    machine = machine or probe_machine(wanted_platforms(job, given), given)
    layout = decide_layout(job, machine, given)
    if job.wrap and "%" not in job.wrap[0] and shutil.which(job.wrap[0], path=given.get("PATH")) is None:
        raise UsageError(f"--wrap: there is no command {job.wrap[0]!r} on PATH; install it, or give its path")
    check_rank_options(job, layout.processes)
    set_env = {**job.env, **worker_variables(job, layout, given, cores=len(machine.cores))}
    fresh = job.why_no_fork
    if layout.platform not in FORKED_PLATFORMS:
        fresh = f"{layout.platform} devices have not been tried after a fork"
    workers = _workers(job, layout, machine, job_id)
    hosts = tuple(worker.host for worker in workers)
    return Plan(
        job=replace(job, processes=layout.processes, platform=layout.platform),
        job_id=job_id,
        workers=workers,
        argv=worker_argv(sys.executable, job.program, is_module=job.module),
        set_env=set_env,
        unset_env=inherited_job_variables(environ),
        local_devices=layout.devices_per_process,
        device_names=layout.gpus.names,
        fork=not fresh,
        placement=Placement(hosts, whole=hosts, agents={AgentId(0): tuple(range(layout.processes))}),
        notes=(*layout.notes, *((f"every worker is a fresh interpreter: {fresh}",) if fresh else ())),
    )


def _workers(job: Job, layout: Layout, machine: Machine, job_id: str) -> tuple[Worker, ...]:
    hosts = max(1, job.simulated_hosts)
    size = layout.processes // hosts
    devices = layout.devices_per_process if layout.gpus.names and layout.devices_per_process else 0
    near = [layout.gpus.cores[rank * devices : (rank + 1) * devices] for rank in range(layout.processes)]
    ranks = [RankCores(machine.cores, gpus) for gpus in near]
    cpus = choose_cores(job.bind, ranks, on_cpu=layout.platform == "cpu", all_cores=machine.all_cores)
    workers = []
    for rank in range(layout.processes):
        host = f"h{rank // size + 1}" if job.simulated_hosts else machine.host
        workers.append(
            Worker(
                rank=rank,
                local_rank=rank % size,
                local_size=size,
                host=host,
                local_device_ids=tuple(range(rank * devices, (rank + 1) * devices)),
                cpus=cpus[rank],
                simulated_boot_id=_boot_id(job_id, host) if job.simulated_hosts else "",
            )
        )
    return tuple(workers)


def _boot_id(job_id: str, host: str) -> str:
    import uuid

    return str(uuid.uuid5(uuid.UUID(hex=job_id), host))
