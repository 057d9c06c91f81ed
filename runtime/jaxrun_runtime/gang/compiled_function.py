"""A function of one item, vmapped over chunks of one size and compiled for each local device.

A rank keeps the compiled programs of its last functions: a second map with the same function and shapes compiles
nothing.
"""

from __future__ import annotations

import os
import pickle
import traceback
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from jaxrun.protocol.map_messages import ArraySpec, MapResult, MapTask, NotTraceable, map_leaves
from jaxrun_runtime.lockstep.call_sites import trim_to_user_frames

# The most bytes of a chunk's items and results; and of these with the scratch memory.
_CPU_CHUNK_BYTES = 2**20, 2**20  # a core's cache holds as much
_CHUNK_BYTES = 2**23, 2**26  # on other platforms: a device needs much work to be busy
_MAX_FUNCTIONS = 16  # number of functions that are kept
_NOT_TRACEABLE = (jax.errors.JAXTypeError, jax.errors.NonConcreteBooleanIndexError, jax.errors.UnexpectedTracerError)
_kept: OrderedDict[bytes, CompiledFunction] = OrderedDict()


class CompiledFunction:
    """One function, for items of one shape. Raises NotTraceable, or the function's own error while it is traced.

    specs:   the leaves of an item as JAX takes them (without x64, float64 becomes float32)
    result:  the structure of the function's result for an item
    """

    def __init__(self, task: MapTask) -> None:
        def of_item(mapped: tuple[Any, ...], shared: tuple[Any, ...]) -> Any:
            item = jax.tree.map(lambda number: mapped[number] if number >= 0 else shared[~number], task.template)
            return task.function(*item, **task.static) if task.unpack_items else task.function(item, **task.static)

        def of_chunk(mapped: tuple[Any, ...], shared: tuple[Any, ...]) -> Any:
            return jax.vmap(of_item, (0, None))(mapped, shared)

        self._name = getattr(task.function, "__name__", type(task.function).__name__)
        self._jitted = jax.jit(of_chunk)
        self.specs = tuple(ArraySpec(spec.shape, _canonical(spec.dtype)) for spec in task.specs)
        self._shared = tuple(jax.ShapeDtypeStruct(np.shape(leaf), _canonical(leaf.dtype)) for leaf in task.shared)
        leaves, tree = jax.tree.flatten(self._trace(of_chunk))
        template = map_leaves(_check_leaf, jax.tree.unflatten(tree, range(len(leaves))))
        specs = tuple(ArraySpec(tuple(leaf.shape[1:]), np.dtype(leaf.dtype)) for leaf in leaves)
        self.result = MapResult(template, specs)
        self._programs: dict[int, list[Any]] = {}
        on_cpu = jax.local_devices()[0].platform == "cpu"
        most, self._most_with_scratch = _CPU_CHUNK_BYTES if on_cpu else _CHUNK_BYTES
        self._item_bytes = sum(spec.nbytes for spec in (*self.specs, *specs))
        self._largest = max(1, most // max(1, self._item_bytes))
        self._is_cut = False

    def programs(self, size: int) -> list[Any]:
        """Return the compiled function for chunks of `size` items, for each local device."""
        if size not in self._programs:
            devices = jax.local_devices()
            with ThreadPoolExecutor(len(devices)) as compilers:  # JAX compiles without the interpreter's lock
                self._programs[size] = list(compilers.map(lambda device: self._compile(size, device), devices))
        return self._programs[size]

    def choose_size(self, items: int) -> int:
        """Return the number of items of a chunk if each device has `items`, so that chunks are equally full."""
        size = self._equal_size(items)
        if not self._is_cut:  # once only: some of the scratch memory may not depend on the size
            needed = size * self._item_bytes + _scratch(self.programs(size)[0])
            if needed > self._most_with_scratch:
                self._largest = max(1, size * self._most_with_scratch // needed)
                self._is_cut = True
        return self._equal_size(items)

    def _equal_size(self, items: int) -> int:
        rounds = -(-items // self._largest)
        return min(self._largest, _round_up(-(-items // rounds)))

    def _compile(self, size: int, device: jax.Device) -> Any:
        on_device = SingleDeviceSharding(device)
        mapped, shared = (
            tuple(jax.ShapeDtypeStruct((*more, *leaf.shape), leaf.dtype, sharding=on_device) for leaf in leaves)
            for leaves, more in ((self.specs, (size,)), (self._shared, ()))
        )
        return self._jitted.lower(mapped, shared).compile()

    def _trace(self, of_chunk: Any) -> Any:
        some = tuple(jax.ShapeDtypeStruct((2, *spec.shape), spec.dtype) for spec in self.specs)
        try:
            return jax.eval_shape(of_chunk, some, self._shared)
        except Exception as error:
            if isinstance(error, _NOT_TRACEABLE) or "Tracer" in str(error) or "not a valid JAX type" in str(error):
                raise NotTraceable(_refusal(self._name, error)) from None
            raise


def compiled_function(task: MapTask) -> CompiledFunction:
    """Return the function of `task`, kept or new."""
    shared = [(np.shape(leaf), leaf.dtype.str) for leaf in task.shared]
    key = pickle.dumps((task.key, task.unpack_items, task.template, task.specs, shared))
    found = _kept.pop(key, None) or CompiledFunction(task)
    _kept[key] = found
    if len(_kept) > _MAX_FUNCTIONS:
        _kept.popitem(last=False)
    return found


def _check_leaf(leaf: Any) -> Any:
    """Raise TypeError for a container that the parent does not know, because it has no jax."""
    if not isinstance(leaf, int):
        raise TypeError(
            f"a function that is mapped returns arrays in dicts, lists, tuples or named tuples, but it returned a "
            f"{type(leaf).__name__}; return a dict of its content"
        )
    return leaf


def _canonical(dtype: Any) -> Any:
    return np.dtype(jax.dtypes.canonicalize_dtype(dtype))


def _round_up(number: int) -> int:
    """Round up to a quarter of a power of two: few different sizes to compile, and at most a fifth of padding."""
    step = max(1, (1 << number.bit_length() - 1) // 4)
    return -(-number // step) * step


def _scratch(program: Any) -> int:
    """Return the bytes that a program needs besides arguments and results; 0 if the platform does not say."""
    try:
        return int(program.memory_analysis().temp_size_in_bytes)
    except Exception:  # some platforms have no such analysis
        return 0


def _refusal(name: str, error: Exception) -> str:
    reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    trim_to_user_frames(error)
    frames = traceback.extract_tb(error.__traceback__)
    where = ""
    if frames and os.path.dirname(__file__) not in frames[-1].filename:
        where = "\n  at {0.filename}:{0.lineno} in {0.name}: {0.line}".format(frames[-1])
    return (
        f"JAX cannot trace {name}, so it cannot be compiled: {reason}{where}\n"
        "use jnp and jax.lax there (jnp.where, lax.cond), or run it as plain Python, item by item: jax=False"
    )
