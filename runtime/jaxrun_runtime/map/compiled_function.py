"""A function of one item, vmapped over whole chunks and compiled for each local device.

A rank keeps what it has compiled for the last functions, by their pickles: a second map with the same function and the
same shapes compiles nothing.
"""

from __future__ import annotations

import os
import pickle
import time
import traceback
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from jaxrun.protocol.map_messages import ArraySpec, CannotTrace, StartMap
from jaxrun_runtime.lockstep.call_sites import trim_to_user_frames
from jaxrun_runtime.map.chunk_sizes import ChunkSizer

_MAX_CHUNK_BYTES = 2**23  # of its items, and of its results
_MAX_SCRATCH_BYTES = 2**26  # that a chunk may need besides, on its device
_MAX_FUNCTIONS = 16  # that are kept
_NOT_TRACEABLE = (jax.errors.JAXTypeError, jax.errors.NonConcreteBooleanIndexError, jax.errors.UnexpectedTracerError)
_kept: OrderedDict[bytes, CompiledFunction] = OrderedDict()


class TracingFailed(Exception):
    """JAX cannot trace the function; `refused` is the answer to the parent."""

    def __init__(self, refused: CannotTrace) -> None:
        super().__init__(refused.reason)
        self.refused = refused


class CompiledFunction:
    """One function, for items of one shape. Raises TracingFailed, or what the function raises while it is traced.

    inputs:            the leaves of an item as JAX takes them (without x64, float64 becomes float32)
    template, results: what the function returns for an item
    """

    def __init__(self, task: StartMap) -> None:
        function, static = pickle.loads(task.code)

        def of_item(mapped: tuple[Any, ...], whole: tuple[Any, ...]) -> Any:
            item = jax.tree.map(lambda number: (*mapped, *whole)[number], task.template)
            return function(*item, **static) if task.unpack_items else function(item, **static)

        def of_chunk(mapped: tuple[Any, ...], whole: tuple[Any, ...]) -> Any:
            return jax.vmap(of_item, (0, None))(mapped, whole)

        self._jitted = jax.jit(of_chunk)
        self.inputs = tuple(ArraySpec(spec.shape, _canonical(spec.dtype)) for spec in task.item_specs)
        self._whole = tuple(jax.ShapeDtypeStruct(np.shape(leaf), _canonical(leaf.dtype)) for leaf in task.shared_leaves)
        leaves, tree = jax.tree.flatten(self._trace(of_chunk))
        self.template = _checked(jax.tree.unflatten(tree, range(len(leaves))))
        self.results = tuple(ArraySpec(tuple(leaf.shape[1:]), np.dtype(leaf.dtype)) for leaf in leaves)
        self._compiled: dict[int, list[Any]] = {}
        widest = max((sum(spec.nbytes for spec in specs) for specs in (self.inputs, self.results)), default=1)
        self.sizes = ChunkSizer(most=max(1, _MAX_CHUNK_BYTES // max(1, widest)))

    def programs(self, size: int) -> list[Any]:
        """Return the compiled function for chunks of `size` items, for each local device."""
        if size not in self._compiled:
            began = time.perf_counter()
            devices = jax.local_devices()
            with ThreadPoolExecutor(len(devices)) as compilers:  # JAX compiles without the interpreter's lock
                self._compiled[size] = list(compilers.map(lambda device: self._compile(size, device), devices))
            self.sizes.compile_seconds = time.perf_counter() - began
            self.sizes.compiled.add(size)
        return self._compiled[size]

    def limit_by_memory(self, size: int) -> int:
        """Return `size`, or as many items as a device has scratch memory for."""
        scratch = _scratch(self.programs(size)[0])
        self.sizes.most = max(1, min(self.sizes.most, size * _MAX_SCRATCH_BYTES // max(scratch, 1)))
        return min(size, self.sizes.most)

    def _compile(self, size: int, device: jax.Device) -> Any:
        on_device = SingleDeviceSharding(device)
        mapped, whole = (
            tuple(jax.ShapeDtypeStruct((*more, *leaf.shape), leaf.dtype, sharding=on_device) for leaf in leaves)
            for leaves, more in ((self.inputs, (size,)), (self._whole, ()))
        )
        return self._jitted.lower(mapped, whole).compile()

    def _trace(self, of_chunk: Any) -> Any:
        some = tuple(jax.ShapeDtypeStruct((2, *spec.shape), spec.dtype) for spec in self.inputs)
        try:
            return jax.eval_shape(of_chunk, some, self._whole)
        except Exception as error:
            if isinstance(error, _NOT_TRACEABLE) or "Tracer" in str(error) or "not a valid JAX type" in str(error):
                raise TracingFailed(CannotTrace(_reason(error), _where(error))) from error
            raise


def cached_function(task: StartMap) -> CompiledFunction:
    """Return the function of `task`, kept or new."""
    whole = [(np.shape(leaf), leaf.dtype.str) for leaf in task.shared_leaves]
    key = pickle.dumps((task.code, task.unpack_items, task.template, task.item_specs, whole))
    found = _kept.pop(key, None) or CompiledFunction(task)
    _kept[key] = found
    if len(_kept) > _MAX_FUNCTIONS:
        _kept.popitem(last=False)
    return found


def _checked(template: Any) -> Any:
    """Return `template`. Raises TypeError if the parent, which has no jax, could not rebuild the tree."""
    if isinstance(template, (dict, list, tuple)):
        for part in template.values() if isinstance(template, dict) else template:
            _checked(part)
    elif not isinstance(template, (int, type(None))):
        raise TypeError(
            f"a function that is mapped returns arrays in dicts, lists, tuples or named tuples, but there is a "
            f"{type(template).__name__}; return a dict of what is in it"
        )
    return template


def _canonical(dtype: Any) -> Any:
    return np.dtype(jax.dtypes.canonicalize_dtype(dtype))


def _scratch(program: Any) -> int:
    """Return the bytes that a program needs besides arguments and results; 0 if the platform does not say."""
    try:
        return int(program.memory_analysis().temp_size_in_bytes)
    except Exception:  # some platforms have no such analysis
        return 0


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def _where(error: Exception) -> str:
    trim_to_user_frames(error)
    frames = traceback.extract_tb(error.__traceback__)
    if not frames or os.path.dirname(__file__) in frames[-1].filename:
        return ""
    last = frames[-1]
    return f"{last.filename}:{last.lineno} in {last.name}: {last.line}"
