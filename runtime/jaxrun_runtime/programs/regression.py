"""Data-parallel least squares: each device computes on its rows of a batch, and all apply the mean gradient.

The parallel part is written out with jax.shard_map. Options: --steps N, --batch-size N, --no-plot. The plot
goes to the job's run directory, or without one to the current directory.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import count
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrun.protocol.names import RUN_DIR
from jaxrun_runtime.data import Indices, Mask, batches

SLOPE, INTERCEPT, NOISE = 2.0, -1.0, 0.5
ROWS = 1000
LEARNING_RATE = 0.05

Step = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


def main(arguments: list[str], env: Mapping[str, str]) -> None:
    options = parse(arguments)
    is_main = jax.process_index() == 0
    # Not jax.make_mesh: it refuses devices that lie on several hosts.
    mesh = Mesh(np.array(jax.devices()), ("data",))
    split = NamedSharding(mesh, PartitionSpec("data"))
    train_step = make_train_step(mesh)

    x, y = make_data()
    params = jax.jit(lambda: jnp.zeros(2), out_shardings=NamedSharding(mesh, PartitionSpec()))()
    steps = zip(range(options.steps), endless_batches(options.batch_size), strict=False)
    for step, (rows, mask) in steps:
        # Each process passes its own rows; together they are one array over all devices.
        batch = [jax.make_array_from_process_local_data(split, local) for local in (x[rows], y[rows], mask)]
        params, mean_loss = train_step(params, *batch)
        # float() waits for the step: on CPU, dozens of unfinished steps can block each other forever.
        loss = float(mean_loss)
        if step % 100 == 0 and is_main:
            print(f"step {step:>3}  loss {loss:.3f}", flush=True)

    slope, intercept = map(float, same_on_all_processes(params))
    if is_main:
        print(f"{line(slope, intercept)}  (truth: {SLOPE:g} x - {-INTERCEPT:g})", flush=True)
        if options.plot:
            print(plot(x, y, slope, intercept, Path(env.get(RUN_DIR) or ".")), flush=True)


def make_data() -> tuple[np.ndarray, np.ndarray]:
    """Return x and y of shape [ROWS], equal on every process because the seed is equal."""
    random = np.random.default_rng(seed=0)
    x = random.normal(size=ROWS).astype(np.float32)
    noise = NOISE * random.normal(size=ROWS).astype(np.float32)
    return x, np.float32(SLOPE) * x + np.float32(INTERCEPT) + noise


def endless_batches(batch_size: int) -> Iterator[tuple[Indices, Mask]]:
    """Yield this process's rows and mask of each batch, without end. Each epoch has its own order."""
    for epoch in count():
        yield from batches(ROWS, batch_size, multiple=jax.local_device_count(), seed=epoch)


def make_train_step(mesh: Mesh) -> Step:
    data, whole = PartitionSpec("data"), PartitionSpec()

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=(whole, data, data, data), out_specs=(whole, whole))
    def train_step(params: jax.Array, x: jax.Array, y: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
        """One step of gradient descent; x, y and mask are this device's rows. Returns (params, loss)."""

        def mean_loss(params: jax.Array) -> jax.Array:
            error = jnp.where(mask, params[0] * x + params[1] - y, 0.0)
            total: jax.Array = jax.lax.psum(jnp.sum(error**2), "data")
            rows: jax.Array = jax.lax.psum(jnp.sum(mask), "data")
            return total / rows

        # params is the same on all devices, so its gradient is already the sum over the devices: this is the all-reduce
        # of data-parallel training. Another psum or pmean would count it twice.
        loss, gradient = jax.value_and_grad(mean_loss)(params)
        return params - LEARNING_RATE * gradient, loss

    return train_step


def same_on_all_processes(params: jax.Array) -> np.ndarray:
    """Return the parameters. Exits if the processes' copies are not equal bit for bit."""
    mine = np.asarray(params.addressable_data(0))
    copies = np.reshape(multihost_utils.process_allgather(mine), (-1, mine.size))
    for rank, copy in enumerate(copies):
        if not np.array_equal(copy, copies[0]):
            sys.exit(
                f"regression: rank {rank} ended with the parameters {copy.tolist()}, rank 0 with "
                f"{copies[0].tolist()}. Check that every process runs the same program."
            )
    return mine


def line(slope: float, intercept: float) -> str:
    return f"y = {slope:.3f} x {'-' if intercept < 0 else '+'} {abs(intercept):.3f}"


def plot(x: np.ndarray, y: np.ndarray, slope: float, intercept: float, folder: Path) -> str:
    """Write a plot of data and line to `folder`. Returns a line to print."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return "plot left out: matplotlib is not installed; pip install matplotlib"
    figure = Figure(figsize=(6, 4))
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(xlabel="x", ylabel="y", title="least squares over all devices")
    axes.plot(x, y, ".", markersize=3, label=f"{ROWS} rows")
    ends = np.array([x.min(), x.max()])
    axes.plot(ends, slope * ends + intercept, label=line(slope, intercept))
    axes.legend()
    path = folder / "regression.png"
    figure.savefig(path)
    return f"plot: {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}"


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="regression", description="Fit a line to y = 2 x - 1 plus noise.")
    parser.add_argument("--steps", type=int, default=200, help="gradient steps (default: 200)")
    parser.add_argument("--batch-size", type=int, default=128, help="rows over all devices (default: 128)")
    parser.add_argument("--no-plot", dest="plot", action="store_false", help="leave out the PNG")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main(sys.argv[1:], os.environ)
