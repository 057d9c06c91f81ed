"""Keeps JAX in a child of a rank from joining the job; Python runs this file when a Python process starts.

A child inherits the variables that identify the rank: JAX_COORDINATOR_ADDRESS and the variables of mpirun or srun. If
it calls jax.distributed.initialize(), as a loader's worker does that imports the main file, JAX would connect it as
that rank again, and the coordinator would end the real rank. So in a child the call does nothing, and says so.

A rank puts this directory on PYTHONPATH (children.py), where Python's `site` module looks for a sitecustomize. This
reaches subprocesses, multiprocessing's spawn and forkserver, and everything that they start. It needs no JAX, and no
file in the Python environment, unlike a .pth file. It does not reach a Python that ignores PYTHONPATH (-I, -E), or gets
another PYTHONPATH.

This file imports nothing of jaxrun, because the child may run another Python. Tools of older systems run Python 3.6, so
nothing here is newer, not even in annotations. It costs a child that does not import jax 0.1 ms. The user's own
sitecustomize runs after it, as if this file did not exist.
"""

import os
import sys

TYPE_CHECKING = False  # importing typing would cost more than everything else here
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from importlib.machinery import ModuleSpec
    from typing import Any

_CHILD_OF = "JAXRUN_CHILD_OF"
_COORDINATOR_ADDRESS = "JAX_COORDINATOR_ADDRESS"
_OF_THE_JOB = (_COORDINATOR_ADDRESS, "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
_PUBLIC = "jax.distributed"
_is_told = False


class _Watch:
    """A finder that guards jax.distributed.initialize once that module is imported; finds nothing else."""

    def find_spec(self, name: str, path: "Any" = None, target: "Any" = None) -> "ModuleSpec | None":
        if name != _PUBLIC:
            return None
        others = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
        specs = (finder.find_spec(name, path, target) for finder in others)
        spec = next((found for found in specs if found), None)
        loader: Any = getattr(spec, "loader", None)
        if hasattr(loader, "exec_module"):
            loader.exec_module = _guarding(loader.exec_module)
        return spec


def _guarding(execute: "Callable[[Any], None]") -> "Callable[[Any], None]":
    def exec_module(module: "Any") -> None:
        execute(module)
        original = module.initialize
        module.initialize = guard_initialize(original)
        private: Any = sys.modules.get(original.__module__)
        if getattr(private, "initialize", None) is original:
            private.initialize = module.initialize

    return exec_module


def guard_initialize(original: "Callable[..., None]") -> "Callable[..., None]":
    """Return a function that replaces jax.distributed.initialize in a child; elsewhere it calls `original`."""
    import functools
    import inspect
    import json

    @functools.wraps(original)
    def initialize(*args: "Any", **kwargs: "Any") -> None:
        parent = json.loads(os.environ.get(_CHILD_OF, "null"))
        if parent is None or parent["pid"] == os.getpid():
            original(*args, **kwargs)
            return
        given = inspect.signature(original).bind_partial(*args, **kwargs).arguments
        if not is_own_job(given.get("coordinator_address"), os.environ, parent):
            _tell(parent["says"])
            return
        if os.environ.get(_COORDINATOR_ADDRESS) == parent["coordinator"]:
            for name in _OF_THE_JOB:
                os.environ.pop(name, None)
        original(*args, **kwargs)

    return initialize


def is_own_job(address: "str | None", environ: "Mapping[str, str]", parent: "Mapping[str, Any]") -> bool:
    """Return whether a child's call of initialize is for another JAX job than the rank's.

    address:  the argument coordinator_address, or None
    parent:   the rank's entry in JAXRUN_CHILD_OF (children.py)
    """
    address = address or environ.get(_COORDINATOR_ADDRESS)
    if address and address != parent["coordinator"]:
        return True
    # Another mpirun or srun sets these to other values; None means that the rank does not have the variable.
    cluster: Mapping[str, str | None] = parent["cluster"]
    return any(environ.get(name, value) != value for name, value in cluster.items())


def _tell(line: str) -> None:
    global _is_told
    if not _is_told:
        _is_told = True
        print(line, file=sys.stderr)


def _run_the_next_sitecustomize() -> None:
    """Import the sitecustomize that Python would find without this directory. Raises ImportError if there is none."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder) != here]
    del sys.modules[__name__]
    __import__(__name__)


if __name__ == "sitecustomize":
    if _CHILD_OF in os.environ:
        sys.meta_path.insert(0, _Watch())
    _run_the_next_sitecustomize()
