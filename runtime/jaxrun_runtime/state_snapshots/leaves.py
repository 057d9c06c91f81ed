"""The leaves of a program's state: their facts, their regions, their bytes, and how leaves are made from bytes.

The regions of an array over all ranks follow from its sharding. A value on the host, or an array on devices of this
rank only, must be equal on all ranks, and is kept like an array that is replicated on all of them.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from jaxrun_runtime.state_snapshots import structure
from jaxrun_runtime.state_snapshots.placement import Bounds, Region, volume
from jaxrun_runtime.state_snapshots.structure import ARRAY, KEY, NUMBERS, NUMPY, NUMPY_SCALAR, LeafFacts

_MAX_DIMENSIONS = 64  # of an array of numpy
_WEAK_ZEROS: Mapping[str, complex] = {"i": 0, "f": 0.0, "c": 0j}
_UNKNOWN = "make it a jax.Array, a numpy array or a Python number, or leave it out"


class StateLeaves(Struct, frozen=True, dict=True):  # for the cached property
    """The leaves of a state.

    leaves:   the leaves that can be kept, with their facts
    treedef:  JAX's structure of the state
    wrong:    a line for each leaf that cannot be kept
    """

    leaves: Sequence[tuple[LeafFacts, Any]]
    treedef: Any
    wrong: Sequence[str]

    @functools.cached_property
    def facts(self) -> Sequence[LeafFacts]:
        return [facts for facts, _ in self.leaves]


def examine(state: Any, *, has_values: bool) -> StateLeaves:
    """Flatten the state. Without `has_values`, it may have jax.ShapeDtypeStructs instead of arrays."""
    paths, treedef = jax.tree_util.tree_flatten_with_path(state)
    leaves, wrong = [], []
    for path, leaf in paths:
        name = f"state{jax.tree_util.keystr(path)}"
        facts = _facts(name, leaf, has_values)
        if isinstance(facts, str):
            wrong.append(f"{name} {facts}")
        else:
            leaves.append((facts, leaf))
    return StateLeaves(leaves, treedef, wrong)


def _facts(name: str, leaf: Any, has_values: bool) -> LeafFacts | str:
    """Return the facts of the leaf, or a text that says why it cannot be kept."""
    kind = type(leaf)
    if NUMBERS.get(kind.__name__) is kind:
        return LeafFacts(name, kind.__name__)
    if kind in (np.ndarray, np.memmap) or isinstance(leaf, np.generic):
        text = structure.dtype_text(leaf.dtype)
        form = NUMPY_SCALAR if isinstance(leaf, np.generic) else NUMPY
        return LeafFacts(name, form, leaf.shape, text) if text else f"is of type {leaf.dtype}, which has no bytes"
    if not isinstance(leaf, jax.Array) and (has_values or not hasattr(leaf, "dtype") or not hasattr(leaf, "shape")):
        return f"is of type {kind.__name__}; {_UNKNOWN}"
    if has_values and isinstance(leaf, jax.core.Tracer):
        return "has no value yet: this is within a function that JAX traces; call it outside of that"
    if has_values and leaf.is_deleted():
        return "was given away (donated) or deleted; pass what the step has returned"
    if len(leaf.shape) > _MAX_DIMENSIONS:
        return f"has {len(leaf.shape)} dimensions; numpy has {_MAX_DIMENSIONS} at most"
    return _facts_of_array(name, leaf)


def _facts_of_array(name: str, leaf: Any) -> LeafFacts | str:
    weak_type = bool(getattr(leaf, "weak_type", False))
    if not jax.numpy.issubdtype(leaf.dtype, jax.dtypes.extended):
        return LeafFacts(name, ARRAY, tuple(leaf.shape), structure.dtype_text(np.dtype(leaf.dtype)), "", weak_type)
    if not jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return f"is of type {leaf.dtype}, which has no bytes"
    impl = jax.random.key_impl(leaf) if isinstance(leaf, jax.Array) else ""
    if not isinstance(impl, str):
        return "is a key of an implementation without a name; register it, or keep its jax.random.key_data"
    return LeafFacts(name, KEY, tuple(leaf.shape), str(leaf.dtype), impl)


# ---- where a leaf is


def is_of_all(leaf: Any, size: int) -> bool:
    """Whether the leaf is one array over all ranks; otherwise each rank has its own value."""
    return isinstance(leaf, jax.Array) and (size == 1 or not leaf.is_fully_addressable)


def is_in_a_file(facts: LeafFacts) -> bool:
    return facts.kind not in NUMBERS


def regions(state: StateLeaves, size: int) -> Iterator[tuple[Region, int, list[int]]]:
    """Yield the regions of all ranks, with their number of bytes and the ranks that hold them."""
    for number, (facts, leaf) in enumerate(state.leaves):
        if not is_in_a_file(facts):
            continue
        if not is_of_all(leaf, size):
            yield Region(number, whole_of(facts)), volume(whole_of(facts)) * item_bytes(facts), [*range(size)]
            continue
        holders: dict[Bounds, set[int]] = {}
        for device, index in leaf.sharding.devices_indices_map(facts.shape).items():
            holders.setdefault(bounds_of(index, facts), set()).add(device.process_index)
        for bounds, ranks in sorted(holders.items()):
            yield Region(number, bounds), volume(bounds) * item_bytes(facts), sorted(ranks)


def values(state: StateLeaves, size: int) -> dict[Region, Any]:
    """Return the values that this rank holds, by region."""
    found = {}
    for number, (facts, leaf) in enumerate(state.leaves):
        if is_in_a_file(facts) and not is_of_all(leaf, size):
            found[Region(number, whole_of(facts))] = leaf
        elif is_in_a_file(facts) and leaf.sharding.addressable_devices:
            if leaf.is_fully_replicated:  # JAX 0.12.0: no addressable_shards if device_put made the array
                found[Region(number, whole_of(facts))] = leaf.addressable_data(0)
                continue
            indices = leaf.sharding.addressable_devices_indices_map(facts.shape)  # a shard of keys has one more axis
            for shard in leaf.addressable_shards:
                found[Region(number, bounds_of(indices[shard.device], facts))] = shard.data
    return found


def own_values(state: StateLeaves, size: int) -> dict[str, str | int]:
    """Return a checksum or text of each value that must be equal on all ranks, by name."""
    found: dict[str, str | int] = {}
    for facts, leaf in state.leaves:
        if not is_in_a_file(facts):
            found[facts.name] = structure.number_text(leaf)
        elif not is_of_all(leaf, size):
            found[facts.name] = zlib.crc32(to_bytes(leaf))
    return found


def numbers(state: StateLeaves) -> dict[int, str]:
    """Return the Python numbers as text, by the leaf's number."""
    found = enumerate(state.leaves)
    return {n: structure.number_text(leaf) for n, (facts, leaf) in found if not is_in_a_file(facts)}


