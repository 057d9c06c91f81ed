"""The ranks call the same functions, in another order or another number of times, or one does not reach a call at all.

The line in question has a comment with the kind's name, or two have: those of "the others" and of the rank that
differs.
"""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from diverging import World, kind


@jax.jit
def step(x: jax.Array) -> jax.Array:
    return x.sum()


@jax.jit
def evaluate(x: jax.Array) -> jax.Array:
    return (x * x).sum()


@kind
def branch(world: World) -> None:
    """Which of two known functions comes next depends on a value of the rank's own; both have run before."""
    x = world.ones(world.size, 8)
    for number in range(20):
        long = number % 2 == 0 if not (world.odd and number == 12) else False
        float((step if long else evaluate)(x))  # branch


@kind
def rank_0_only(world: World) -> None:
    """`if rank == 0: print(x.mean())`: its sum meets the others' next step."""
    x = world.ones(world.size, 8)
    for number in range(6):
        float(step(x))  # rank-0-only: the others
        if world.first and number == 2:
            print("mean", x.mean(), flush=True)  # rank-0-only


@kind
def rank_0_only_end(world: World) -> None:
    """The same as a last word, when the others have ended."""
    x = world.ones(world.size, 8)
    for _ in range(3):
        float(step(x))
    if world.first:
        print("mean", x.mean(), flush=True)  # rank-0-only-end


@kind
def threads(world: World) -> None:
    """Two threads make one call each; who comes first is not the same on all ranks."""
    x = world.ones(world.size, 8)

    def logs() -> None:
        float(evaluate(x))  # threads

    def trains() -> None:
        float(step(x))  # threads: the others

    for function in (logs, trains) if world.odd else (trains, logs):
        with ThreadPoolExecutor(1) as pool:
            pool.submit(function).result()


@kind
def meshes_in_turn(world: World) -> None:
    """A ring of pairs: each rank waits for its right neighbour first, and so all do for ever."""
    pairs = []
    for left in (world.rank, (world.rank - 1) % world.size):
        ends = sorted((left, (left + 1) % world.size))
        pairs.append(Mesh(world.mesh.devices[ends], ("data",)))
    for pair in pairs:
        float(step(world.ones(2, 8, mesh=pair)))  # meshes-in-turn


@kind
def barrier_one_rank(world: World) -> None:
    """Rank 0 stands in a barrier that the others never reach."""
    x = world.ones(world.size, 8)
    for _ in range(3):
        float(step(x))
    if world.first:
        multihost_utils.sync_global_devices("saved")  # barrier-one-rank
    float(evaluate(x))  # barrier-one-rank: the others


@kind
def gather_shapes(world: World) -> None:
    """One rank has more values to gather than the others."""
    values = np.ones(3 if world.odd else 2, np.float32)
    for _ in range(5):
        multihost_utils.process_allgather(values)  # gather-shapes


# One rank does not reach the next call at all.


@kind
def last_batch_end(world: World) -> None:
    """One rank has a batch less than the others, and is done."""
    x = world.ones(world.size, 8)
    for _ in range(3 if world.odd else 4):
        float(step(x))  # last-batch-end: the others
    print("finished", flush=True)


@kind
def last_batch_sleep(world: World) -> None:
    """It waits for more data instead."""
    x = world.ones(world.size, 8)
    for number in range(5):
        while world.odd and number == 3:
            time.sleep(1000)  # last-batch-sleep
        float(step(x))  # last-batch-sleep: the others


@kind
def stopped(world: World) -> None:
    """A signal stops it, as a memory limit or a curious admin may do."""
    x = world.ones(world.size, 8)
    for number in range(5):
        if world.odd and number == 3:
            os.kill(os.getpid(), signal.SIGSTOP)  # stopped
        float(step(x))  # stopped: the others


@kind
def callback(world: World) -> None:
    """The host's part of a step fails on one rank, while the others stand in the sum that follows it."""

    def read(x: np.ndarray) -> np.ndarray:
        if world.odd and float(x[0, 0]) > 3:
            raise ValueError("a bad record")  # callback
        return x

    @jax.jit
    def with_host(x: jax.Array) -> jax.Array:
        local = jax.shard_map(
            lambda x: jax.pure_callback(read, jax.ShapeDtypeStruct(x.shape, x.dtype), x),
            mesh=world.mesh,
            in_specs=jax.sharding.PartitionSpec("data"),
            out_specs=jax.sharding.PartitionSpec("data"),
        )
        return local(x).sum()

    x = world.ones(world.size, 8)
    for _ in range(5):
        float(with_host(x))  # callback: the call
        x = x + 1


@kind
def fails(world: World) -> None:
    """An error of its own ends it."""
    x = world.ones(world.size, 8)
    for number in range(5):
        if world.odd and number == 3:
            raise ValueError("a bad record")  # fails
        float(step(x))  # fails: the others
