"""What a program that runs under jaxrun may ask: who am I, how many are we, where do files go?

    import jaxrun_runtime as jr
    if jr.is_main:
        print(f"{jr.size} processes, logs in {jr.run_dir}")

| name       | meaning                                                        | without jaxrun |
|------------|----------------------------------------------------------------|----------------|
| rank       | this process among all of the job, equal to jax.process_index() | 0              |
| size       | processes in the job                                           | 1              |
| local_rank | this process among those of its host                           | 0              |
| local_size | processes on this host                                         | 1              |
| host       | the host's name as the job calls it                            | the machine's  |
| run_dir    | pathlib.Path of the job's run directory, or None               | None           |
| is_main    | rank == 0                                                      | True           |

DivergenceError is what --lockstep strict raises where the processes are not about to make the same cross-process call.

Importing this package imports neither jax nor numpy; `shard` and `batches` bring numpy when first used.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxrun_runtime.data import batches as batches
    from jaxrun_runtime.data import shard as shard

    rank: int
    size: int
    local_rank: int
    local_size: int
    host: str
    run_dir: Path | None
    is_main: bool


class DivergenceError(RuntimeError):
    """The processes are not about to make the same cross-process call; the text says how they differ."""


_FROM_DATA = ("batches", "shard")
_NAMES = ("rank", "size", "local_rank", "local_size", "host", "run_dir", "is_main")


def __getattr__(name: str) -> Any:
    # Read at each use: the package is imported before the workers are forked, and each has values of its own.
    if name in _FROM_DATA:
        from jaxrun_runtime import data

        return getattr(data, name)
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _identity()[name]


def __dir__() -> list[str]:
    return [*_NAMES, *_FROM_DATA, "DivergenceError"]


def _identity() -> dict[str, Any]:
    from jaxrun.protocol.env import WorkerEnv
    from jaxrun.protocol.names import JOB_ID

    if JOB_ID not in os.environ:
        alone = {"rank": 0, "size": 1, "local_rank": 0, "local_size": 1}
        return alone | {"host": socket.gethostname(), "run_dir": None, "is_main": True}
    env = WorkerEnv.from_env(os.environ)
    return {
        "rank": env.rank,
        "size": env.size,
        "local_rank": env.local_rank,
        "local_size": env.local_size,
        "host": env.host,
        "run_dir": Path(env.run_dir) if env.run_dir else None,
        "is_main": env.rank == 0,
    }
