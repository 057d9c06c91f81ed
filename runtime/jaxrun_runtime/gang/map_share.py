"""A rank's share of a map, on its devices or in plain Python.

For devices, each part that arrives is cut into chunks of one size. Chunks go to the local devices in turn. The results
of a part are collected once the chunks of the next part are dispatched, so that the devices compute while items and
results are copied.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrun.errors import add_note
from jaxrun.protocol.map_messages import PARTS_AHEAD, ArraySpec, MapResult, MapTask, Part
from jaxrun.protocol.payload import make_memory_file
from jaxrun_runtime.gang import calls
from jaxrun_runtime.gang.calls import CallerConnection
from jaxrun_runtime.gang.compiled_function import CompiledFunction, compiled_function

_CHUNKS_PER_DEVICE = 4  # the most that are dispatched and not collected


def serve_on_devices(task: MapTask) -> MapResult:
    """Map the parts that the parent sends until it sends None. The gang calls this on every rank."""
    call = calls.current_call()
    function = compiled_function(task)
    share = _Share(call, task, function)
    while (part := call.receive()) is not None:
        share.start(part)
    share.finish()
    return function.result


class _RunningChunk(NamedTuple):
    """A chunk that a device computes.

    part:     number of the first item of its part
    items:    number of items in the chunk
    is_last:  whether it is the last chunk of its part
    """

    part: int
    items: int
    is_last: bool
    results: tuple[jax.Array, ...]


class _Share:
    def __init__(self, call: CallerConnection, task: MapTask, function: CompiledFunction) -> None:
        self._call, self._task, self._function = call, task, function
        self._devices = jax.local_devices()
        self._shared = [jax.device_put(task.shared, device) for device in self._devices]
        self._size = 0  # of a chunk
        self._started = 0
        self._running: deque[_RunningChunk] = deque()
        self._files = itertools.cycle([make_memory_file() for _ in range(PARTS_AHEAD)])
        self._collected: list[tuple[Any, ...]] = []

    def start(self, part: Part) -> None:
        """Dispatch the chunks of a part, and send the results of earlier parts."""
        if not self._size:
            share = -(-self._task.part_size // len(self._devices))
            self._size = self._task.chunk_size or self._function.choose_size(share)
        leaves = [_as_type(leaf, spec) for leaf, spec in zip(part.content, self._function.specs, strict=True)]
        count = len(leaves[0])
        for begin in range(0, count, self._size):
            end = min(begin + self._size, count)
            results = self._dispatch([leaf[begin:end] for leaf in leaves])
            self._running.append(_RunningChunk(part.start, end - begin, end == count, results))
            if len(self._running) > _CHUNKS_PER_DEVICE * len(self._devices):
                self._collect()
        while self._running[0].part != part.start:
            self._collect()

    def finish(self) -> None:
        while self._running:
            self._collect()

    def _dispatch(self, leaves: list[Any]) -> tuple[jax.Array, ...]:
        number = self._started % len(self._devices)
        self._started += 1
        if missing := self._size - len(leaves[0]):  # fill with the last item: the function may fail on other values
            leaves = [np.concatenate([leaf, np.repeat(leaf[-1:], missing, axis=0)]) for leaf in leaves]
        program = self._function.programs(self._size)[number]
        results = program(jax.device_put(tuple(leaves), self._devices[number]), self._shared[number])
        for result in (found := tuple(jax.tree.leaves(results))):
            result.copy_to_host_async()
        return found

    def _collect(self) -> None:
        """Wait for the oldest chunk. If it is the last of its part, send the results of the part."""
        chunk = self._running.popleft()
        self._collected.append(tuple(np.asarray(result)[: chunk.items] for result in chunk.results))
        if chunk.is_last:
            self._call.send(Part(chunk.part, self._collected), next(self._files))
            self._collected = []


def _as_type(leaf: Any, spec: ArraySpec) -> Any:
    """Return the array as JAX takes it. Raises OverflowError for integers that do not fit; JAX would truncate them."""
    if leaf.dtype != spec.dtype and spec.dtype.kind in "iu" and leaf.size:
        limits = np.iinfo(spec.dtype)
        if leaf.max() > limits.max or leaf.min() < limits.min:
            raise OverflowError(
                f"the items have numbers that do not fit {spec.dtype}, which JAX uses unless "
                "jax_enable_x64 is set: env={'JAX_ENABLE_X64': '1'}"
            )
    return leaf.astype(spec.dtype, copy=False)


# ---- plain Python


def serve_python(function: Callable[..., Any], static: Mapping[str, Any], unpack_items: bool) -> None:
    """Map the parts that the parent sends until it sends None. The gang calls this on every rank.

    Raises the function's own error.
    """
    call = calls.current_call()
    while (part := call.receive()) is not None:
        results = []
        for number, item in enumerate(part.content, part.start):
            try:
                results.append(function(*item, **static) if unpack_items else function(item, **static))
            except Exception as error:
                add_note(error, f"raised for item {number}")
                raise
        try:
            call.send(Part(part.start, results))
        except calls.CallEnded:
            raise
        except Exception as error:
            add_note(error, f"while pickling what the function returned for items {part.start} to {number}")
            raise
