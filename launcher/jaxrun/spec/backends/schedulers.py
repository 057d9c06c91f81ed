"""The schedulers to which jaxrun can hand batch scripts, by the value of --backend."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

from jaxrun.spec.backends.batch_script import Scheduler

# By --backend: the module with the Scheduler, and a variable that each of its jobs has.
_SCHEDULERS = {
    "slurm": ("jaxrun.spec.backends.sbatch:SLURM", "SLURM_JOB_ID"),
}


def scheduler_of(backend: str) -> Scheduler:
    return _load(_SCHEDULERS[backend][0])


def end_of_allocation(environ: Mapping[str, str], now: float) -> float | None:
    """When a scheduler will end the job of `environ`, in seconds since the epoch; None without a job or a limit."""
    found = next((where for where, variable in _SCHEDULERS.values() if variable in environ), "")
    return _load(found).ends_at(environ, now) if found else None


def _load(where: str) -> Scheduler:
    module, _, name = where.partition(":")
    found = getattr(import_module(module), name)
    assert isinstance(found, Scheduler)
    return found
