"""A rank's part in a map: chunks come from the parent, go round its devices, and the results go back in order.

The main thread hands chunks to the devices and never waits for one; a second thread waits for them in turn, takes the
results, and tells the parent. So copying, both ways, goes on while the devices compute.
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
    """Map what the parent sends until it says that nothing more comes; on every rank, in a conversation."""
    talk = calls.current_call()
    try:
        function = cached_function(task)
    except TracingFailed as trouble:
        talk.send(trouble.refused)
        return
    with _DeviceSession(talk, task, function) as stream:
        while True:
            said = talk.receive()
            if isinstance(said, SharedSlots):
                stream.settle(said)
            elif isinstance(said, ItemChunk):
                stream.start(said)
            else:
                return


class _RunningChunk(NamedTuple):
    chunk: ItemChunk
    at: float
    results: tuple[jax.Array, ...]


class _DeviceSession:
    """The chunks of one map on this rank's devices. Leaving it waits for those begun, and raises what they raised."""

    def __init__(self, talk: CallerConnection, task: StartMap, function: CompiledFunction) -> None:
        self._talk, self._task, self._function = talk, task, function
        self._devices = jax.local_devices()
        self._whole = [jax.device_put(task.shared_leaves, device) for device in self._devices]
        self._places: SharedSlots | None = None
        self._started = self._finished = 0
        self._begun: SimpleQueue[_RunningChunk | None] = SimpleQueue()
        self._error: Exception | None = None
        self._dropped = False
        self._size = task.chunk_size or function.limit_by_memory(function.sizes.initial_size(task.items_per_device))
        self._seeking = not (task.chunk_size or function.sizes.chosen)
        self._probes: list[float] = []

    def __enter__(self) -> _DeviceSession:
        function = self._function
        function.programs(self._size)
        self._talk.send(
            MapReady(
                item_specs=function.inputs,
                template=function.template,
                result_specs=function.results,
                chunk_size=self._size,
                max_chunks=self._room(),
                largest_chunk_size=max(self._size, self._task.chunk_size or function.sizes.most),
                largest_max_chunks=CHUNKS_PER_DEVICE * len(self._devices),
            )
        )
        self._finisher = threading.Thread(target=self._finish, name="jaxrun-map", daemon=True)
        self._finisher.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *about: object) -> None:
        self._dropped = kind is not None
        self._begun.put(None)
        interrupt: KeyboardInterrupt | None = None
        while self._finisher.is_alive():
            try:
                self._finisher.join()
            except KeyboardInterrupt as error:  # the thread must not speak in the next conversation
                interrupt = error
        if kind is None and (trouble := self._error or interrupt):
            raise trouble

    def settle(self, places: SharedSlots) -> None:
        """Where chunks and results lie from now on."""
        self._places = replace(places, buffer=_kept(places.buffer))

    def start(self, chunk: ItemChunk) -> None:
        """Hand it to the next device."""
        number = self._started % len(self._devices)
        self._started += 1
        program = self._function.programs(chunk.size)[number]
        at = time.perf_counter()
        leaves = jax.device_put(self._leaves(chunk), self._devices[number])
        results = program(leaves, self._whole[number])
        for result in (found := tuple(jax.tree.leaves(results))):
            result.copy_to_host_async()
        self._begun.put(_RunningChunk(chunk, at, found))

    def _leaves(self, chunk: ItemChunk) -> tuple[Any, ...]:
        """The chunk's items, the last one repeated up to its size."""
        if chunk.leaves is None:
            assert self._places is not None
            leaves = tuple(view_arrays(self._places.items(chunk.slot), self._function.inputs, chunk.size))
            for leaf in leaves:
                leaf[chunk.count :] = leaf[chunk.count - 1]
            return leaves
        if chunk.count == chunk.size:
            return chunk.leaves
        rows = np.minimum(np.arange(chunk.size), chunk.count - 1)
        return tuple(leaf[rows] for leaf in chunk.leaves)

    # ---- the second thread

    def _finish(self) -> None:
        while (begun := self._begun.get()) is not None:
            if self._error is not None or self._dropped:
                continue
            try:
                self._hand_back(begun)
            except calls.CallEnded:
                return
            except Exception as error:
                self._error = error
                self._talk.send(ChunkFailed())

    def _hand_back(self, begun: _RunningChunk) -> None:
        chunk = begun.chunk
        jax.block_until_ready(begun.results)
        seconds = time.perf_counter() - begun.at
        leaves: tuple[Any, ...] | None = tuple(np.asarray(result)[: chunk.count] for result in begun.results)
        if self._places is not None:
            slot = self._places.results(chunk.slot)
            for there, leaf in zip(view_arrays(slot, self._function.results, chunk.count), leaves or (), strict=True):
                there[:] = leaf
            leaves = None
        self._finished += chunk.count
        self._adapt(chunk, seconds)
        self._talk.send(ChunkDone(chunk.start, leaves, self._size, self._room()))

    def _adapt(self, chunk: ItemChunk, seconds: float) -> None:
        """Choose the size of the chunks to come, if it is being sought: when each device has done two of this size."""
        if not self._seeking or chunk.size != self._size:
            return
        self._probes.append(seconds)
        if len(self._probes) < 2 * len(self._devices):
            return
        share, done = self._task.items_per_device, self._finished // len(self._devices)
        left = None if share is None else max(0, share - done)
        self._size = self._function.sizes.next_size(chunk.size, min(self._probes), left)
        self._seeking = self._size != chunk.size
        self._probes.clear()

    def _room(self) -> int:
        return len(self._devices) * (1 if self._seeking else CHUNKS_PER_DEVICE)


_block: SharedBuffer | None = None


def _kept(block: SharedBuffer) -> SharedBuffer:
    """The same memory as it was mapped for the map before, whose pages need not be found again."""
    global _block
    if _block is None or os.fstat(_block.file.fd).st_ino != os.fstat(block.file.fd).st_ino:
        _block = block
    return _block
