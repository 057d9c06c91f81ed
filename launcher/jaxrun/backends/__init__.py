"""The backends by name: each is a module whose `plan` turns a Job into a Plan, or says why it cannot."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxrun.job.job import Job
    from jaxrun.job.machine import Machine
    from jaxrun.job.plan import Plan

    Backend = Callable[[Job, Machine, Mapping[str, str], str], Plan]

BACKENDS = ("local", "mpirun", "slurm")


def backend(name: str) -> Backend:
    """The backend of this name, one of BACKENDS; only it is imported."""
    module: Any = import_module(f"{__name__}.{name}")
    plan: Backend = module.plan
    return plan