# ---- bytes


def to_bytes(value: Any) -> memoryview:
    """Return the bytes of an array. Waits until they are computed and copied."""
    if isinstance(value, jax.Array) and jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    return np.ascontiguousarray(np.asarray(value)).reshape(-1).view(np.uint8).data


def copy_to_host(value: Any) -> None:
    """Begin to copy an array from its device."""
    if isinstance(value, jax.Array) and not jax.numpy.issubdtype(value.dtype, jax.dtypes.extended):
        value.copy_to_host_async()


def item_type(facts: LeafFacts) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Return the type and shape in which each item is kept. A key is kept as the words of its data."""
    if facts.kind != KEY:
        return np.dtype(facts.dtype), ()
    return _key_type(facts.key_impl)


def item_bytes(facts: LeafFacts) -> int:
    dtype, shape = item_type(facts)
    return dtype.itemsize * volume(tuple((0, length) for length in shape))


@functools.cache
def _key_type(impl: str) -> tuple[np.dtype[Any], tuple[int, ...]]:
    words = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=impl)))
    return np.dtype(words.dtype), tuple(words.shape)


# ---- leaves from bytes


def make_leaf(facts: LeafFacts, like: Any, load: Callable[[Bounds], NDArray[Any]]) -> Any:
    """Make the leaf from its regions, which `load` returns. Arrays get the sharding of `like`, and no weak type yet."""
    whole = whole_of(facts)
    if facts.kind in (NUMPY, NUMPY_SCALAR):
        array = _in_type_of(like, load(whole))
        return array if facts.kind == NUMPY else array[()]

    def piece(bounds: Bounds) -> Any:
        data = load(bounds)
        return jax.random.wrap_key_data(jax.numpy.asarray(data), impl=facts.key_impl) if facts.kind == KEY else data

    if (sharding := _sharding(like)) is None:
        return jax.numpy.asarray(piece(whole))
    # JAX needs the type only if this rank has no part of the array.
    more = {} if sharding.addressable_devices else {"dtype": _dtype_in_jax(facts)}
    return jax.make_array_from_callback(facts.shape, sharding, lambda index: piece(bounds_of(index, facts)), **more)


def _in_type_of(like: Any, array: NDArray[Any]) -> NDArray[Any]:
    """Return the array of numpy in the type of the jax.Array that `like` has: float32 for float64, as JAX makes it."""
    is_of_jax = hasattr(like, "dtype") and not isinstance(like, (np.ndarray, np.generic))
    if not is_of_jax or array.dtype.newbyteorder("=") == like.dtype:
        return array
    return array.astype(like.dtype)


def _dtype_in_jax(facts: LeafFacts) -> Any:
    if facts.kind != KEY:
        return np.dtype(facts.dtype)
    return jax.eval_shape(lambda: jax.random.key(0, impl=facts.key_impl)).dtype


def make_weak(facts: LeafFacts, like: Any, array: Any) -> Any:
    """Return the array with its weak type. All ranks must call this: it runs a program on the array's devices."""
    kind = np.dtype(facts.dtype).kind if facts.weak_type else ""
    if kind not in _WEAK_ZEROS or jax.numpy.asarray(_WEAK_ZEROS[kind]).dtype != array.dtype:
        return array

    def write_into_weak(array: jax.Array) -> jax.Array:
        return jax.numpy.broadcast_to(jax.numpy.asarray(_WEAK_ZEROS[kind]), array.shape).at[...].set(array)

    if (sharding := _sharding(like)) is None:
        return write_into_weak(array)
    return jax.jit(write_into_weak, out_shardings=sharding)(array)


def _sharding(like: Any) -> Any:
    """Return the sharding of `like`; None if JAX may choose, because it may move the array later."""
    sharding = getattr(like, "sharding", None)
    if sharding is None or (sharding.is_fully_addressable and not getattr(like, "committed", True)):
        return None
    return sharding


def whole_of(facts: LeafFacts) -> Bounds:
    return tuple((0, length) for length in facts.shape)


def bounds_of(index: Any, facts: LeafFacts) -> Bounds:
    limits = (axis.indices(length)[:2] for axis, length in zip(index or (), facts.shape, strict=True))
    return tuple((start, stop) for start, stop in limits)
