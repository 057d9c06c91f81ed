"""Runs programs and functions on JAX processes, and says what went wrong. Your own process never imports jax.

    result = jaxrun.run("train.py --lr 0.1", processes=4)    # run a program as a job, and wait for its end
    jaxrun.jobs(), jaxrun.Job("jaxrun-runs/latest")          # read what jobs have left, or how they go
    results = jaxrun.launch(train, cfg, processes=4)         # run a function on every rank of a job
    with jaxrun.Gang(processes=4) as gang: ...               # a job that stays: gang.run(f, x), gang.map(f, xs)
    with jaxrun.pool() as pool: ...                          # pool.map(f, xs) on all cores, for functions that use JAX

For more see help(jaxrun.run), help(jaxrun.Gang) and so on; for programs on ranks, help(jaxrun_runtime).
A job of `run` that fails is a result. If something goes wrong with a gang, you get a GangError: it did not start
(GangStartError), a rank died (WorkerDied), or a call took too long (CallTimeout). An error of your function is raised
with its own type, or as a RemoteError. All these, and errors about arguments (UsageError), are JaxrunErrors.
"""

TYPE_CHECKING = False  # Ctrl-C is taken care of after this, so nothing is imported here
if TYPE_CHECKING:
    from typing import Any

    from jaxrun.errors import JaxrunError as JaxrunError
    from jaxrun.errors import UsageError as UsageError
    from jaxrun.frontends.gang.call import Results as Results
    from jaxrun.frontends.gang.gang import Gang as Gang
    from jaxrun.frontends.gang.gang_errors import CallTimeout as CallTimeout
    from jaxrun.frontends.gang.gang_errors import GangError as GangError
    from jaxrun.frontends.gang.gang_errors import GangStartError as GangStartError
    from jaxrun.frontends.gang.gang_errors import RemoteError as RemoteError
    from jaxrun.frontends.gang.gang_errors import WorkerDied as WorkerDied
    from jaxrun.frontends.gang.pool import Pool as Pool
    from jaxrun.frontends.gang.pool import launch as launch
    from jaxrun.frontends.gang.pool import pool as pool
    from jaxrun.frontends.jobs.job_handle import Job as Job
    from jaxrun.frontends.jobs.job_handle import jobs as jobs
    from jaxrun.frontends.jobs.run import Result as Result
    from jaxrun.frontends.jobs.run import run as run
    from jaxrun.protocol.map_messages import NotTraceable as NotTraceable
    from jaxrun.protocol.names import VERSION as __version__  # noqa: F401

__all__ = [
    "CallTimeout",
    "Gang",
    "GangError",
    "GangStartError",
    "JaxrunError",
    "Job",
    "NotTraceable",
    "Pool",
    "RemoteError",
    "Result",
    "Results",
    "UsageError",
    "WorkerDied",
    "jobs",
    "launch",
    "pool",
    "run",
]
_HOMES = {
    "JaxrunError": "errors",
    "UsageError": "errors",
    "Gang": "frontends.gang.gang",
    "Results": "frontends.gang.call",
    "launch": "frontends.gang.pool",
    "NotTraceable": "protocol.map_messages",
    "Pool": "frontends.gang.pool",
    "pool": "frontends.gang.pool",
    "CallTimeout": "frontends.gang.gang_errors",
    "GangError": "frontends.gang.gang_errors",
    "GangStartError": "frontends.gang.gang_errors",
    "RemoteError": "frontends.gang.gang_errors",
    "WorkerDied": "frontends.gang.gang_errors",
    "run": "frontends.jobs.run",
    "Result": "frontends.jobs.run",
    "Job": "frontends.jobs.job_handle",
    "jobs": "frontends.jobs.job_handle",
}
# Names of jaxrun_runtime, which people look for here.
_OF_RANKS = {
    *("rank", "size", "local_rank", "local_size", "host", "run_dir", "is_main"),
    *("batches", "shard", "should_stop", "saved", "attempt", "step", "progress", "snapshot", "restore"),
    *("DivergenceError", "SnapshotError"),
}


def _import(module: str) -> "Any":
    from importlib import import_module

    return import_module(f"{__name__}.{module}")


def load_ipython_extension(shell: "Any") -> None:
    """Add %gang and %%gang to IPython, at `%load_ext jaxrun`."""
    _import("frontends.notebook.magics").load(shell)


def unload_ipython_extension(shell: "Any") -> None:
    """Remove them, and close the gang, at `%unload_ext jaxrun`."""
    _import("frontends.notebook.magics").unload(shell)


def __getattr__(name: str) -> "Any":
    # Loaded when asked for: the command needs none of it.
    if name == "__version__":
        return str(_import("protocol.names").VERSION)
    if name in _OF_RANKS:
        import sys

        # With an AttributeError, `from jaxrun import snapshot` would replace the text.
        kind = ImportError if sys._getframe(1).f_code.co_name == "_handle_fromlist" else AttributeError
        raise kind(f"{name} is in jaxrun_runtime, for programs that jaxrun runs: from jaxrun_runtime import {name}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_import(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
