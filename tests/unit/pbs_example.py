"""The PBS backend: within a PBS job, the mpiexec of PALS (HPE Cray) starts an agent for each rank."""

import shutil
from collections.abc import Mapping
from pathlib import Path

from jaxrun.errors import UnavailableError, UsageError
from jaxrun.spec.backends.mpi_hosts import place_ranks, read_hostfile
from jaxrun.spec.backends.remote_plan import plan_remote
from jaxrun.spec.job.job import Job
from jaxrun.spec.job.plan import AGENT_ARGV, LaunchCommand, Plan


def plan(job: Job, environ: Mapping[str, str], job_id: str) -> Plan:
    """Plan one mpiexec on the hosts of the PBS job. Raises UsageError outside of a PBS job."""
    if "PBS_NODEFILE" not in environ:
        raise UsageError("--backend pbs starts processes within a PBS job; begin with: qsub -I -l select=2:ngpus=4")
    mpiexec = shutil.which("mpiexec", path=environ.get("PATH"))
    if mpiexec is None:
        raise UnavailableError("--backend pbs needs mpiexec, which is not on PATH; load it with: module load cray-pals")
    nodes = read_hostfile(Path(environ["PBS_NODEFILE"]))[: job.hosts]
    hosts = place_ranks(nodes, job.processes, job.processes_per_host)
    command = LaunchCommand(
        engine="pals",  # the entry of job/cluster_env.py by whose variables an agent knows its rank
        title=f"mpiexec in PBS job {environ['PBS_JOBID']}",
        argv=(mpiexec, "--line-buffer", "--envall", "-n", str(len(hosts)), "--hosts", ",".join(hosts), *AGENT_ARGV),
    )
    return plan_remote(job, environ, job_id, command, hosts)
