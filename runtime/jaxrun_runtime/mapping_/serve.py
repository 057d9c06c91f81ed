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

from jaxrun.contract.mapping import Batched, Broken, Chunk, Done, Places, Ready, arrays
from jaxrun.contract.parcel import Block

from . import conversation
from .conversation import Conversation
from .mapping_function import Mapped, NotTraceable, mapped

DEPTH = 4  # chunks on their way, for each device


def serve(task: Batched) -> None:
    """Map what the parent sends until it says that nothing more comes; on every rank, in a conversation."""
    talk = conversation.current()
    try:
        function = mapped(task)
    except NotTraceable as trouble:
        talk.send(trouble.refused)
        return
    with _Stream(talk, task, function) as stream:
        while True:
            said = talk.receive()
            if isinstance(said, Places):
                stream.settle(said)
            elif isinstance(said, Chunk):
                stream.start(said)
            else:
                return


class _Begun(NamedTuple):
    chunk: Chunk
    at: float
    results: tuple[jax.Array, ...]


class _Stream:
    """The chunks of one map on this rank's devices. Leaving it waits for those begun, and raises what they raised."""

    def __init__(self, talk: Conversation, task: Batched, function: Mapped) -> None:
        self._talk, self._task, self._function = talk, task, function
        self._devices = jax.local_devices()
        self._whole = [jax.device_put(task.whole, device) for device in self._devices]
        self._places: Places | None = None
        self._started = self._finished = 0
        self._begun: SimpleQueue[_Begun | None] = SimpleQueue()
        self._error: Exception | None = None
        self._size = task.size or function.fit(function.sizes.begin(task.share))
        self._seeking = not (task.size or function.sizes.chosen)
        self._probes: list[float] = []

    def __enter__(self) -> _Stream:
        function = self._function
        function.programs(self._size)
        self._talk.send(
            Ready(
                mapped=function.inputs,
                template=function.template,
                results=function.results,
                size=self._size,
                room=self._room(),
                most_size=max(self._size, self._task.size or function.sizes.most),
                most_room=DEPTH * len(self._devices),
            )
        )
        self._finisher = threading.Thread(target=self._finish, name="jaxrun-map", daemon=True)
        self._finisher.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *about: object) -> None:
        self._begun.put(None)
        self._finisher.join()
        if self._error is not None and kind is None:
            raise self._error

    def settle(self, places: Places) -> None:
        """Where chunks and results lie from now on."""
        self._places = replace(places, block=_kept(places.block))

    def start(self, chunk: Chunk) -> None:
        """Hand it to the next device."""
        number = self._started % len(self._devices)
        self._started += 1
        program = self._function.programs(chunk.size)[number]
        at = time.perf_counter()
        leaves = jax.device_put(self._leaves(chunk), self._devices[number])
        results = program(leaves, self._whole[number])
        for result in (found := tuple(jax.tree.leaves(results))):
            result.copy_to_host_async()
        self._begun.put(_Begun(chunk, at, found))

    def _leaves(self, chunk: Chunk) -> tuple[Any, ...]:
        """The chunk's items, the last one repeated up to its size."""
        if chunk.leaves is None:
            assert self._places is not None
            leaves = tuple(arrays(self._places.items(chunk.slot), self._function.inputs, chunk.size))
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
            if self._error is not None:
                continue
            try:
                self._hand_back(begun)
            except conversation.Over:
                return
            except Exception as error:
                self._error = error
                self._talk.send(Broken())

    def _hand_back(self, begun: _Begun) -> None:
        chunk = begun.chunk
        jax.block_until_ready(begun.results)
        seconds = time.perf_counter() - begun.at
        leaves: tuple[Any, ...] | None = tuple(np.asarray(result)[: chunk.count] for result in begun.results)
        if self._places is not None:
            slot = self._places.results(chunk.slot)
            for there, leaf in zip(arrays(slot, self._function.results, chunk.count), leaves or (), strict=True):
                there[:] = leaf
            leaves = None
        self._finished += chunk.count
        self._adapt(chunk, seconds)
        self._talk.send(Done(chunk.start, leaves, self._size, self._room()))

    def _adapt(self, chunk: Chunk, seconds: float) -> None:
        """Choose the size of the chunks to come, if it is being sought: when each device has done two of this size."""
        if not self._seeking or chunk.size != self._size:
            return
        self._probes.append(seconds)
        if len(self._probes) < 2 * len(self._devices):
            return
        share, done = self._task.share, self._finished // len(self._devices)
        left = None if share is None else max(0, share - done)
        self._size = self._function.sizes.after(chunk.size, min(self._probes), left)
        self._seeking = self._size != chunk.size
        self._probes.clear()

    def _room(self) -> int:
        return len(self._devices) * (1 if self._seeking else DEPTH)


_block: Block | None = None


def _kept(block: Block) -> Block:
    """The same memory as it was mapped for the map before, whose pages need not be found again."""
    global _block
    if _block is None or os.fstat(_block.file.fd).st_ino != os.fstat(block.file.fd).st_ino:
        _block = block
    return _block
