"""Start JAX processes, keep them in step, and say what went wrong: the launcher's side, which never imports jax.

results = jaxrun.launch(train, cfg, processes=4)        # a function on every rank of a job
with jaxrun.Gang(processes=4) as gang: ...              # a job that stays warm

PYTEST_DONT_REWRITE: a rank has imported this package before its pytest starts, which would warn of that.
"""

from importlib import import_module

TYPE_CHECKING = False  # Ctrl-C is taken care of after this, and to import typing takes a while
if TYPE_CHECKING:
    from typing import Any

    from jaxrun.gang.call import Results as Results
    from jaxrun.gang.exceptions import CallTimeout as CallTimeout
    from jaxrun.gang.exceptions import GangError as GangError
    from jaxrun.gang.exceptions import GangStartError as GangStartError
    from jaxrun.gang.exceptions import RemoteError as RemoteError
    from jaxrun.gang.exceptions import WorkerDied as WorkerDied
    from jaxrun.gang.gang import Gang as Gang
    from jaxrun.gang.launch import launch as launch
    from jaxrun.map.items import NotTraceable as NotTraceable
    from jaxrun.map.pool import Pool as Pool
    from jaxrun.map.pool import pool as pool

__version__ = "0.1.0"

RUNTIME = "jaxrun_runtime"  # the package that runs in every worker; the launcher only names it

_HOMES = {
    "Gang": "gang.gang",
    "Results": "gang.call",
    "launch": "gang.launch",
    "NotTraceable": "map.items",
    "Pool": "map.pool",
    "pool": "map.pool",
    "CallTimeout": "gang.exceptions",
    "GangError": "gang.exceptions",
    "GangStartError": "gang.exceptions",
    "RemoteError": "gang.exceptions",
    "WorkerDied": "gang.exceptions",
}


def load_ipython_extension(shell: "Any") -> None:
    """For `%load_ext jaxrun`: %gang and %%gang."""
    import_module(f"{__name__}.notebook.magics").load(shell)


def unload_ipython_extension(shell: "Any") -> None:
    """For `%unload_ext jaxrun`."""
    import_module(f"{__name__}.notebook.magics").unload(shell)


def __getattr__(name: str) -> "Any":
    # Loaded when asked for: the command needs none of it.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*_HOMES, "__version__"]
