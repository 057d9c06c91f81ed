"""Classify scikit-learn's handwritten digits with a small neural network, data-parallel, with optax.

The network's code does not mention devices: its parameters are placed on all of them, the rows of each batch are
divided among them, and jit inserts the all-reduce of the gradients. The batches, and up to rounding the loss curve, do
not depend on the number of processes and devices. Options: --epochs N, --batch-size N, --losses FILE.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrun_runtime.data import batches, shard

try:
    import optax
    from sklearn.datasets import load_digits
except ImportError as missing:
    sys.exit(f"digits needs {missing.name}, which is not installed; pip install optax scikit-learn")

TRAINING_ROWS = 1500  # of 1797; the others are for testing
LAYERS = (64, 128, 10)
OPTIMIZER = optax.adam(2e-3)

Params = list[tuple[jax.Array, jax.Array]]


def main(arguments: list[str]) -> None:
    options = parse(arguments)
    # Not jax.make_mesh: it refuses devices that lie on several hosts.
    mesh = Mesh(np.array(jax.devices()), ("data",))
    whole, split = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))
    devices = jax.local_device_count()
    train, test = load_data()

    params, state = jax.jit(start, out_shardings=whole)()
    curve: list[float] = []
    steps = -(-TRAINING_ROWS // options.batch_size)
    for epoch in range(options.epochs):
        for rows, mask in batches(TRAINING_ROWS, options.batch_size, multiple=devices, seed=epoch):
            images, labels = train
            params, state, loss = train_step(params, state, *spread(split, images[rows], labels[rows], mask))
            curve.append(float(loss))
        print_once(f"epoch {epoch + 1:>2}  loss {np.mean(curve[-steps:]):.4f}")

    (images, labels), mask = shard(test, multiple=devices)
    right = int(count_right(params, *spread(split, images, labels, mask)))
    total = len(test[1])
    print_once(f"test accuracy {right / total:.1%} ({right} of {total})")
    if options.losses and jax.process_index() == 0:
        options.losses.write_text("".join(f"{loss:.9g}\n" for loss in curve))


def load_data() -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """(images [rows, 64] in 0 ... 1, labels [rows]) for training and for testing, equal on every process."""
    digits: Any = load_digits()
    images, labels = digits.data.astype(np.float32) / 16, digits.target.astype(np.int32)
    order = np.random.default_rng(seed=0).permutation(len(labels))
    train, test = order[:TRAINING_ROWS], order[TRAINING_ROWS:]
    return (images[train], labels[train]), (images[test], labels[test])


def spread(sharding: NamedSharding, *local: np.ndarray) -> list[jax.Array]:
    """Arrays over all devices, from the rows of each process."""
    return [jax.make_array_from_process_local_data(sharding, rows) for rows in local]


def start() -> tuple[Params, Any]:
    keys = jax.random.split(jax.random.key(0), len(LAYERS) - 1)
    sizes = zip(keys, LAYERS[:-1], LAYERS[1:], strict=True)
    params = [(jax.random.normal(key, (m, n)) * jnp.sqrt(2 / m), jnp.zeros(n)) for key, m, n in sizes]
    return params, OPTIMIZER.init(params)


def predict(params: Params, images: jax.Array) -> jax.Array:
    """Scores of shape [rows, 10]."""
    *hidden, (w, b) = params
    for weights, bias in hidden:
        images = jax.nn.relu(images @ weights + bias)
    return images @ w + b


def mean_loss(params: Params, images: jax.Array, labels: jax.Array, mask: jax.Array) -> jax.Array:
    """Mean over the rows of all devices that are not padding."""
    losses = optax.softmax_cross_entropy_with_integer_labels(predict(params, images), labels)
    return jnp.sum(jnp.where(mask, losses, 0.0)) / jnp.sum(mask)


@jax.jit
def train_step(
    params: Params, state: Any, images: jax.Array, labels: jax.Array, mask: jax.Array
) -> tuple[Params, Any, jax.Array]:
    loss, gradient = jax.value_and_grad(mean_loss)(params, images, labels, mask)
    updates, state = OPTIMIZER.update(gradient, state, params)
    return optax.apply_updates(params, updates), state, loss


@jax.jit
def count_right(params: Params, images: jax.Array, labels: jax.Array, mask: jax.Array) -> jax.Array:
    return jnp.sum(mask & (jnp.argmax(predict(params, images), axis=-1) == labels))


def print_once(line: str) -> None:
    """Print on rank 0 only."""
    if jax.process_index() == 0:
        print(line, flush=True)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="digits", description="Train a digit classifier on all devices.")
    parser.add_argument("--epochs", type=int, default=10, help="passes over the data (default: 10)")
    parser.add_argument("--batch-size", type=int, default=128, help="rows over all devices (default: 128)")
    parser.add_argument("--losses", type=Path, metavar="FILE", help="write each step's loss, one per line")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
