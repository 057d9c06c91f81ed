"""The leaves of a program's state: their regions by sharding, their bytes, and arrays made of bytes again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from jaxrun.protocol.message_tags import digest
from jaxrun_runtime.state_snapshots.placement import Bounds, Region, volume


def flatten(state: Any, size: int) -> tuple[list[Any], Any, str]:
    """The leaves of the state, its structure for JAX, and a text that is equal for the same structure and types.

    Raises TypeError for a leaf that is not a jax.Array of all `size` ranks, nor describes one.
    """
    paths, treedef = jax.tree_util.tree_flatten_with_path(state)
    facts = []
    for path, leaf in paths:
        name = f"state{jax.tree_util.keystr(path)}"
        if getattr(leaf, "sharding", None) is None:
            raise TypeError(f"{name} must be a jax.Array, not {type(leaf).__name__}; make it one by jax.device_put")
        if leaf.sharding.is_fully_addressable and size > 1:
            raise TypeError(f"{name} is an array of this rank alone; give it a sharding over all, by jax.device_put")
        if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.extended):
            raise TypeError(f"{name} is of type {leaf.dtype}, which has no bytes; give its jax.random.key_data")
        facts.append((name, tuple(leaf.shape), str(leaf.dtype)))
    return [leaf for _, leaf in paths], treedef, digest(repr(facts).encode()).hex()[:16]


def regions(leaves: Sequence[Any]) -> Iterator[tuple[Region, int, list[int]]]:
    """Those of all ranks, how many bytes they have, and which ranks hold them."""
    for number, leaf in enumerate(leaves):
        holders: dict[Bounds, set[int]] = {}
        for device, index in leaf.sharding.devices_indices_map(tuple(leaf.shape)).items():
            holders.setdefault(bounds_of(index, leaf), set()).add(device.process_index)
        for bounds, ranks in sorted(holders.items()):
            yield Region(number, bounds), volume(bounds) * np.dtype(leaf.dtype).itemsize, sorted(ranks)


def to_bytes(data: jax.Array) -> memoryview:
    """The bytes of what one device has; waits for them."""
    return memoryview(np.ascontiguousarray(np.asarray(data)).reshape(-1).view(np.uint8))


def make_array(leaf: Any, load: Callable[[Bounds], NDArray[Any]]) -> jax.Array:
    """An array like `leaf`, of what `load` returns for its regions."""
    if leaf.sharding.is_fully_addressable and not getattr(leaf, "committed", True):  # JAX may move it to other devices
        return jax.numpy.asarray(load(whole_of(leaf)))
    return jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index: load(bounds_of(index, leaf)))


def whole_of(leaf: Any) -> Bounds:
    return tuple((0, length) for length in leaf.shape)


def bounds_of(index: Any, leaf: Any) -> Bounds:
    limits = (axis.indices(length)[:2] for axis, length in zip(index or (), leaf.shape, strict=True))
    return tuple((start, stop) for start, stop in limits)
