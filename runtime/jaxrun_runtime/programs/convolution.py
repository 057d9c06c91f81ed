"""One convolution in eight ways: by vmap, pmap, shard_map and jit, from one device to many processes.

The programs of docs/tutorial.md. Usage: jaxrun [-n N] [-d D] -m jaxrun_runtime.programs.convolution [WAY]. There is one
signal for each device of the job; `vmap`, the default, computes on one device alone.
"""

# mypy: disable-error-code="no-any-return"

from __future__ import annotations

import argparse
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

LENGTH = 5  # of a signal
WINDOW = jnp.array([2.0, 3.0, 4.0])


def convolve(x: jax.Array, window: jax.Array) -> jax.Array:
    """Return the weighted sums of three neighbours: [n] → [n - 2]."""
    return jnp.array([jnp.dot(x[i - 1 : i + 2], window) for i in range(1, len(x) - 1)])


def signals(first: int, count: int) -> jax.Array:
    """Return signals first … first + count - 1 of the job, of shape [count, LENGTH]."""
    start = first * LENGTH
    return jnp.arange(start, start + count * LENGTH, dtype=jnp.float32).reshape(count, LENGTH)


def my_signals() -> jax.Array:
    """Return the signals of this process, one for each of its devices."""
    count = jax.local_device_count()
    return signals(jax.process_index() * count, count)


def by_vmap() -> jax.Array:
    """All signals on one device: vmap makes of a function of one signal a function of many. It is not parallel."""
    return jax.vmap(convolve, in_axes=(0, None))(signals(0, jax.device_count()), WINDOW)


def by_pmap() -> jax.Array:
    """Convolve one signal on each device of this process, all at the same time. Other processes have other signals."""
    return jax.pmap(convolve, in_axes=(0, None))(my_signals(), WINDOW)


def by_stacked_pmap() -> jax.Array:
    """Does the same as by_pmap with one window per device: in_axes=(0, 0) splits both arguments along axis 0."""
    windows = jnp.stack([WINDOW] * jax.local_device_count())
    return jax.pmap(convolve, in_axes=(0, 0))(my_signals(), windows)


def normalized() -> jax.Array:
    """Divide each output by the sum over all devices: psum includes the devices of other processes."""

    def share(x: jax.Array, window: jax.Array) -> jax.Array:
        y = convolve(x, window)
        return y / jax.lax.psum(y, axis_name="signals")

    return jax.pmap(share, axis_name="signals", in_axes=(0, None))(my_signals(), WINDOW)


def share_of_both(x: jax.Array, window: jax.Array) -> jax.Array:
    """Return the output divided by the sum over two named axes; it is called with either of them outside."""
    y = convolve(x, window)
    return y / jax.lax.psum(y, axis_name=("windows", "signals"))


def with_two_axes() -> jax.Array:
    """Two windows for each signal: vmap over the windows of a pmap over the signals, each axis with a name."""
    over_signals = jax.pmap(share_of_both, axis_name="signals", in_axes=(0, None))
    return jax.vmap(over_signals, axis_name="windows", in_axes=(None, 0))(my_signals(), two_windows())


def with_vmap_inside() -> jax.Array:
    """Puts pmap outside vmap, as several processes need: a pmap inside vmap sums over its own process only."""
    over_windows = jax.vmap(share_of_both, axis_name="windows", in_axes=(None, 0))
    return jax.pmap(over_windows, axis_name="signals", in_axes=(0, None))(my_signals(), two_windows())


def two_windows() -> jax.Array:
    return jnp.stack([WINDOW, 2 * WINDOW])


def by_shard_map() -> jax.Array:
    """The normalized output by jax.shard_map, which takes one array over all devices of all processes."""
    mesh, xs = global_signals()

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=(P("signals"), P()), out_specs=P("signals"))
    def share(xs: jax.Array, window: jax.Array) -> jax.Array:
        y = jax.vmap(convolve, in_axes=(0, None))(xs, window)
        return y / jax.lax.psum(y.sum(0), axis_name="signals")

    return share(xs, WINDOW)


def by_jit() -> jax.Array:
    """Do the same without a collective: jit sees the shardings, and XLA adds the communication."""
    _, xs = global_signals()

    @partial(jax.jit, out_shardings=xs.sharding)
    def share(xs: jax.Array, window: jax.Array) -> jax.Array:
        y = jax.vmap(convolve, in_axes=(0, None))(xs, window)
        return y / y.sum(0)

    return share(xs, WINDOW)


def global_signals() -> tuple[Mesh, jax.Array]:
    """Return a mesh of all devices of the job, and the signals as one array over it."""
    mesh = Mesh(np.array(jax.devices()), ("signals",))
    return mesh, jax.make_array_from_process_local_data(NamedSharding(mesh, P("signals")), my_signals())


WAYS = {
    "vmap": by_vmap,
    "pmap": by_pmap,
    "in-axes": by_stacked_pmap,
    "normalized": normalized,
    "two-axes": with_two_axes,
    "vmap-inside": with_vmap_inside,
    "shard-map": by_shard_map,
    "jit": by_jit,
}


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="convolution", description="One convolution in eight ways.")
    parser.add_argument("way", nargs="?", default="vmap", choices=WAYS)
    way = parser.parse_args(arguments).way
    rows = own_rows(WAYS[way]())
    numbers = " ".join(f"{value:g}" for value in np.round(rows[-1], 4))
    print(f"{way}: {len(rows)} outputs here, the last is {numbers}", flush=True)
    if way in ("normalized", "two-axes", "vmap-inside", "shard-map", "jit"):
        total = np.sum(multihost_utils.process_allgather(rows.sum(0)).reshape(-1, LENGTH - 2), 0)
        if jax.process_index() == 0:
            print(f"sum over all processes: {' '.join(f'{value:.4g}' for value in total)}", flush=True)


def own_rows(outputs: jax.Array) -> np.ndarray:
    """Return the outputs that lie on the devices of this process, of shape [outputs, LENGTH - 2], in their order."""
    shards = sorted(outputs.addressable_shards, key=lambda shard: tuple(part.start or 0 for part in shard.index))
    return np.concatenate([np.asarray(shard.data).reshape(-1, LENGTH - 2) for shard in shards])


if __name__ == "__main__":
    main(sys.argv[1:])
