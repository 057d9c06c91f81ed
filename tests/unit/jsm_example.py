"""IBM's jsrun: within an LSF job, it starts an agent for each rank. It was never tried."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from typing import TYPE_CHECKING

from jaxrun.errors import UnavailableError, UsageError
from jaxrun.spec.engines.engine import Engine, RankVariables
from jaxrun.text import UNKNOWN_HOST

if TYPE_CHECKING:
    from jaxrun.spec.job.job import Job
    from jaxrun.spec.job.plan import Plan

JSM = Engine(
    key="jsm",
    title="IBM's jsrun",
    command="jsrun",
    ranks=RankVariables(rank="JSM_NAMESPACE_RANK", size="JSM_NAMESPACE_SIZE", job=("LSB_JOBID",)),
    sigterm_at_start=False,  # not tried, so that it is killed where it might ignore a SIGTERM
)


def plan(job: Job, environ: Mapping[str, str], job_id: str) -> Plan:
    """Plan one jsrun on the hosts of the LSF job. Raises UsageError outside of an LSF job."""
    from jaxrun.spec.backends.remote_plan import plan_remote  # here, because each agent imports this file
    from jaxrun.spec.job.plan import AGENT_ARGV, LaunchCommand

    if "LSB_JOBID" not in environ:
        raise UsageError("--backend jsm starts processes within an LSF job; begin with: bsub -nnodes 2 -W 60 -Is bash")
    jsrun = shutil.which("jsrun", path=environ.get("PATH"))
    if jsrun is None:
        raise UnavailableError("--backend jsm needs jsrun, which is not on PATH; module load spectrum-mpi")
    hosts = [UNKNOWN_HOST] * (job.processes or (job.hosts or 1) * (job.processes_per_host or 1))  # jsrun chooses them
    command = LaunchCommand(
        engine=JSM,
        title=f"jsrun in LSF job {environ['LSB_JOBID']}",
        argv=(jsrun, "--nrs", str(len(hosts)), "--tasks_per_rs", "1", "--cpu_per_rs", "ALL_CPUS", *AGENT_ARGV),
    )
    return plan_remote(job, environ, job_id, command, hosts)
