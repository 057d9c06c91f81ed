"""The leaves of a program's state: their regions by sharding, their bytes, and arrays made of bytes again."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from jaxrun.protocol.message_tags import digest
from jaxrun_runtime.state_snapshots.layout import EVERYBODY, Bounds, Region


def flatten(state: Any) -> tuple[list[Any], Any, str]:
    """The leaves of the state, its structure for JAX, and a text that is equal for the same structure and types.

    Raises TypeError for a leaf that is not a jax.Array, nor describes one with its sharding.
    """
    paths, treedef = jax.tree_util.tree_flatten_with_path(state)
    facts = []
    for path, leaf in paths:
        name = f"state{jax.tree_util.keystr(path)}"
        if getattr(leaf, "sharding", None) is None:
            raise TypeError(f"{name} must be a jax.Array, not {type(leaf).__name__}; make it one by jax.device_put")
        if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.extended):
            raise TypeError(f"{name} is of type {leaf.dtype}, which has no bytes; give its jax.random.key_data")
        facts.append((name, tuple(leaf.shape), str(leaf.dtype)))
    return [leaf for _, leaf in paths], treedef, digest(repr(facts).encode()).hex()[:16]


def owner_of(leaf: Any, rank: int, size: int) -> int:
    """EVERYBODY, or this rank if no other one knows of the array."""
    return rank if size > 1 and leaf.sharding.is_fully_addressable else EVERYBODY


def regions(leaves: Sequence[Any], rank: int, size: int) -> Iterator[Region]:
    """Those of all ranks. Of arrays that ranks have for themselves, those of the others are taken to be alike."""
    for number, leaf in enumerate(leaves):
        holders: dict[Bounds, set[int]] = {}
        for device, index in leaf.sharding.devices_indices_map(tuple(leaf.shape)).items():
            holders.setdefault(_bounds(index, leaf.shape), set()).add(device.process_index)
        for turn, (bounds, ranks) in enumerate(sorted(holders.items()), number):
            nbytes = _item_bytes(leaf) * math.prod(stop - start for start, stop in bounds)
            if owner_of(leaf, rank, size) == EVERYBODY:
                yield Region(number, EVERYBODY, bounds, nbytes, turn, tuple(sorted(ranks)))
            else:
                yield from (Region(number, owner, bounds, nbytes, turn, (owner,)) for owner in range(size))


def local_bounds(leaf: Any) -> list[Bounds]:
    """The regions that the devices of this process have of an array."""
    indices = leaf.sharding.addressable_devices_indices_map(tuple(leaf.shape)).values()
    return sorted({_bounds(index, leaf.shape) for index in indices})


def local_data(leaf: jax.Array) -> dict[Bounds, jax.Array]:
    """The data of these regions."""
    return {_bounds(shard.index, leaf.shape): shard.data for shard in leaf.addressable_shards}


def to_bytes(data: jax.Array) -> memoryview:
    """The bytes of what one device has; waits for them."""
    return memoryview(np.ascontiguousarray(np.asarray(data)).reshape(-1).view(np.uint8))


def from_bytes(data: bytes | bytearray | memoryview, leaf: Any, bounds: Bounds) -> NDArray[Any]:
    return np.frombuffer(data, np.dtype(leaf.dtype)).reshape([stop - start for start, stop in bounds])


def make_array(leaf: Any, load: Callable[[Bounds], NDArray[Any]]) -> jax.Array:
    """An array like `leaf`, of what `load` returns for its regions."""
    shape, sharding = tuple(leaf.shape), leaf.sharding
    by_device = {device: _bounds(index, shape) for device, index in local_devices(leaf)}
    loaded = {bounds: load(bounds) for bounds in local_bounds(leaf)}
    if sharding.is_fully_addressable and not getattr(leaf, "committed", True):  # JAX may move it to other devices
        return jax.numpy.asarray(loaded[next(iter(by_device.values()))])
    arrays = [
        jax.device_put(loaded[bounds], jax.sharding.SingleDeviceSharding(device, memory_kind=sharding.memory_kind))
        for device, bounds in by_device.items()
    ]
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


def local_devices(leaf: Any) -> Any:
    return leaf.sharding.addressable_devices_indices_map(tuple(leaf.shape)).items()


def _item_bytes(leaf: Any) -> int:
    return int(np.dtype(leaf.dtype).itemsize)


def _bounds(index: Any, shape: Sequence[int]) -> Bounds:
    limits = (axis.indices(length)[:2] for axis, length in zip(index or (), shape, strict=True))
    return tuple((start, stop) for start, stop in limits)
