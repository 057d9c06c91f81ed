"""The ranks make the same calls, in all the forms that JAX offers, and as people train: optax, orbax checkpoints."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback, multihost_utils
from jax.sharding import PartitionSpec

from agreeing import Step, World, total


def gathers(world: World) -> Step:
    """Values that differ, in shapes that don't."""

    def step(number: int) -> None:
        multihost_utils.process_allgather(np.array([world.rank, number]))
        if number % 4 == 0:
            multihost_utils.broadcast_one_to_all(np.ones(3) * world.rank)
            multihost_utils.sync_global_devices(f"step {number}")

    return step


def puts(world: World) -> Step:
    """Equal values are put on all devices; JAX compares them."""

    def step(number: int) -> None:
        jax.device_put(np.full((world.rows, 2), number), world.spread)

    return step


def prints(world: World) -> Step:
    """Every rank prints what is the same everywhere."""
    x = world.ones(world.rows, 8)

    def step(number: int) -> None:
        mean = x.mean() + number
        if number % 20 == 0:
            print(number, mean, f"{total(x):.1f}")

    return step


def ahead_of_time(world: World) -> Step:
    """Compiled beforehand, for two shapes."""
    arrays = [world.ones(world.rows, width) for width in (4, 8)]
    compiled = [jax.jit(lambda x: (x * x).sum()).lower(x).compile() for x in arrays]

    def step(number: int) -> None:
        float(compiled[number % 2](arrays[number % 2]))

    return step


def transformed(world: World) -> Step:
    """vmap and grad, around and inside of jit."""
    x = world.ones(world.rows, 8)

    def energy(row: jax.Array) -> jax.Array:
        return jnp.tanh(row).sum()

    gradient = jax.jit(jax.grad(lambda x: jax.vmap(energy)(x).sum()))
    rows = jax.vmap(jax.jit(energy))

    def step(number: int) -> None:
        gradient(x).block_until_ready()
        if number % 20 == 0:
            rows(x).block_until_ready()
            jax.grad(lambda x: total(x) * 2)(x).block_until_ready()

    return step


def static_arguments(world: World) -> Step:
    """Five programs of one name and shape, in the same order everywhere."""
    x = world.ones(world.rows, 8)
    power = jax.jit(lambda x, n: (x**n).sum(), static_argnums=1)

    def step(number: int) -> None:
        float(power(x, number * 7 % 5))

    return step


def shard_mapped(world: World) -> Step:
    x = world.ones(world.rows, 8)
    spec = PartitionSpec("data")
    mapped = partial(jax.shard_map, mesh=world.mesh, in_specs=spec, out_specs=PartitionSpec())
    compiled = jax.jit(mapped(lambda x: jax.lax.psum(x.sum(), "data")))
    eager = mapped(lambda x: jax.lax.pmean(x.sum(), "data"))

    def step(number: int) -> None:
        float(compiled(x))
        if number % 20 == 0:
            float(eager(x))

    return step


def eager_control_flow(world: World) -> Step:
    """Loops and branches outside of jit, each a program of its own."""
    x = world.ones(world.rows, 8)

    def grow(_: int, x: jax.Array) -> jax.Array:
        return x * 1.01

    def step(number: int) -> None:
        if number % 2:
            jax.lax.fori_loop(0, 3, grow, x).block_until_ready()
        else:
            jax.lax.cond(number % 4 == 0, jnp.sin, jnp.cos, x).block_until_ready()

    return step


def nans(world: World) -> Step:
    """debug_nans looks at each result; the error is the same on all ranks, and they go on."""
    x = world.ones(world.rows, 8)
    root = jax.jit(lambda x, shift: jnp.sqrt(x - shift).sum())

    def step(number: int) -> None:
        with jax.debug_nans(True):
            try:
                float(root(x, 2.0 if number % 20 == 19 else 0.5))
            except FloatingPointError:
                print("nan", number)

    return step


