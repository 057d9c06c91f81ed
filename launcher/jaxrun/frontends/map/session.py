"""One map over the devices of a gang: the chunks that its ranks work on, and the results that have come."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Self

from jaxrun import RUNTIME
from jaxrun.frontends.gang.call_events import RankMessage
from jaxrun.frontends.gang.exceptions import combined_exception
from jaxrun.frontends.map import gang_calls
from jaxrun.frontends.map.items import ItemSource, MapInput, NotTraceable
from jaxrun.frontends.map.python_map import pickle_function
from jaxrun.frontends.map.scheduler import ChunkScheduler, RankWindow
from jaxrun.frontends.map.shared_slots import SlotPool
from jaxrun.frontends.map.stats import MapStats, record_stats
from jaxrun.protocol.map_messages import (
    CannotTrace,
    ChunkDone,
    ChunkFailed,
    EndOfChunks,
    ItemChunk,
    MapReady,
    StartMap,
)
from jaxrun.protocol.payload import FunctionReference, SharedBuffer

if TYPE_CHECKING:
    from jaxrun.frontends.gang.gang import Gang

_SERVE_CHUNKS = FunctionReference(f"{RUNTIME}.map.device_map", "serve")
_FAILURE_GRACE_S = 1.5  # for the other ranks to end after one has failed

# The memory that a gang's last map shared with each rank, for the next one.
_shared_buffers: weakref.WeakKeyDictionary[Gang, dict[int, SharedBuffer]] = weakref.WeakKeyDictionary()


class MapSession:
    """One map, in one call of the gang. `count` is the number of items, None if it is not known."""

    def __init__(
        self,
        gang: Gang,
        f: Callable[..., Any],
        items: MapInput,
        count: int | None,
        *,
        chunk_size: int | None,
        static: Mapping[str, Any] | None,
        unpack_items: bool,
    ) -> None:
        self._gang, self._items, self._count = gang, items, count
        devices = sum(worker.devices for worker in gang.workers)
        start = StartMap(
            code=pickle_function(f, static),
            unpack_items=unpack_items,
            template=items.template,
            item_specs=items.specs,
            shared_leaves=items.shared,
            items_per_device=None if count is None else -(-count // devices),
            chunk_size=chunk_size,
        )
        self._name = getattr(f, "__name__", type(f).__name__)
        self._began = time.perf_counter()
        self._call = gang.start_call(_SERVE_CHUNKS, start)
        self._scheduler = ChunkScheduler(count)
        self._slot_pools: dict[int, SlotPool] = {}  # by rank, where memory is shared
        self._slots: dict[int, int] = {}  # the slot of each chunk, by the number of its first item
        self._buffers = _shared_buffers.pop(gang, {})
        self._outcomes: dict[int, tuple[int, list[Any]]] = {}  # item count and result leaves, by the first item
        self._delivered = 0
        self._ready: MapReady | None = None
        self.results: list[Any] = []

    def __enter__(self) -> Self:
        self._call.__enter__()
        return self

    def __exit__(self, *about: Any) -> None:
        self._call.__exit__(*about)

    @property
    def template(self) -> Any:
        """What the function returns for an item, with numbers for its leaves; known once `run` has yielded or ended."""
        assert self._ready is not None
        return self._ready.template

    def run(self, source: ItemSource, *, ordered: bool = True) -> Iterator[tuple[int, list[Any]]]:
        """Map all items of `source`.

        If their number is known, the results go into `results`. If not, yields for each chunk the number of its items
        and the leaves of their results.
        """
        for rank, ready in self._wait_for_ranks().items():
            self._prepare(rank, ready)
        self._send_chunks(source)
        while not self._scheduler.finished:
            self._handle_done(*self._receive())
            outcomes = list(self._next_outcomes(ordered=ordered))
            self._send_chunks(source)  # before the caller works on the results
            yield from outcomes
        self._finish()
        _shared_buffers[self._gang] = {rank: pool.buffer for rank, pool in self._slot_pools.items()}
        self._record_stats()

    def _next_outcomes(self, *, ordered: bool) -> Iterator[tuple[int, list[Any]]]:
        """Yield the outcomes of chunks that are done, as far as their order allows."""
        while self._outcomes and (not ordered or self._delivered in self._outcomes):
            count, leaves = self._outcomes.pop(self._delivered if ordered else next(iter(self._outcomes)))
            self._delivered += count
            yield count, leaves

    def _wait_for_ranks(self) -> dict[int, MapReady]:
        """Return what each rank needs. Raises NotTraceable if JAX cannot trace the function."""
        found: dict[int, MapReady] = {}
        while len(found) < len(self._gang.workers):
            rank, message = self._receive()
            if isinstance(message, CannotTrace):
                self._finish()
                raise NotTraceable(_refusal(self._name, message))
            found[rank] = message
        return found

    def _prepare(self, rank: int, ready: MapReady) -> None:
        if self._ready is None:
            self._ready = ready
            self._check_numbers(ready)
            if self._count is not None:
                import numpy  # noqa: TID251

                self.results = [numpy.empty((self._count, *spec.shape), spec.dtype) for spec in ready.result_specs]
        self._scheduler.windows[rank] = RankWindow(ready.chunk_size, ready.max_chunks)
        if self._call.shares_memory:
            slots = SlotPool(
                ready.item_specs,
                ready.result_specs,
                ready.largest_chunk_size,
                ready.largest_max_chunks,
                self._buffers.get(rank),
            )
            self._slot_pools[rank] = slots
            self._call.send(slots.shared, [rank])

    def _check_numbers(self, ready: MapReady) -> None:
        """Raise OverflowError for a Python number that does not fit its type, as JAX does; arrays it converts."""
        import numpy  # noqa: TID251

        for leaf, spec, exact in zip(self._items.mapped, ready.item_specs, self._items.exact, strict=True):
            if exact and leaf.size and spec.dtype.kind in "iu" and spec.dtype != leaf.dtype:
                limits = numpy.iinfo(spec.dtype)
                if leaf.max() > limits.max or leaf.min() < limits.min:
                    raise OverflowError(
                        f"the items have numbers that do not fit {spec.dtype}, which JAX takes unless "
                        "jax_enable_x64 is set: env={'JAX_ENABLE_X64': '1'}"
                    )

    def _send_chunks(self, source: ItemSource) -> None:
        if len(self._outcomes) >= sum(window.capacity for window in self._scheduler.windows.values()):
            return  # results that wait for a late chunk must not fill the memory
        for rank, start, size in self._scheduler.next_chunks():
            leaves = source.read(start, size)
            count = len(leaves[0]) if leaves else 0
            self._scheduler.assign(rank, count)
            if not count:
                return
            slot = -1
            if slots := self._slot_pools.get(rank):
                slot = self._slots[start] = slots.acquire()
                slots.write_items(slot, size, leaves)
            self._call.send(ItemChunk(start, count, size, slot, None if slots else leaves), [rank])

    def _handle_done(self, rank: int, done: ChunkDone) -> None:
        start, slots = done.start, self._slot_pools.get(rank)
        count = self._scheduler.complete(rank, start, done.chunk_size, done.max_chunks)
        slot = self._slots.pop(start, -1)
        leaves = slots.read_results(slot, count) if slots else done.leaves or ()
        if self._count is None:
            self._outcomes[start] = count, [leaf.copy() for leaf in leaves] if slots else list(leaves)
        for all_items, leaf in zip(self.results, leaves, strict=self._count is not None):
            all_items[start : start + count] = leaf
        if slots:
            slots.release(slot)

    def _receive(self) -> tuple[int, Any]:
        """Return a rank and its next message. Raises what a rank has raised, WorkerDied if one has died."""
        while True:
            match gang_calls.receive(self._call):
                case RankMessage(rank=rank, value=ChunkFailed()):
                    self._call.send(EndOfChunks(), [rank])  # upon which the rank raises its error
                case RankMessage(rank=rank, value=value):
                    return rank, value
                case _:
                    self._finish(_FAILURE_GRACE_S)
                    raise combined_exception(self._call.failures)

    def _finish(self, timeout: float | None = None) -> None:
        gang_calls.finish(self._call, timeout)
        if self._call.failures:
            raise combined_exception(self._call.failures)

    def _record_stats(self) -> None:
        chunk_size = next(iter(self._scheduler.windows.values())).size
        seconds = time.perf_counter() - self._began
        record_stats(
            self._gang, MapStats.of_gang(self._gang, "vmap and jit", chunk_size, self._scheduler.done, seconds)
        )


def _refusal(name: str, refused: CannotTrace) -> str:
    where = f"\n  at {refused.source_line}" if refused.source_line else ""
    return (
        f"JAX cannot trace {name}, so it cannot be compiled: {refused.reason}{where}\n"
        "use jnp and jax.lax there (jnp.where, lax.cond), or run it as plain Python, item by item: jax=False"
    )
