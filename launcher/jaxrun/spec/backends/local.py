"""The local backend: all workers are processes of this machine, which may simulate several hosts.

The launcher is the agent of each of these hosts itself, so what they report is known when the job is planned.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Mapping

from msgspec.structs import replace

from jaxrun.errors import UsageError
from jaxrun.files.procfs import boot_id
from jaxrun.protocol.addresses import LOOPBACK
from jaxrun.protocol.agent_id import AgentId
from jaxrun.protocol.agent_messages import AgentReport
from jaxrun.protocol.names import VERSION
from jaxrun.protocol.probe_messages import Machine
from jaxrun.protocol.worker_command import worker_argv
from jaxrun.spec.backends.remote_plan import make_workers
from jaxrun.spec.job.combinations import check_rank_options
from jaxrun.spec.job.devices import probe_machine
from jaxrun.spec.job.environment import inherited_job_variables
from jaxrun.spec.job.job import Job
from jaxrun.spec.job.layout import FORKED_PLATFORMS, decide_layout, wanted_platforms
from jaxrun.spec.job.plan import Plan
from jaxrun.spec.job.rank_placement import Placement
from jaxrun.spec.job.worker_assignment import LauncherSettings, assign_workers


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
    per_process = layout.devices_per_process if layout.gpus.names else job.devices_per_process
    wanted = replace(
        job,
        processes=layout.processes,
        platform=layout.platform,
        devices_per_process=per_process,
        probe_hosts=False,  # there is no network between them
    )
    ranks_of = _ranks_of_agents(wanted)
    names = {agent: f"h{agent + 1}" if job.simulated_hosts else machine.host for agent in ranks_of}
    hosts = tuple(names[agent] for agent, ranks in ranks_of.items() for _ in ranks)
    made = Plan(
        job=wanted,
        job_id=job_id,
        workers=make_workers(hosts),
        argv=worker_argv(sys.executable, job.program, is_module=job.module),
        set_env={},
        unset_env=inherited_job_variables(environ),
        local_devices=layout.devices_per_process,
        device_names=layout.gpus.names,
        fork=False,
        placement=Placement(hosts, whole=hosts, agents=ranks_of),
        reports={agent: _report(wanted, job_id, machine, agent, name) for agent, name in names.items()},
    )
    by_rank = {rank: made.reports[agent] for agent, ranks in ranks_of.items() for rank in ranks}
    assigned = assign_workers(made, by_rank, LauncherSettings(given))
    first, why = assigned.starts[0], _why_fresh(wanted)
    fresh = (f"every worker is a fresh interpreter: {why}",) if why else ()
    return replace(
        made,
        workers=assigned.workers,
        set_env=first.environment,
        fork=first.fork,
        notes=tuple(dict.fromkeys((*layout.notes, *assigned.notes, *fresh))),
    )


def _ranks_of_agents(job: Job) -> dict[AgentId, tuple[int, ...]]:
    """Return the ranks of this machine's agents: one, or one for each simulated host."""
    agents = max(1, job.simulated_hosts)
    size = (job.processes or 1) // agents
    return {AgentId(agent): tuple(range(agent * size, (agent + 1) * size)) for agent in range(agents)}


def _report(job: Job, job_id: str, machine: Machine, agent: AgentId, host: str) -> AgentReport:
    """Return what an agent in this process reports of its host, simulated or not."""
    return AgentReport(
        agent=agent,
        size=job.processes or 1,
        host=host,
        boot_id=boot_id(),
        pid=os.getpid(),
        time=time.time(),
        jaxrun_version=VERSION,
        address=LOOPBACK,
        head_address=LOOPBACK,
        directory=os.getcwd(),
        machine=machine,
        can_write_run_dir=True,
        simulated_boot_id=_simulated_boot_id(job_id, host) if job.simulated_hosts else "",
    )


def _why_fresh(job: Job) -> str:
    """Why each worker gets an interpreter of its own; empty if one import serves all."""
    if job.platform not in FORKED_PLATFORMS:
        return f"{job.platform} devices have not been tried after a fork"
    return job.why_no_fork


def _simulated_boot_id(job_id: str, host: str) -> str:
    import uuid

    return str(uuid.uuid5(uuid.UUID(hex=job_id), host))
