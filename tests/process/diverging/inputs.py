"""The ranks call one function, each with something else: its arguments, what is baked into it, how it is compiled.

The line of the call in question has a comment with the kind's name; each kind has made three calls before.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from diverging import World, kind


@kind
def shape_local_batch(world: World) -> None:
    """The reader of one rank is short of a row; JAX takes the global shape from the local one."""

    @jax.jit
    def step(batch: dict[str, jax.Array]) -> jax.Array:
        return (batch["x"] * batch["y"]).sum()

    sharding = NamedSharding(world.mesh, PartitionSpec("data"))
    for number in range(5):
        rows = 3 if world.odd and number == 3 else 4
        local = {"x": np.ones((rows, 8), np.float32), "y": np.ones((rows, 1), np.float32)}
        batch = jax.tree.map(partial(jax.make_array_from_process_local_data, sharding), local)
        float(step(batch))  # shape-local-batch


@kind
def shape_explicit(world: World) -> None:
    """One rank pads to another length; the columns' sums are too different for Gloo, which aborts."""

    @jax.jit
    def columns(x: jax.Array) -> jax.Array:
        return x.sum(0)

    for number in range(5):
        width = 24 if world.odd and number == 3 else 16
        np.asarray(columns(world.ones(world.size, width)))  # shape-explicit


@kind
def dtype(world: World) -> None:
    """One rank casts its images, the others don't."""

    @jax.jit
    def brightness(image: jax.Array) -> jax.Array:
        return image.sum()

    for number in range(5):
        kind_of_number = np.int32 if world.odd and number == 3 else np.float32
        float(brightness(world.ones(world.size, 8, dtype=kind_of_number)))  # dtype


@kind
def weak_type(world: World) -> None:
    """A Python number leaves bfloat16 alone, a numpy scalar makes float32 of it."""

    @jax.jit
    def scaled(x: jax.Array, factor: float) -> jax.Array:
        return (x * factor).sum()

    x = world.ones(world.size, 8, dtype=jnp.bfloat16)
    for number in range(5):
        factor = np.float32(2) if world.odd and number == 3 else 2.0
        float(scaled(x, factor))  # weak-type


@kind
def argument_count(world: World) -> None:
    """One rank has no mask."""

    @jax.jit
    def masked(x: jax.Array, mask: jax.Array | None) -> jax.Array:
        return (x if mask is None else x * mask).sum()

    x = world.ones(world.size, 8)
    for number in range(5):
        float(masked(x, None if world.odd and number == 3 else x))  # argument-count


@kind
def donated(world: World) -> None:
    """One rank gives its state away to the update; the values are right all the same."""

    def update(state: jax.Array) -> jax.Array:
        return state - 0.1 * state.mean()

    kept, given = jax.jit(update), jax.jit(update, donate_argnums=0)
    state = world.ones(world.size, 8)
    for number in range(5):
        state = (given if world.odd and number == 3 else kept)(state)  # donated
    state.block_until_ready()


@kind
def static_argument(world: World) -> None:
    """A Python value that differs: all ranks go on, with wrong values."""

    @partial(jax.jit, static_argnums=1)
    def powered(x: jax.Array, power: int) -> jax.Array:
        return (x * power).sum()

    x = world.ones(world.size, 8)
    for number in range(5):
        float(powered(x, 7 if world.odd and number == 3 else 2))  # static-argument


@kind
def constant(world: World) -> None:
    """A table of 64 KiB that is baked in, one of whose numbers differs."""
    x = world.ones(world.size, 128)
    for number in range(5):
        table = np.arange(128 * 128, dtype=np.float32).reshape(128, 128)
        table[77, 77] += world.odd and number == 3
        embed = jax.jit(lambda x, table=table: (x @ table).sum())
        float(embed(x))  # constant


@kind
def names_alike(world: World) -> None:
    """Two functions that are called alike; one rank has the other one."""

    def first() -> object:
        @jax.jit
        def loss(x: jax.Array) -> jax.Array:
            return (x * x).mean()

        return loss

    def second() -> object:
        @jax.jit
        def loss(x: jax.Array) -> jax.Array:
            return abs(x).mean()

        return loss

    square, absolute = first(), second()
    x = world.ones(world.size, 8)
    for number in range(5):
        float((absolute if world.odd and number == 3 else square)(x))  # names-alike


@kind
def mesh_order(world: World) -> None:
    """One rank has sorted its devices in another way."""

    @jax.jit
    def total(x: jax.Array) -> jax.Array:
        return x.sum()

    turned = Mesh(world.mesh.devices[::-1], ("data",))
    for number in range(5):
        float(total(world.ones(world.size, 8, mesh=turned if world.odd and number == 3 else None)))  # mesh-order


@kind
def shard_map_specs(world: World) -> None:
    """One rank gathers what the others take apart."""

    def local(x: jax.Array) -> jax.Array:
        return jax.lax.psum(x.sum(), "data")

    x = world.ones(world.size, 8)
    for number in range(5):
        specs = PartitionSpec() if world.odd and number == 3 else PartitionSpec("data")
        spread = jax.jit(jax.shard_map(local, mesh=world.mesh, in_specs=specs, out_specs=PartitionSpec()))
        float(spread(x))  # shard-map-specs


@kind
def out_shardings(world: World) -> None:
    """One rank asks for the result in parts, the others for all of it, from the first call on."""

    def normalized(x: jax.Array) -> jax.Array:
        return x / x.sum()

    spec = PartitionSpec("data") if world.odd else PartitionSpec()
    function = jax.jit(normalized, out_shardings=NamedSharding(world.mesh, spec))
    x = world.ones(world.size, 8)
    for _ in range(5):
        function(x).block_until_ready()  # out-shardings
