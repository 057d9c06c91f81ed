"""A sum over all processes with JAX, one device each: once, or in a loop in which one rank fails.

jax_sum.py [STEPS FAULT RANK]

The same file runs under every launcher. Each process adds its rank + 1 and writes the sum to a file of its
own, BENCH_DIR/sum-RANK. With BENCH_HOLD it then waits for the file BENCH_DIR/go, so that its memory can be measured.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

# Of Open MPI, MPICH, torchrun and Slurm.
SIZE = ("JAX_NUM_PROCESSES", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "WORLD_SIZE", "SLURM_NTASKS")
RANK = ("JAX_PROCESS_ID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "RANK", "SLURM_PROCID")


def join() -> None:
    """What a user's program does under each launcher; under jaxrun it finds the work done."""
    env = os.environ
    if jax.distributed.is_initialized():
        return
    size, rank = (next(int(env[name]) for name in names if name in env) for names in (SIZE, RANK))
    jax.distributed.initialize(env["BENCH_ADDRESS"], size, rank, cluster_detection_method="deactivate")


def main(argv: list[str]) -> None:
    join()
    for name in os.environ.get("BENCH_IMPORTS", "").split():
        importlib.import_module(name)
    steps, fault, culprit = (int(argv[0]), argv[1], int(argv[2])) if argv else (1, "", -1)
    mesh = Mesh(np.array(jax.devices()), ("process",))
    ours, everyone = PartitionSpec("process"), PartitionSpec()
    values = np.arange(1, jax.device_count() + 1, dtype=np.float32)
    shards = jax.make_array_from_callback(values.shape, NamedSharding(mesh, ours), lambda i: values[i])
    add = jax.jit(jax.shard_map(lambda x: jax.lax.psum(x, "process"), mesh=mesh, in_specs=ours, out_specs=everyone))
    other = jax.jit(jax.shard_map(lambda x: -jax.lax.psum(x, "process"), mesh=mesh, in_specs=ours, out_specs=everyone))
    total = 0.0
    for step in range(steps):
        if step == steps // 2 and jax.process_index() == culprit:
            from fault import commit

            commit(fault)
            if fault == "mismatch":
                other(shards)
        total = float(np.asarray(add(shards).addressable_data(0))[0])
    directory = Path(os.environ["BENCH_DIR"])
    if "BENCH_HOLD" in os.environ:
        (directory / f"pid-{jax.process_index()}").write_text(f"{os.getpid()}")
    (directory / f"sum-{jax.process_index()}").write_text(f"{total:g}")
    while "BENCH_HOLD" in os.environ and not (directory / "go").exists():
        time.sleep(0.01)


def main_of(rank: int, size: int, argv: list[str]) -> None:
    """The same as a function, for tools that do not start a program."""
    os.environ.update(JAX_PROCESS_ID=str(rank), JAX_NUM_PROCESSES=str(size))
    main(argv)


if __name__ == "__main__":
    main(sys.argv[1:])
