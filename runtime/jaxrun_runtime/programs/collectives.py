"""Times psum, all_gather and ppermute over all devices of the job, for several sizes; prints JSON, for jaxrun doctor.

A size is the size in bytes of the array that each device has at the end. A bandwidth is the least number of bytes that
each device must send, divided by the time of the slowest process, so that it can be compared with the bandwidth of a
connection. With n devices, each sends 2 (n - 1) / n of the size for psum, (n - 1) / n for all_gather, and all of it for
ppermute.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from msgspec import Struct
from msgspec.structs import asdict

_SIZES = (2**12, 2**20, 2**23)  # bytes, rounded up to a multiple of the number of devices
_SECONDS = 0.1  # for one collective of one size, without its first call
_MOST_CALLS = 20
_SLOW_S = 0.25  # a call that takes longer is not repeated, and no larger size is tried


class Timing(Struct, frozen=True):
    """One collective of one size: the median of several calls, in seconds; and each device's bandwidth."""

    collective: str
    size: int
    seconds: float
    bytes_per_s: float


Collective = Callable[[jax.Array], jax.Array]


def collectives(devices: int) -> dict[str, tuple[Collective, float]]:
    """Return the collectives by name, each with the share of the size that a device sends."""
    ring = [(device, (device + 1) % devices) for device in range(devices)]
    return {
        "psum": (lambda x: jax.lax.psum(x, "devices"), 2 * (devices - 1) / devices),
        "all_gather": (lambda x: jax.lax.all_gather(x, "devices", tiled=True), (devices - 1) / devices),
        "ppermute": (partial(jax.lax.ppermute, axis_name="devices", perm=ring), 1),
    }


def measure(mesh: Mesh, name: str, size: int) -> Timing:
    """Time one collective. All processes must call this at the same time."""
    function, sent = collectives(mesh.size)[name]
    spec = PartitionSpec("devices")
    step = jax.jit(jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec))
    size = -(-size // (4 * mesh.size)) * 4 * mesh.size
    own = np.ones(size // 4 // (mesh.size if name == "all_gather" else 1), np.float32)
    array = jax.make_array_from_callback((mesh.size * own.size,), NamedSharding(mesh, spec), lambda index: own)
    step(array).block_until_ready()
    taken = _slowest(mesh, _time(step, array))
    if taken <= _SLOW_S:
        calls = int(np.clip(_SECONDS / taken, 2, _MOST_CALLS))  # equal in all processes, or some would wait forever
        taken = _slowest(mesh, statistics.median(_time(step, array) for _ in range(calls)))
    return Timing(name, size, taken, sent * size / taken)


def _time(step: Collective, array: jax.Array) -> float:
    began = time.perf_counter()
    step(array).block_until_ready()
    return time.perf_counter() - began


def _slowest(mesh: Mesh, seconds: float) -> float:
    """Return the longest of the processes' times."""
    spec = PartitionSpec("devices")
    own = jax.make_array_from_callback(
        (mesh.size,), NamedSharding(mesh, spec), lambda index: np.full(1, seconds, np.float32)
    )
    return float(jax.jit(jnp.max, out_shardings=NamedSharding(mesh, PartitionSpec()))(own))


def main() -> None:
    # Not jax.make_mesh: it refuses devices that lie on several hosts.
    mesh = Mesh(np.array(jax.devices()), ("devices",))
    timings: list[Timing] = []
    for name in collectives(mesh.size) if mesh.size > 1 else ():  # one device sends nothing
        for size in _SIZES:
            timings.append(measure(mesh, name, size))
            if timings[-1].seconds > _SLOW_S:
                break
    if jax.process_index() == 0:
        content = {"devices": mesh.size, "timings": [asdict(timing) for timing in timings]}
        print(json.dumps(content), flush=True)


if __name__ == "__main__":
    main()
