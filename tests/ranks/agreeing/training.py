"""Training as people do it: optax, donated state, orbax checkpoints."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from agreeing.world import Step, World


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
        if world.first and number % 100 == 0:
            print("loss", float(loss))

    return step


def checkpoints(world: World) -> Step:
    """The state is saved ten times, in the background; it is read again at the end."""
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
        if (number + 1) % (world.steps // 10) == 0:
            manager.save(number, args=ocp.args.StandardSave(state))
        if number + 1 == world.steps:
            manager.wait_until_finished()
            manager.restore(number, args=ocp.args.StandardRestore(state))
            manager.close()

    return step
