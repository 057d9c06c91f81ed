"""The backends by name: each is a function that turns a Job into a Plan, or says why it cannot."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from jaxrun.backends import local
from jaxrun.errors import UnavailableError
from jaxrun.planning.job import Job
from jaxrun.planning.machine import Machine
from jaxrun.planning.plan import Plan

Backend = Callable[[Job, Machine, Mapping[str, str], str], Plan]


def _planned(job: Job, machine: Machine, environ: Mapping[str, str], job_id: str) -> Plan:
    raise UnavailableError(
        f"--backend {job.backend} is not built yet; "
        "what works today is --backend local, which starts all processes on this machine"
    )


BACKENDS: dict[str, Backend] = {"local": local.plan, "mpirun": _planned, "slurm": _planned}
