"""The worker's Hello: its identity, and all that must be equal on every rank before they may join."""

from __future__ import annotations

import hashlib
import importlib.machinery
import os
import platform
import sys
import time
from collections.abc import Mapping

from jaxrun.protocol.env import WorkerEnv
from jaxrun.protocol.names import COORDINATOR_ADDRESS, PROCESS_ID
from jaxrun.protocol.worker_messages import Hello
from jaxrun_runtime import program

_RELEVANT_PREFIXES = ("JAX_", "XLA_", "NCCL_", "LIBTPU_")
_RELEVANT_NAMES = ("PYTHONHASHSEED", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_DIFFERS_BY_RANK = (COORDINATOR_ADDRESS, PROCESS_ID, "JAX_LOCAL_DEVICE_IDS", "NCCL_HOSTID")


def build_hello(env: WorkerEnv, argv: list[str], environ: Mapping[str, str], started: float) -> Hello:
    """The Hello of this process. Imports jax. `started`: when the process started, in seconds since the epoch."""
    import jax
    import jaxlib.version
    import numpy

    versions = {
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": jaxlib.version.__version__,
        "numpy": numpy.__version__,
    }
    return Hello(
        rank=env.rank,
        host=env.host,
        pid=os.getpid(),
        time=time.time(),
        started_at=started,
        versions=versions,
        program_hash=hash_program(argv),
        environment=relevant_variables(environ),
    )


def relevant_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that change what JAX computes, sees or sends, without those that differ between ranks by design."""
    named = {k: v for k, v in environ.items() if k.startswith(_RELEVANT_PREFIXES) and k not in _DIFFERS_BY_RANK}
    return named | {k: environ[k] for k in _RELEVANT_NAMES if k in environ}


def hash_program(argv: list[str]) -> str:
    """16 hex digits for the program's source; empty if that is not one file that can be found without importing."""
    is_module, name, _ = program.split_argv(argv)
    path = _module_file(name) if is_module else name
    try:
        with open(path, "rb") as file:
            return hashlib.sha256(file.read()).hexdigest()[:16]
    except OSError:
        return ""


def _module_file(name: str) -> str:
    search, origin = [os.getcwd(), *sys.path], ""
    for part in name.split("."):
        spec = importlib.machinery.PathFinder.find_spec(part, search)
        if spec is None:
            return ""
        search, origin = list(spec.submodule_search_locations or []), spec.origin or ""
    return os.path.join(search[0], "__main__.py") if search else origin
