"""Runs functions on the JAX processes of a job, and says what went wrong. Your own process never imports jax.

    results = jaxrun.launch(train, cfg, processes=4)    # run a function on every rank of a job
    with jaxrun.Gang(processes=4) as gang: ...          # a job that keeps running: gang.run(f, x), gang.map(f, xs)
    with jaxrun.pool() as pool: ...                     # pool.map(f, xs) on all cores, for functions that use JAX

For more see help(jaxrun.Gang), help(jaxrun.launch) and help(jaxrun.pool); for programs on ranks, help(jaxrun_runtime).
If something goes wrong with a job, you get a GangError: it did not start (GangStartError), a rank died (WorkerDied), or
a call took too long (CallTimeout). An error of your function is raised with its own type, or as a RemoteError.
"""

from importlib import import_module

TYPE_CHECKING = False  # Ctrl-C is taken care of after this, and to import typing takes a while
if TYPE_CHECKING:
    from typing import Any

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
    from jaxrun.protocol.map_messages import NotTraceable as NotTraceable
    from jaxrun.protocol.names import VERSION as __version__  # noqa: F401

_HOMES = {
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
}


def load_ipython_extension(shell: "Any") -> None:
    """Add %gang and %%gang to IPython, at `%load_ext jaxrun`."""
    import_module(f"{__name__}.frontends.notebook.magics").load(shell)


def unload_ipython_extension(shell: "Any") -> None:
    """Remove them, and close the gang, at `%unload_ext jaxrun`."""
    import_module(f"{__name__}.frontends.notebook.magics").unload(shell)


def __getattr__(name: str) -> "Any":
    # Loaded when asked for: the command needs none of it.
    if name == "__version__":
        return str(import_module(f"{__name__}.protocol.names").VERSION)
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*_HOMES, "__version__"]
