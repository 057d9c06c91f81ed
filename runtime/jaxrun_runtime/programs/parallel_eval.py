"""One function, written for one device, evaluated over the devices of all processes with jax.shard_map.

The examples are those of JAX's guide "Parallel Evaluation", which uses pmap. Each result is compared with jax.vmap on
one device; a difference ends the program with a sentence and exit status 1.
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


def convolve(w: jax.Array, x: jax.Array) -> jax.Array:
    """Slide the window w, of shape [3], over x, of shape [n]; the result has shape [n - 2]."""
    return jnp.stack([x[:-2], x[1:-1], x[2:]], axis=-1) @ w


def normalized_convolve(w: jax.Array, x: jax.Array) -> jax.Array:
    """Convolve, then divide by the sum over all rows, wherever they are: "p" names the devices' axis."""
    output = convolve(w, x)
    return output / jax.lax.psum(output, "p")


def main() -> None:
    # Not jax.make_mesh: it refuses devices that lie on several hosts.
    mesh = Mesh(np.array(jax.devices()), ("p",))
    n = mesh.size
    w = np.array([2.0, 3.0, 4.0], np.float32)
    xs = np.arange(5 * n, dtype=np.float32).reshape(n, 5)  # a row for each device
    ws = np.stack([w + row for row in range(n)])

    result = on_each_device(convolve, mesh, (SPLIT, SPLIT))(put(mesh, ws), put(mesh, xs))
    check("convolution", result, jax.vmap(convolve)(ws, xs))

    # The output lies where it was computed, so a second application moves no data.
    again = on_each_device(convolve, mesh, (SPLIT, SPLIT))(put(mesh, ws), result)
    check("convolution of the sharded output", again, jax.vmap(convolve)(ws, jax.vmap(convolve)(ws, xs)))

    broadcast = on_each_device(convolve, mesh, (WHOLE, SPLIT))(put(mesh, w, WHOLE), put(mesh, xs))
    check("one window for all rows (in_axes)", broadcast, jax.vmap(convolve, in_axes=(None, 0))(w, xs))

    normalized = on_each_device(normalized_convolve, mesh, (SPLIT, SPLIT))(put(mesh, ws), put(mesh, xs))
    check("normalised convolution (psum)", normalized, jax.vmap(normalized_convolve, axis_name="p")(ws, xs))

    # More rows than devices: shard_map divides them among the devices, vmap goes over those of one device.
    rows = ROWS_PER_DEVICE * n
    many = np.arange(5 * rows, dtype=np.float32).reshape(rows, 5)
    inner = jax.vmap(convolve, in_axes=(None, 0))
    nested = jax.jit(jax.shard_map(inner, mesh=mesh, in_specs=(WHOLE, SPLIT), out_specs=SPLIT))
    check(f"vmap of {ROWS_PER_DEVICE} rows in each device", nested(put(mesh, w, WHOLE), put(mesh, many)), inner(w, many))

    say(f"all equal to vmap on one device: {n} device(s) in {jax.process_count()} process(es)")


def on_each_device(
    function: Callable[[jax.Array, jax.Array], jax.Array], mesh: Mesh, in_specs: tuple[PartitionSpec, PartitionSpec]
) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """What pmap does: each device calls `function` with its row of what is split, and the whole of the rest."""

    def one_row(w: jax.Array, x: jax.Array) -> jax.Array:
        # shard_map hands over a block of rows, here of length 1; pmap would have removed that axis.
        w, x = (block[0] if spec == SPLIT else block for block, spec in zip((w, x), in_specs, strict=True))
        return function(w, x)[None]

    return jax.jit(jax.shard_map(one_row, mesh=mesh, in_specs=in_specs, out_specs=SPLIT))


def put(mesh: Mesh, array: np.ndarray, spec: PartitionSpec = SPLIT) -> jax.Array:
    """The global array whose value every process knows; each process copies only what its devices hold."""
    return jax.make_array_from_callback(array.shape, NamedSharding(mesh, spec), array.__getitem__)


def check(name: str, result: jax.Array, on_one_device: jax.Array) -> None:
    """Exit if the part of `result` on one of our devices differs from what vmap computed."""
    expected = np.asarray(on_one_device)
    for piece in result.addressable_shards:
        actual, wanted = np.asarray(piece.data), expected[piece.index]
        if not np.allclose(actual, wanted, rtol=1e-5):
            sys.exit(
                f"parallel_eval: {name} gave {actual.tolist()} on {piece.device} of rank {jax.process_index()}, but "
                f"vmap on one device gives {wanted.tolist()}. Check that every process runs the same program."
            )
    say(f"{name:<34} {result.shape} equals vmap")


def say(line: str) -> None:
    if jax.process_index() == 0:
        print(line, flush=True)


if __name__ == "__main__":
    main()
