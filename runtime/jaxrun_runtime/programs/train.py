"""Trains a small network that survives: stopped or killed at any moment and started again, it ends with the same bits.

There are three reasons. A step depends only on the state and its own number, which selects the rows of its batch. A
checkpoint holds the whole state. An incomplete checkpoint does not count. On SIGTERM, or before the time limit,
should_stop is true on all ranks at the same step: they save, and exit with status 0.

The order in which gradients are summed depends on the number of devices. If training continues on another number, the
parameters are equal only up to rounding, and the program says so. On GPUs the bits are equal as long as XLA's autotuner
chooses the same kernels, which jaxrun's --compile-cache keeps.
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

ROWS = 2000  # points on two spirals; the network decides which spiral a point is on
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
        enable_async_checkpointing=False,  # with it, the other ranks would wait for a rank that fails to save
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
            loss = float(loss)  # waits for the step: on CPU, dozens of unfinished steps can block each other forever
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
    """Return the state after `step`. Exits if it was saved by a run with another batch size."""
    items = ocp.args.Composite(state=ocp.args.StandardRestore(state), description=ocp.args.JsonRestore())
    saved = checkpoints.restore(step, args=items)
    before = saved.description
    if before["batch_size"] != description["batch_size"]:
        sys.exit(f"train: {checkpoints.directory} has --batch-size {before['batch_size']}; give that, or another DIR")
    same = "bit for bit" if jax.default_backend() == "cpu" else "on as many devices"
    devices = "1 device" if before["devices"] == 1 else f"{before['devices']} devices"
    other = f"saved on {devices}, so equal to an undisturbed run only up to rounding"
    print_once(f"continues after step {step}, {same if before['devices'] == description['devices'] else other}")
    restored: State = saved.state
    return restored


def points() -> tuple[np.ndarray, np.ndarray]:
    """Return points [ROWS, 2] on two spirals, and labels [ROWS] with the spiral of each; equal on every process."""
    random = np.random.default_rng(seed=0)
    label = np.arange(ROWS) % 2
    turn = 3 * np.pi * np.sqrt(random.uniform(0.02, 1, ROWS))
    angle = turn + np.pi * label
    spiral = np.stack([turn * np.cos(angle), turn * np.sin(angle)], axis=1) / (3 * np.pi)
    return (spiral + 0.01 * random.normal(size=(ROWS, 2))).astype(np.float32), label.astype(np.float32)


POINTS, LABELS = points()


def batch_of_step(step: int, size: int, split: NamedSharding) -> Batch:
    """Return the batch of a step. It depends only on the step's number; each epoch has its own order."""
    epoch, number = divmod(step, -(-ROWS // size))
    rows, mask = next(islice(jr.batches(ROWS, size, multiple=jax.local_device_count(), seed=(0, epoch)), number, None))
    return spread(split, POINTS[rows], LABELS[rows], mask)


def spread(split: NamedSharding, *local: np.ndarray) -> Batch:
    """Return arrays over all devices, made from the rows of each process."""
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
    """Return the share of points that are classified correctly; None if the program should stop."""
    right = 0
    for rows, mask in jr.batches(ROWS, size, multiple=jax.local_device_count()):
        if jr.should_stop():
            return None
        right += int(count_right(state["params"], spread(split, POINTS[rows], LABELS[rows], mask)))
    return right / ROWS


def fingerprint(state: State) -> str:
    """Return a hash of every bit of the parameters."""
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
