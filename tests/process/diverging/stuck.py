"""One rank does not reach the next call at all.

A comment with the kind's name stands in the line where that rank is, one with "the others" where they wait for it.
"""

from __future__ import annotations

import os
import signal
import threading
import time

import jax
import numpy as np

from diverging.world import World, kind


@jax.jit
def step(x: jax.Array) -> jax.Array:
    return x.sum()


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
def lock(world: World) -> None:
    """It takes a lock that it holds."""
    x = world.ones(world.size, 8)
    own = threading.Lock()
    for number in range(5):
        with own:
            if world.odd and number == 3:
                own.acquire()  # lock
            float(step(x))  # lock: the others


@kind
def typing(world: World) -> None:
    """Rank 0 alone has a terminal, and asks there."""
    x = world.ones(world.size, 8)
    for number in range(5):
        if world.first and number == 3:
            input("go on? ")  # typing
        float(step(x))  # typing: the others


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
