"""What a program that jaxrun runs can ask: which process of the job it is, and its share of the data.

    import jaxrun_runtime as jr
    if jr.is_main:
        print(f"{jr.size} processes, logs in {jr.run_dir}")

| name       | meaning                                                        | without jaxrun |
|------------|----------------------------------------------------------------|----------------|
| rank       | number of this process in the job, as jax.process_index()      | 0              |
| size       | number of processes in the job                                 | 1              |
| local_rank | number of this process on its host                             | 0              |
| local_size | number of processes on this host                               | 1              |
| host       | the host's name in the job                                     | the machine's  |
| run_dir    | pathlib.Path of the job's run directory, or None               | None           |
| is_main    | rank == 0                                                      | True           |

shard and batches give each process its rows of the data. should_stop, saved, attempt, snapshot and restore are for
jobs that survive preemption, restarts and lost hosts (docs/surviving.md). step and progress tell jaxrun how far the
program has come (docs/goodput.md). --lockstep strict raises DivergenceError.
snapshot and restore raise SnapshotError for wrong arguments.

This package imports neither jax nor numpy; `shard` and `batches` import numpy when they are first used.
"""

from __future__ import annotations

import importlib
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxrun_runtime.checkpoints import attempt as attempt
    from jaxrun_runtime.checkpoints import saved as saved
    from jaxrun_runtime.data import batches as batches
    from jaxrun_runtime.data import shard as shard
    from jaxrun_runtime.exceptions import DivergenceError as DivergenceError
    from jaxrun_runtime.exceptions import SnapshotError as SnapshotError
    from jaxrun_runtime.state_snapshots.snapshots import restore as restore
    from jaxrun_runtime.state_snapshots.snapshots import snapshot as snapshot
    from jaxrun_runtime.stopping import should_stop as should_stop
    from jaxrun_runtime.told_steps import progress as progress
    from jaxrun_runtime.told_steps import step as step

    rank: int
    size: int
    local_rank: int
    local_size: int
    host: str
    run_dir: Path | None
    is_main: bool


_HOMES = {
    "batches": "data",
    "shard": "data",
    "should_stop": "stopping",
    "saved": "checkpoints",
    "attempt": "checkpoints",
    "step": "told_steps",
    "progress": "told_steps",
    "snapshot": "state_snapshots.snapshots",
    "restore": "state_snapshots.snapshots",
    "DivergenceError": "exceptions",
    "SnapshotError": "exceptions",
}
_NAMES = ("rank", "size", "local_rank", "local_size", "host", "run_dir", "is_main")


def __getattr__(name: str) -> Any:
    # Values are read at each use, not at import: workers are forked from a process that has imported this package.
    if name in _HOMES:
        found = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
        globals()[name] = found  # the next use does not come here
        return found
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _identity()[name]


def __dir__() -> list[str]:
    return [*_NAMES, *_HOMES]


def _identity() -> dict[str, Any]:
    from jaxrun.protocol.names import JOB_ID
    from jaxrun_runtime import this_rank

    if JOB_ID not in os.environ:
        alone = {"rank": 0, "size": 1, "local_rank": 0, "local_size": 1}
        return alone | {"host": socket.gethostname(), "run_dir": None, "is_main": True}
    env = this_rank.read(os.environ)
    return {
        "rank": env.rank,
        "size": env.size,
        "local_rank": env.local_rank,
        "local_size": env.local_size,
        "host": env.host,
        "run_dir": Path(env.run_dir) if env.run_dir else None,
        "is_main": env.rank == 0,
    }