def errors(world: World) -> Step:
    """Calls that fail on all ranks before they start."""
    x = world.ones(world.rows, 8)

    def step(number: int) -> None:
        try:
            float(total(x if number % 10 else "no array"))
        except TypeError:
            print("refused", number)

    return step


def callbacks(world: World) -> Step:
    """The host's functions are called inside of programs; each rank has its own."""
    x = world.ones(world.rows, 8)
    seen: list[float] = []
    note = seen.append if world.first else (lambda value: None)

    def local(x: jax.Array) -> jax.Array:
        y = jax.pure_callback(lambda x: np.asarray(x) + world.rank, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
        return jax.lax.psum(y.sum(), "data")

    @jax.jit
    def with_host(x: jax.Array) -> jax.Array:
        spec = PartitionSpec("data")
        result = jax.shard_map(local, mesh=world.mesh, in_specs=spec, out_specs=PartitionSpec(), check_vma=False)(x)
        io_callback(lambda value: note(float(value)), None, result)
        return result

    @jax.jit
    def talks(x: jax.Array) -> jax.Array:
        jax.debug.print("sum {}", x.sum())
        return x.sum()

    def step(number: int) -> None:
        float(with_host(x))
        if number % 20 == 0:
            float(talks(x))

    return step


def harmless_differences(world: World) -> Step:
    """Names of scopes, objects that are hashed by their address: nothing that the program computes from."""
    x = world.ones(world.rows, 8)

    class Options:
        """Static, equal to itself only."""

        scale = 3

    options = Options()

    @partial(jax.jit, static_argnums=1)
    def scaled(x: jax.Array, options: Options) -> jax.Array:
        with jax.named_scope(f"on-rank-{world.rank}"):
            return (x * options.scale).sum()

    def step(number: int) -> None:
        float(scaled(x, options))

    return step


def training(world: World) -> Step:
    """Adam on a state that each step gives away; rank 0 logs the loss."""
    import optax

    optimizer = optax.adam(1e-2)

    def loss_of(weights: dict[str, jax.Array], batch: jax.Array) -> jax.Array:
        return ((batch @ weights["w"] + weights["b"] - 1) ** 2).mean()

    def update(state: tuple, batch: jax.Array) -> tuple:
        weights, moments = state
        loss, gradients = jax.value_and_grad(loss_of)(weights, batch)
        updates, moments = optimizer.update(gradients, moments)
        return (optax.apply_updates(weights, updates), moments), loss

    train_step = jax.jit(update, donate_argnums=0, out_shardings=world.everywhere)
    weights = {"w": jnp.zeros((8, 4)), "b": jnp.zeros(4)}
    state = jax.device_put((weights, optimizer.init(weights)), world.everywhere)

    def step(number: int) -> None:
        nonlocal state
        local = np.full((2, 8), number % 3 + world.rank, np.float32)
        batch = jax.make_array_from_process_local_data(world.spread, local)
        state, loss = train_step(state, batch)
        if world.first and number % 10 == 0:
            print("loss", float(loss))

    return step


def checkpoints(world: World) -> Step:
    """The state is saved three times, in the background; it is read again at the end."""
    import orbax.checkpoint as ocp

    state = {"w": world.ones(world.rows, 8), "step": jax.device_put(np.int32(0), world.everywhere)}
    train_step = jax.jit(lambda state: {"w": state["w"] - 0.01 * state["w"].mean(), "step": state["step"] + 1})
    manager = ocp.CheckpointManager(
        world.directory / "checkpoints",
        options=ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=True),
    )

    def step(number: int) -> None:
        nonlocal state
        state = train_step(state)
        if (number + 1) % (world.steps // 3) == 0:
            manager.save(number, args=ocp.args.StandardSave(state))
        if number + 1 == world.steps:
            manager.wait_until_finished()
            manager.restore(manager.latest_step(), args=ocp.args.StandardRestore(state))
            manager.close()

    return step
