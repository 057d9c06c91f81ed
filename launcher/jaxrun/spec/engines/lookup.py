"""Imports engines by the table: the one with a key, those whose variables a process has, or all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from jaxrun.errors import ProtocolError
from jaxrun.spec.engines import ENGINES, EngineRow
from jaxrun.spec.engines.engine import Engine

if TYPE_CHECKING:
    from jaxrun.spec.backends.batch_script import Scheduler


def engine_of(key: str) -> Engine:
    """Return the engine with this key. Raises ProtocolError if there is none."""
    if key not in ENGINES:
        raise ProtocolError(f"there is no engine {key!r}; known are {', '.join(ENGINES)}")
    return _load(ENGINES[key])


def scheduler_of(key: str) -> Scheduler:
    """Return the scheduler of the engine with this key, which has one."""
    scheduler: Scheduler = _load_named(ENGINES[key].scheduler)
    return scheduler


def end_of_allocation(environ: Mapping[str, str], now: float) -> float | None:
    """When a scheduler will end the job of `environ`, in seconds since the epoch; None without a job or a limit."""
    for key, row in ENGINES.items():
        if row.scheduler and any(name in environ for name in row.marks):
            return scheduler_of(key).ends_at(environ, now)
    return None


def all_engines() -> Iterator[Engine]:
    """Yield all engines, in the order of the table."""
    return map(_load, ENGINES.values())


def marked_engines(environ: Mapping[str, str]) -> Iterator[Engine]:
    """Yield the engines of which this environment has a variable, in the order of the table; imports no other."""
    return (_load(row) for row in ENGINES.values() if any(name in environ for name in row.marks))


def engines_with_mpirun(version: str = "") -> Iterator[Engine]:
    """Yield the engines that have an mpirun, or only those whose mpirun may print this text with --version."""
    return (_load(row) for row in ENGINES.values() if any(not version or text in version for text in row.says))


def launch_id(environ: Mapping[str, str]) -> str:
    """Return the engine's name for the processes that it started together with this one: Slurm's step, "12.0".

    Empty if no command accepts such a name.
    """
    for engine in marked_engines(environ):
        if engine.cancel and engine.ranks and engine.ranks.are_set(environ):
            return engine.cancel.launch_id(environ)
    return ""


def _load(row: EngineRow) -> Engine:
    engine: Engine = _load_named(row.where)
    return engine


def _load_named(where: str) -> Any:
    module, _, name = where.partition(":")
    return getattr(import_module(module), name)
