"""The backends: what can start the processes of a job. One table names them, for --backend, help and the pytest plugin.

A new backend is one file beside this one, whose `plan` turns a Job into a Plan, and one line in BACKENDS. A backend
that starts agents on other hosts fills in a LaunchCommand and lets remote_plan.plan_remote do the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING

from jaxrun.errors import UsageError

if TYPE_CHECKING:
    from jaxrun.spec.job.job import Job
    from jaxrun.spec.job.plan import Plan


@dataclass(frozen=True, slots=True)
class Backend:
    """One line of the table.

    module:   holds `plan(job, environ, job_id) -> Plan`; imported only when a job uses it; empty for `attach`
    options:  the fields of Job that this backend understands, of those that not every backend does
    """

    module: str
    options: tuple[str, ...]


HOST_OPTIONS = ("hosts", "processes_per_host", "interface")
_SPARE_OPTIONS = ("spares", "min_hosts")
_MPIRUN_OPTIONS = ("host_list", "hostfile", "mpirun", "mpi_args")
_SLURM_OPTIONS = (
    "cpus_per_process", "gpus_per_host", "partition", "time_limit", "account", "slurm_args", "sbatch", "submit",
    "requeue",
)  # fmt: skip

BACKENDS = {
    "local": Backend("jaxrun.spec.backends.local", ("simulated_hosts",)),
    "mpirun": Backend("jaxrun.spec.backends.mpirun", (*HOST_OPTIONS, *_SPARE_OPTIONS, *_MPIRUN_OPTIONS)),
    "slurm": Backend("jaxrun.spec.backends.slurm", (*HOST_OPTIONS, *_SPARE_OPTIONS, *_SLURM_OPTIONS)),
}
ATTACH = "attach"  # `jaxrun attach`, whose processes somebody else has started
ATTACH_OPTIONS = ("interface",)
HOSTS = "hosts"  # a command on each host, which --host-rank tells apart
HOSTS_OPTIONS = (*HOST_OPTIONS, "host_rank", "head", "rendezvous")
_BY_HAND = {  # not for --backend
    ATTACH: Backend("", ATTACH_OPTIONS),
    HOSTS: Backend("jaxrun.spec.backends.command_per_host", HOSTS_OPTIONS),
}

# How people type the options that not every backend understands, by the field of Job.
_OPTION_NAMES = {
    "simulated_hosts": "--simulate-hosts",
    "hosts": "-N/--hosts",
    "processes_per_host": "--processes-per-host",
    "host_rank": "--host-rank",
    "head": "--head",
    "rendezvous": "--rendezvous",
    "interface": "--interface",
    "spares": "--spares",
    "min_hosts": "--min-hosts",
    "host_list": "-H/--host",
    "hostfile": "--hostfile",
    "mpirun": "--mpirun",
    "mpi_args": "--mpi-args",
    "cpus_per_process": "--cpus-per-process",
    "gpus_per_host": "--gpus-per-host",
    "partition": "--partition",
    "time_limit": "--time",
    "account": "--account",
    "slurm_args": "--slurm-args",
    "sbatch": "--sbatch",
    "submit": "--submit",
    "requeue": "--requeue",
}


def is_understood(field: str, backend: str) -> bool:
    """Whether `backend` understands this field of Job."""
    return field not in _OPTION_NAMES or field in _backend(backend).options


def check_options(job: Job) -> None:
    """Raise UsageError if `job` has an option that its backend does not understand; this machine is one host."""
    for field, option in _OPTION_NAMES.items():
        if field == "hosts" and job.hosts == 1:
            continue
        if getattr(job, field) not in (None, "", 0, False, ()) and not is_understood(field, job.backend):
            fitting = [f"--backend {name}" for name, backend in BACKENDS.items() if field in backend.options]
            if field in HOSTS_OPTIONS:
                fitting.append("--host-rank on each host")
            chosen = f"--backend {job.backend}" if job.backend in BACKENDS else "--host-rank"
            wanted = " or ".join(filter(None, (", ".join(fitting[:-1]), fitting[-1])))
            raise UsageError(f"{option} is for {wanted}, not for {chosen}; leave one of them out")


def make_plan(job: Job, environ: Mapping[str, str], job_id: str) -> Plan:
    """Let the backend of `job` decide what to start. Raises what its `plan` raises."""
    plan: Plan = import_module(_backend(job.backend).module).plan(job, environ, job_id)
    return plan


def replan(plan: Plan, placement: Sequence[str], spares: Sequence[str], environ: Mapping[str, str]) -> Plan:
    """The plan of the same job with its ranks on these hosts, by rank. Raises what the backend's `plan` raises."""
    job = replace(
        plan.job,
        placement=tuple(placement),
        spare_hosts=tuple(spares),
        processes=len(placement),
        hosts=None,
        processes_per_host=None,
        spares=0,
    )
    made = make_plan(job, environ, plan.job_id)
    return replace(
        plan,
        job=replace(made.job, spares=plan.job.spares),
        workers=made.workers,
        launch_command=made.launch_command,
        spare_hosts=tuple(spares),
        agents=made.agents,
    )


def _backend(name: str) -> Backend:
    return _BY_HAND[name] if name in _BY_HAND else BACKENDS[name]
