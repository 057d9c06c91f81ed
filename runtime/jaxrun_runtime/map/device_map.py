"""A rank's part in a map over devices: receives chunks, runs them on the local devices in turn, returns the results.

The main thread dispatches chunks to the devices and never waits for one; a second thread waits for them in order and
sends the results. So copying, both ways, goes on while the devices compute.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace
from queue import SimpleQueue
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrun.protocol.map_messages import (
    ChunkDone,
    ChunkFailed,
    ItemChunk,
    MapReady,
    SharedSlots,
    StartMap,
    view_arrays,
)
from jaxrun.protocol.payload import SharedBuffer
from jaxrun_runtime.gang import calls
from jaxrun_runtime.gang.calls import CallerConnection
from jaxrun_runtime.map.compiled_function import CompiledFunction, TracingFailed, cached_function

CHUNKS_PER_DEVICE = 4  # chunks on their way, for each device


def serve(task: StartMap) -> None:
    """Map the chunks that the parent sends until EndOfChunks; called on every rank by the gang."""
    call = calls.current_call()
    try:
        function = cached_function(task)
    except TracingFailed as trouble:
        call.send(trouble.refused)
        return
    with _DeviceSession(call, task, function) as session:
        while True:
            message = call.receive()
            if isinstance(message, SharedSlots):
                session.use_slots(message)
            elif isinstance(message, ItemChunk):
                session.start(message)
            else:
                return


class _RunningChunk(NamedTuple):
    chunk: ItemChunk
    at: float
    results: tuple[jax.Array, ...]


class _DeviceSession:
    """The chunks of one map on this rank's devices. Leaving the context waits for them, and raises what they raised."""

    def __init__(self, call: CallerConnection, task: StartMap, function: CompiledFunction) -> None:
        self._call, self._task, self._function = call, task, function
        self._devices = jax.local_devices()
        self._whole = [jax.device_put(task.shared_leaves, device) for device in self._devices]
        self._slots: SharedSlots | None = None
        self._started = self._done_items = 0
        self._running: SimpleQueue[_RunningChunk | None] = SimpleQueue()
        self._error: Exception | None = None
        self._dropped = False
        self._size = task.chunk_size or function.limit_by_memory(function.sizes.initial_size(task.items_per_device))
        self._seeking = not (task.chunk_size or function.sizes.chosen)
        self._probes: list[float] = []

    def __enter__(self) -> _DeviceSession:
        function = self._function
        function.programs(self._size)
        self._call.send(
            MapReady(
                item_specs=function.inputs,
                template=function.template,
                result_specs=function.results,
                chunk_size=self._size,
                max_chunks=self._max_chunks(),
                largest_chunk_size=max(self._size, self._task.chunk_size or function.sizes.most),
                largest_max_chunks=CHUNKS_PER_DEVICE * len(self._devices),
            )
        )
        self._sender = threading.Thread(target=self._send_results, name="jaxrun-map", daemon=True)
        self._sender.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *about: object) -> None:
        self._dropped = kind is not None
        self._running.put(None)
        interrupt: KeyboardInterrupt | None = None
        while self._sender.is_alive():
            try:
                self._sender.join()
            except KeyboardInterrupt as error:  # the thread must not send anything in the next call
                interrupt = error
        if kind is None and (trouble := self._error or interrupt):
            raise trouble

    def use_slots(self, slots: SharedSlots) -> None:
        """Use this memory for chunks and results from now on."""
        self._slots = replace(slots, buffer=_already_mapped(slots.buffer))

    def start(self, chunk: ItemChunk) -> None:
        """Dispatch a chunk to the next device."""
        number = self._started % len(self._devices)
        self._started += 1
        program = self._function.programs(chunk.size)[number]
        at = time.perf_counter()
        leaves = jax.device_put(self._leaves(chunk), self._devices[number])
        results = program(leaves, self._whole[number])
        for result in (found := tuple(jax.tree.leaves(results))):
            result.copy_to_host_async()
        self._running.put(_RunningChunk(chunk, at, found))

    def _leaves(self, chunk: ItemChunk) -> tuple[Any, ...]:
        """Return the chunk's items, the last one repeated up to its size."""
        if chunk.leaves is None:
            assert self._slots is not None
            leaves = tuple(view_arrays(self._slots.items(chunk.slot), self._function.inputs, chunk.size))
            for leaf in leaves:
                leaf[chunk.count :] = leaf[chunk.count - 1]
            return leaves
        if chunk.count == chunk.size:
            return chunk.leaves
        rows = np.minimum(np.arange(chunk.size), chunk.count - 1)
        return tuple(leaf[rows] for leaf in chunk.leaves)

    # ---- the second thread

    def _send_results(self) -> None:
        while (running := self._running.get()) is not None:
            if self._error is not None or self._dropped:
                continue
            try:
                self._send_result(running)
            except calls.CallEnded:
                return
            except Exception as error:
                self._error = error
                self._call.send(ChunkFailed())

    def _send_result(self, running: _RunningChunk) -> None:
        chunk = running.chunk
        jax.block_until_ready(running.results)
        seconds = time.perf_counter() - running.at
        leaves: tuple[Any, ...] | None = tuple(np.asarray(result)[: chunk.count] for result in running.results)
        if self._slots is not None:
            slot = self._slots.results(chunk.slot)
            for view, leaf in zip(view_arrays(slot, self._function.results, chunk.count), leaves or (), strict=True):
                view[:] = leaf
            leaves = None
        self._done_items += chunk.count
        self._adapt(chunk, seconds)
        self._call.send(ChunkDone(chunk.start, leaves, self._size, self._max_chunks()))

    def _adapt(self, chunk: ItemChunk, seconds: float) -> None:
        """While the chunk size is being sought, choose the next one when each device has done two of this size."""
        if not self._seeking or chunk.size != self._size:
            return
        self._probes.append(seconds)
        if len(self._probes) < 2 * len(self._devices):
            return
        share, done = self._task.items_per_device, self._done_items // len(self._devices)
        left = None if share is None else max(0, share - done)
        self._size = self._function.sizes.next_size(chunk.size, min(self._probes), left)
        self._seeking = self._size != chunk.size
        self._probes.clear()

    def _max_chunks(self) -> int:
        return len(self._devices) * (1 if self._seeking else CHUNKS_PER_DEVICE)


_block: SharedBuffer | None = None


def _already_mapped(block: SharedBuffer) -> SharedBuffer:
    """Return the same memory as it was mapped for the last map: its pages need not be mapped again."""
    global _block
    if _block is None or os.fstat(_block.file.fd).st_ino != os.fstat(block.file.fd).st_ino:
        _block = block
    return _block
