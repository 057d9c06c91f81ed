"""Each rank does something of its own, on its own devices or at its own speed, between the calls of all."""

from __future__ import annotations

import gc
import os
import threading
import warnings

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from agreeing import Step, World, total


def local_on_rank_0(world: World) -> Step:
    """Rank 0 evaluates and logs by itself, also on its part of a global array."""
    x, model = world.ones(world.rows, 8), jnp.ones((8, 8))
    evaluate = jax.jit(lambda model, batch: (batch @ model).mean())

    def step(number: int) -> None:
        loss = total(x)
        if world.first:
            own = x.addressable_shards[0].data
            print(number, float(loss), float(evaluate(model, own)), float(own.max()), float(jnp.linalg.norm(own)))

    return step


def replicated_on_rank_0(world: World) -> Step:
    """Rank 0 alone computes with what all ranks hold alike, which exchanges nothing."""
    x = world.ones(world.rows, 8)
    perplexity = jax.jit(lambda loss: jnp.exp(loss / 100))

    def step(number: int) -> None:
        loss = total(x)
        if world.first and number % 3 == 0:
            print(number, jnp.log(loss) + number, perplexity(loss))
        total(loss * x)

    return step


def unnamed_axis(world: World) -> Step:
    """A pmap without axis_name, whose axis some versions of JAX name after an object in memory."""
    garbage = [object() for _ in range(world.rank)]
    doubled = jax.pmap(lambda row: row * 2)
    rows = np.ones((jax.local_device_count(), 4), np.float32)

    def step(number: int) -> None:
        assert float(doubled(rows).addressable_data(0)[0, 0]) == 2.0, garbage

    return step


def local_shapes(world: World) -> Step:
    """Functions and shapes of each rank's own, compiled at different times."""
    x = world.ones(world.rows, 8)
    own = jax.jit(lambda values: jnp.sort(values).sum() * world.rank)

    def step(number: int) -> None:
        float(total(x))
        float(own(np.ones(1 + world.rank + number // (20 + world.rank))))

    return step


def local_threads(world: World) -> Step:
    """A thread of each rank computes on its own devices all the time."""
    x = world.ones(world.rows, 8)
    augment = jax.jit(lambda image: jnp.flip(image) * 2)

    def load(batches: int) -> None:
        for _ in range(batches):
            augment(np.ones((4, 4))).block_until_ready()

    def step(number: int) -> None:
        thread = threading.Thread(target=load, args=(number % 3 + world.rank,))
        thread.start()
        float(total(x))
        thread.join()

    return step


def garbage(world: World) -> Step:
    """Programs and arrays die in the collector's time, which is not the same on all ranks."""
    x = world.ones(world.rows, 8)

    def step(number: int) -> None:
        function = jax.jit(lambda x: x.sum() + 1) if number % 20 == 0 else total
        ring = {"x": function(x)}
        ring["ring"] = ring  # type: ignore[assignment]
        if number % (20 + world.rank) == 0:
            gc.collect()

    return step


def caches(world: World) -> Step:
    """Each rank clears its caches when it likes: known programs are compiled again, on one rank only."""
    x = world.ones(world.rows, 8)

    def step(number: int) -> None:
        if number % 40 == 4 * (1 + world.rank):
            jax.clear_caches()
        float(total(x))

    return step


def persistent_cache(world: World) -> Step:
    """What one rank compiles another reads from its disk: in the second half only rank 0 has a warm cache."""
    x = world.ones(world.rows, 8)
    cached = jax.jit(lambda x: jnp.cumsum(x, axis=1).sum())
    half = world.steps // 2

    def step(number: int) -> None:
        if number % half == 0:
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
            jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
            mine = "warm" if world.first else f"cold-{world.rank}-{number}"
            jax.config.update("jax_compilation_cache_dir", str(world.directory / mine))
            compilation_cache.reset_cache()
            jax.clear_caches()
        float(cached(x))
        if (number + 1) % half == 0:
            jax.config.update("jax_compilation_cache_dir", None)
            compilation_cache.reset_cache()

    return step


def some_ranks_only(world: World) -> Step:
    """Pairs of ranks compute on meshes of their own, one pair more often than the other."""
    x = world.ones(world.rows, 8)
    pair = world.rank // 2
    devices = np.split(world.mesh.devices, world.size // 2)[pair]
    shape = (devices.size, 8)
    sharding = NamedSharding(Mesh(devices, ("data",)), PartitionSpec("data"))
    parts = jax.make_array_from_callback(shape, sharding, lambda index: np.ones(shape, np.float32)[index])
    own = jax.jit(lambda parts: parts.sum() * (1 + pair))

    def step(number: int) -> None:
        for _ in range(1 + 2 * pair if number % 2 else 1):
            float(own(parts))
        if number % 10 == 0:
            float(total(x))

    return step


def forks(world: World) -> Step:
    """Processes that a rank starts come and go, and inherit all that is open."""
    x = world.ones(world.rows, 8)

    def step(number: int) -> None:
        if number % 20 == 10 * world.rank:
            with warnings.catch_warnings(action="ignore"):
                child = os.fork()
            if child == 0:
                os._exit(0)
            os.waitpid(child, 0)
        float(total(x))

    return step
