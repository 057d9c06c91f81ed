"""One function, written for one device, evaluated over the devices of all processes with jax.shard_map.

The examples are those of JAX's guide "Parallel Evaluation", which uses pmap. Each result is compared with
jax.vmap on one device; a difference ends the program with a sentence and exit status 1.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

ROWS_PER_DEVICE = 2
SPLIT = PartitionSpec("p")  # the rows are divided among the devices
WHOLE = PartitionSpec()  # every device has all of it

OfTwoArrays = Callable[[jax.Array, jax.Array], jax.Array]


def convolve(w: jax.Array, x: jax.Array) -> jax.Array:
    """Slide the window w, of shape [3], over x, of shape [n]; the result has shape [n - 2]."""
    return w[0] * x[:-2] + w[1] * x[1:-1] + w[2] * x[2:]


def normalized_convolve(w: jax.Array, x: jax.Array) -> jax.Array:
    """Convolve, then divide by the sum over all rows, wherever they are: "p" names the devices' axis."""
    output = convolve(w, x)
    total: jax.Array = jax.lax.psum(output, "p")
    return output / total


def main() -> None:
    # Not jax.make_mesh: it refuses devices that lie on several hosts.
    mesh = Mesh(np.array(jax.devices()), ("p",))
    n = mesh.size
    w = jnp.array([2.0, 3.0, 4.0])
    xs = jnp.arange(5.0 * n).reshape(n, 5)  # a row for each device
    ws = jnp.stack([w + row for row in range(n)])

    result = on_each_device(convolve, mesh)(put(mesh, ws), put(mesh, xs))
    check("convolution", result, jax.vmap(convolve)(ws, xs))

    # The output stays on the devices that computed it, so a second application moves no data.
    again = on_each_device(convolve, mesh)(put(mesh, ws), result)
    check("convolution of the sharded output", again, jax.vmap(convolve)(ws, jax.vmap(convolve)(ws, xs)))

    broadcast = on_each_device(convolve, mesh, w_spec=WHOLE)(put(mesh, w, WHOLE), put(mesh, xs))
    check("one window for all rows (in_axes)", broadcast, jax.vmap(convolve, in_axes=(None, 0))(w, xs))

    normalized = on_each_device(normalized_convolve, mesh)(put(mesh, ws), put(mesh, xs))
    check("normalised convolution (psum)", normalized, jax.vmap(normalized_convolve, axis_name="p")(ws, xs))

    # More rows than devices: shard_map divides them among the devices, vmap goes over those of one device.
    rows = ROWS_PER_DEVICE * n
    many = jnp.arange(5.0 * rows).reshape(rows, 5)
    inner = jax.vmap(convolve, in_axes=(None, 0))
    outer = jax.jit(jax.shard_map(inner, mesh=mesh, in_specs=(WHOLE, SPLIT), out_specs=SPLIT))
    nested = outer(put(mesh, w, WHOLE), put(mesh, many))
    check(f"vmap of {ROWS_PER_DEVICE} rows in each device", nested, inner(w, many))

    print_once(f"all equal to vmap on one device: {n} device(s) in {jax.process_count()} process(es)")


def on_each_device(function: OfTwoArrays, mesh: Mesh, w_spec: PartitionSpec = SPLIT) -> OfTwoArrays:
    """The equivalent of pmap: each device calls `function` with its row of x, and its row of w or the whole of w."""

    def one_row(w: jax.Array, x: jax.Array) -> jax.Array:
        # shard_map passes a block of rows, here of length 1; pmap would remove that axis.
        return function(w if w_spec == WHOLE else w[0], x[0])[None]

    return jax.jit(jax.shard_map(one_row, mesh=mesh, in_specs=(w_spec, SPLIT), out_specs=SPLIT))


def put(mesh: Mesh, array: jax.Array, spec: PartitionSpec = SPLIT) -> jax.Array:
    """Distribute `array`, which every process has, over the mesh; each process copies only its devices' part."""
    return jax.make_array_from_callback(array.shape, NamedSharding(mesh, spec), np.asarray(array).__getitem__)


def check(name: str, result: jax.Array, on_one_device: jax.Array) -> None:
    """Exit if the part of `result` on one of our devices differs from what vmap computed."""
    expected = np.asarray(on_one_device)
    for piece in result.addressable_shards:
        actual, wanted = np.asarray(piece.data), expected[piece.index]
        if not np.allclose(actual, wanted, rtol=1e-5):
            sys.exit(
                f"parallel_eval: {name} gave {actual.tolist()} on {piece.device} of rank "
                f"{jax.process_index()}, but vmap on one device gives {wanted.tolist()}. Check that every "
                "process runs the same program."
            )
    print_once(f"{name:<34} {result.shape} equals vmap")


def print_once(line: str) -> None:
    if jax.process_index() == 0:
        print(line, flush=True)


if __name__ == "__main__":
    main()
