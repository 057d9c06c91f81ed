"""Checks that all devices of the job compute together, with three collectives whose results are known.

Every process checks the results on its own devices. A wrong result ends the process with a sentence and exit status 1.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec


def main() -> None:
    # Not jax.make_mesh: it refuses devices that lie on several hosts.
    mesh = Mesh(np.array(jax.devices()), ("devices",))
    is_main = jax.process_index() == 0
    if is_main:
        print(device_table(jax.devices()), flush=True)

    count = mesh.size
    numbers = np.arange(count)
    check(mesh, "psum of ones", sum_of_ones, np.full(count, count))
    check(mesh, "all_gather", all_numbers, np.tile(numbers, (count, 1)))
    check(mesh, "ppermute ring", partial(number_of_left_neighbour, count), np.roll(numbers, 1))

    if is_main:
        where = f"{count} device(s) in {jax.process_count()} process(es)"
        print(f"psum, all_gather and ppermute are right on {where}", flush=True)


# Each function below runs once per device and returns that device's piece, with a leading axis of length 1.


def sum_of_ones() -> jax.Array:
    total: jax.Array = jax.lax.psum(jnp.ones(1), "devices")
    return total


def all_numbers() -> jax.Array:
    me = jax.lax.axis_index("devices")
    numbers: jax.Array = jax.lax.all_gather(me, "devices")
    return numbers[None]


def number_of_left_neighbour(count: int) -> jax.Array:
    me = jax.lax.axis_index("devices")
    ring = [(device, (device + 1) % count) for device in range(count)]
    received: jax.Array = jax.lax.ppermute(me, "devices", ring)
    return received[None]


def check(mesh: Mesh, name: str, function: Callable[[], jax.Array], expected: np.ndarray) -> None:
    """Run `function` on every device. Exits if the piece on one of this process's devices is not as `expected`."""
    spec = PartitionSpec("devices")
    result = jax.jit(jax.shard_map(function, mesh=mesh, in_specs=(), out_specs=spec))()
    for piece in result.addressable_shards:
        actual, wanted = np.asarray(piece.data), expected[piece.index]
        if not np.array_equal(actual, wanted):
            sys.exit(
                f"selfcheck: {name} gave {actual.tolist()} instead of {wanted.tolist()} on {piece.device} of "
                f"rank {jax.process_index()}: the devices do not compute together. Check that every process "
                "runs the same program with the same versions of JAX."
            )


def device_table(devices: Sequence[jax.Device]) -> str:
    """Return a table with a line for each process: its rank, the number of its devices, and their kind."""
    lines = ["rank  devices  platform  kind"]
    alike = groupby(devices, lambda device: (device.process_index, device.platform, device.device_kind))
    for (rank, platform, kind), group in alike:
        lines.append(f"{rank:>4}  {len(list(group)):>7}  {platform:<8}  {kind}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
