"""Train a small network that survives: stopped or killed at any moment and started again, it ends with the same bits.

What makes that so: a step depends on nothing but the state and its own number, from which the rows of its batch follow;
a checkpoint holds all of the state; a checkpoint that was cut short does not count. On SIGTERM, or before the time
limit, should_stop is true on all ranks at the same step: they save, and end with status 0.

The sum of the gradients over the devices has an order of its own for each number of devices: continued on another
number, the parameters are the same up to rounding only, and the program says so. On GPUs the bits are the same as long
as XLA's autotuner chooses the same kernels, which jaxrun's --compile-cache keeps.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxrun_runtime as jr

try:
    import optax
    import orbax.checkpoint as ocp
except ImportError as missing:
    sys.exit(f"train needs {missing.name}, which is not installed; pip install optax orbax-checkpoint")

ROWS = 2000  # points on two spirals; the network tells which of them a point is on
LAYERS = (2, 64, 64, 1)
OPTIMIZER = optax.adam(3e-3)
EVALUATE_EVERY = 100  # steps

State = dict[str, Any]  # "params" and "optimizer"
Batch = tuple[jax.Array, jax.Array, jax.Array]  # points [rows, 2], labels [rows], and False where a row is padding


def main(arguments: list[str]) -> None:
    options = parse(arguments)
    mesh = Mesh(np.array(jax.devices()), ("data",))
    whole, split = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))
    state = jax.jit(start, out_shardings=whole)()
    description = {"batch_size": options.batch_size, "devices": jax.device_count()}

    policy = ocp.CheckpointManagerOptions(
        save_interval_steps=options.save_every,
        max_to_keep=2,
        cleanup_tmp_directories=True,
        enable_async_checkpointing=False,  # else a rank that fails to save leaves the others waiting for it
    )
    with ocp.CheckpointManager(options.directory.resolve(), options=policy) as checkpoints:
        done = checkpoints.latest_step() or 0
        found = jr.restore(state) if jr.attempt().number > 1 else None  # from the memory of the job's hosts
        if found is not None and found.step >= done:
            done, state = found
            print_once(f"continues after step {done}, from memory")
        elif done:
            state = restore(checkpoints, done, state, description)

        def save(**more: Any) -> bool:
            items = ocp.args.Composite(state=ocp.args.StandardSave(state), description=ocp.args.JsonSave(description))
            return bool(checkpoints.save(done, args=items, **more))

        while done < options.steps:
            began = time.monotonic()
            state, loss = train_step(state, batch_of_step(done, options.batch_size, split))
            loss = float(loss)  # waits for the step: on CPU, dozens of unfinished steps can block each other for ever
            done += 1
            save()
            if done % options.snapshot_every == 0:
                jr.snapshot(done, state)
            if done % EVALUATE_EVERY == 0:
                accuracy = evaluate(state, options.batch_size, split)
                print_once(f"step {done:>4}  loss {loss:.4f}" + ("" if accuracy is None else f"  {accuracy:.1%} right"))
            time.sleep(max(0.0, began + options.step_time - time.monotonic()))
            if jr.should_stop(done):
                break
        if checkpoints.latest_step() != done:
            save(force=True)
    if done < options.steps:
        print_once(f"stopped after step {done}, and saved it")
    else:
        print_once(f"parameters {fingerprint(state)} after {done} steps")


def start() -> State:
    keys = jax.random.split(jax.random.key(0), len(LAYERS) - 1)
    shapes = zip(keys, LAYERS[:-1], LAYERS[1:], strict=True)
    params = [{"w": jax.random.normal(key, (m, n)) * jnp.sqrt(2 / m), "b": jnp.zeros(n)} for key, m, n in shapes]
    return {"params": params, "optimizer": OPTIMIZER.init(params)}


def restore(checkpoints: Any, step: int, state: State, description: dict[str, int]) -> State:
    """The state after `step`. Exits if it was saved by a run with another batch size."""
    items = ocp.args.Composite(state=ocp.args.StandardRestore(state), description=ocp.args.JsonRestore())
    saved = checkpoints.restore(step, args=items)
    before = saved.description
    if before["batch_size"] != description["batch_size"]:
        sys.exit(f"train: {checkpoints.directory} is of --batch-size {before['batch_size']}; give that, or another DIR")
    same = "bit for bit" if jax.default_backend() == "cpu" else "on as many devices"
    devices = "1 device" if before["devices"] == 1 else f"{before['devices']} devices"
    other = f"saved on {devices}, so equal to an undisturbed run only up to rounding"
    print_once(f"continues after step {step}, {same if before['devices'] == description['devices'] else other}")
    restored: State = saved.state
    return restored


def points() -> tuple[np.ndarray, np.ndarray]:
    """Points [ROWS, 2] on two spirals, and for each which one it is on; equal on every process."""
    random = np.random.default_rng(seed=0)
    label = np.arange(ROWS) % 2
    turn = 3 * np.pi * np.sqrt(random.uniform(0.02, 1, ROWS))
    angle = turn + np.pi * label
    spiral = np.stack([turn * np.cos(angle), turn * np.sin(angle)], axis=1) / (3 * np.pi)
    return (spiral + 0.01 * random.normal(size=(ROWS, 2))).astype(np.float32), label.astype(np.float32)


POINTS, LABELS = points()


def batch_of_step(step: int, size: int, split: NamedSharding) -> Batch:
    """The batch of a step, which is a function of its number: each epoch has an order of its own."""
    epoch, number = divmod(step, -(-ROWS // size))
    rows, mask = next(islice(jr.batches(ROWS, size, multiple=jax.local_device_count(), seed=(0, epoch)), number, None))
    return spread(split, POINTS[rows], LABELS[rows], mask)


def spread(split: NamedSharding, *local: np.ndarray) -> Batch:
    """Arrays over all devices, of the rows of each process."""
    points, labels, mask = (jax.make_array_from_process_local_data(split, rows) for rows in local)
    return points, labels, mask


def scores(params: Any, points: jax.Array) -> jax.Array:
    *hidden, last = params
    for layer in hidden:
        points = jax.nn.relu(points @ layer["w"] + layer["b"])
    found: jax.Array = (points @ last["w"] + last["b"])[:, 0]
    return found


@jax.jit
def train_step(state: State, batch: Batch) -> tuple[State, jax.Array]:
    points, labels, mask = batch

    def mean_loss(params: Any) -> jax.Array:
        losses = optax.sigmoid_binary_cross_entropy(scores(params, points), labels)
        return jnp.sum(jnp.where(mask, losses, 0.0)) / jnp.sum(mask)

    loss, gradient = jax.value_and_grad(mean_loss)(state["params"])
    updates, optimizer = OPTIMIZER.update(gradient, state["optimizer"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "optimizer": optimizer}, loss


@jax.jit
def count_right(params: Any, batch: Batch) -> jax.Array:
    points, labels, mask = batch
    return jnp.sum(mask & ((scores(params, points) > 0) == (labels > 0.5)))


def evaluate(state: State, size: int, split: NamedSharding) -> float | None:
    """The share of all points that are told right; None where the program should rather stop."""
    right = 0
    for rows, mask in jr.batches(ROWS, size, multiple=jax.local_device_count()):
        if jr.should_stop():
            return None
        right += int(count_right(state["params"], spread(split, POINTS[rows], LABELS[rows], mask)))
    return right / ROWS


def fingerprint(state: State) -> str:
    """A hash of every bit of the parameters."""
    leaves = jax.tree.leaves(state["params"])
    return hashlib.sha256(b"".join(np.asarray(leaf.addressable_data(0)).tobytes() for leaf in leaves)).hexdigest()[:16]


def print_once(line: str) -> None:
    """Print on rank 0 only."""
    if jax.process_index() == 0:
        print(line, flush=True)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="train", description="Train a classifier that can be stopped at any step.")
    parser.add_argument("directory", type=Path, metavar="DIR", help="for checkpoints, shared by all hosts")
    parser.add_argument("--steps", type=int, default=400, help="(default: 400)")
    parser.add_argument("--save-every", type=int, default=50, help="steps between checkpoints (default: 50)")
    parser.add_argument(
        "--snapshot-every", type=int, default=10, help="steps between snapshots in memory (default: 10)"
    )
    parser.add_argument("--batch-size", type=int, default=128, help="rows over all devices (default: 128)")
    parser.add_argument("--step-time", type=float, default=0.0, metavar="S", help="seconds that a step takes at least")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
