"""The backends: what can start the processes of a job. One table names them, for --backend, help and the pytest plugin.

A new backend is one file beside this one, whose `plan` turns a Job into a Plan, and one line in BACKENDS. A backend
that starts agents on other hosts fills in a LaunchCommand and lets remote_plan.plan_remote do the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING

from jaxrun.errors import UsageError
from jaxrun.protocol.settings import Option, options_of

if TYPE_CHECKING:
    from jaxrun.spec.job.job import Job
    from jaxrun.spec.job.plan import Plan


@dataclass(frozen=True, slots=True)
class Backend:
    """One line of the table.

    module:   holds `plan(job, environ, job_id) -> Plan`; imported only when a job uses it; empty for `attach`
    options:  what it understands of what only some options need (settings.Option.needs)
    """

    module: str
    options: tuple[str, ...]


HOST_OPTIONS = ("hosts", "network")
_REQUESTS = ("GPUs", "submit")  # of a scheduler

KUBERNETES = "kubernetes"

BACKENDS = {
    "local": Backend("jaxrun.spec.backends.local", ("simulated hosts",)),
    "mpirun": Backend("jaxrun.spec.backends.mpirun", (*HOST_OPTIONS, "host list", "spares", "fewer hosts", "mpirun")),
    "slurm": Backend("jaxrun.spec.backends.slurm", (*HOST_OPTIONS, "spares", "fewer hosts", "slurm", *_REQUESTS)),
    KUBERNETES: Backend("jaxrun.spec.backends.kubernetes", (*HOST_OPTIONS, "fewer hosts", "kubernetes", *_REQUESTS)),
}
ATTACH = "attach"  # `jaxrun attach`, whose processes somebody else has started
HOSTS = "hosts"  # a command on each host, which --host-rank tells apart
_BY_HAND = {  # not for --backend
    ATTACH: Backend("", ("network",)),
    HOSTS: Backend("jaxrun.spec.backends.by_hand", (*HOST_OPTIONS, "fewer hosts", "by hand")),
}


def understands(backend: str, option: Option) -> bool:
    return not option.needs or option.needs in _backend(backend).options


def backends_with(option: Option) -> list[str]:
    """Return the backends for --backend that understand the option."""
    return [name for name in BACKENDS if understands(name, option)]


def check_options(job: Job) -> None:
    """Raise UsageError if `job` has an option that its backend does not understand; this machine is one host."""
    for field, option in options_of(job):
        if understands(job.backend, option) or (field.name == "hosts" and job.hosts == 1):
            continue
        if getattr(job, field.name) not in (None, "", 0, False, ()):
            fitting = [f"--backend {name}" for name in backends_with(option)]
            if understands(HOSTS, option):
                fitting.append("--host-rank on each host")
            chosen = f"--backend {job.backend}" if job.backend in BACKENDS else "--host-rank"
            wanted = " or ".join(filter(None, (", ".join(fitting[:-1]), fitting[-1])))
            raise UsageError(f"{option.title} is for {wanted}, not for {chosen}; leave one of them out")


def make_plan(job: Job, environ: Mapping[str, str], job_id: str) -> Plan:
    """Let the backend of `job` decide what to start. Raises what its `plan` raises."""
    if (job.exclude_hosts or job.quarantine) and not job.placement:
        from jaxrun.spec.backends.quarantine import excluded_hosts

        job = replace(job, excluded=excluded_hosts(job))
    plan: Plan = import_module(_backend(job.backend).module).plan(job, environ, job_id)
    return plan


def _backend(name: str) -> Backend:
    return _BY_HAND[name] if name in _BY_HAND else BACKENDS[name]
