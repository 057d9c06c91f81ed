"""A map while it lasts: its conversation with the ranks, the chunks on their way, and what has come of them."""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol, Self

from jaxrun import RUNTIME
from jaxrun.gang.call import GangCall
from jaxrun.gang.call_events import Disconnected, LauncherOutput, Printed, RankMessage, Returned
from jaxrun.gang.exceptions import combined_exception
from jaxrun.map.items import MapInput, NotTraceable, stack_items
from jaxrun.map.python_map import pickle_function
from jaxrun.map.scheduler import ChunkScheduler, RankWindow
from jaxrun.map.shared_slots import SlotPool
from jaxrun.map.stats import MapStats, record_stats
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
    from jaxrun.gang.gang import Gang

_SERVE = FunctionReference(f"{RUNTIME}.map.device_map", "serve")
_FAILURE_GRACE = 1.5  # seconds that the others have to end after one has failed


_blocks: weakref.WeakKeyDictionary[Gang, dict[int, SharedBuffer]] = weakref.WeakKeyDictionary()  # for its next map


class ItemSource(Protocol):
    def read(self, start: int, size: int) -> tuple[Any, ...]:
        """The leaves of the items from number `start`, up to `size` of them; empty if there are no more."""


class ArraySource:
    """Items that are all there."""

    def __init__(self, items: MapInput) -> None:
        self._items = items

    def read(self, start: int, size: int) -> tuple[Any, ...]:
        return tuple(leaf[start : start + size] for leaf in self._items.mapped)


class IteratorSource:
    """Items from an iterator; `first` is the first one alone, None if there is none."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        head = list(itertools.islice(iterator, 1))
        self._iterator = itertools.chain(head, iterator)
        self._example = head[:1]
        self.first = stack_items(head) if head else None

    def read(self, start: int, size: int) -> tuple[Any, ...]:
        import numpy  # noqa: TID251

        assert self.first is not None
        found = list(itertools.islice(self._iterator, size))
        if not found:
            return ()
        leaves = stack_items([*self._example, *found]).mapped
        for leaf, spec in zip(leaves, self.first.specs, strict=True):
            if leaf.shape[1:] != spec.shape or not numpy.can_cast(leaf.dtype, spec.dtype, "same_kind"):
                raise TypeError(
                    f"items {start} to {start + len(found) - 1} are {leaf.dtype}, the first is {spec.dtype}"
                )
        return tuple(leaf[1:] for leaf in leaves)


class MapSession:
    """One map, and its conversation with the ranks."""

    def __init__(
        self,
        gang: Gang,
        f: Callable[..., Any],
        items: MapInput,
        count: int | None,
        *,
        size: int | None,
        static: Mapping[str, Any] | None,
        star: bool,
    ) -> None:
        self._gang, self._items, self._count = gang, items, count
        devices = sum(worker.devices for worker in gang.workers)
        task = StartMap(
            code=pickle_function(f, static),
            unpack_items=star,
            template=items.template,
            item_specs=items.specs,
            shared_leaves=items.shared,
            items_per_device=None if count is None else -(-count // devices),
            chunk_size=size,
        )
        self._name = getattr(f, "__name__", type(f).__name__)
        self._began = time.perf_counter()
        self._talk: GangCall = gang.start_call(_SERVE, task)
        self._dealer = ChunkScheduler(count)
        self._rings: dict[int, SlotPool] = {}
        self._slots: dict[int, int] = {}  # by the start of the chunk that lies there
        self._blocks = _blocks.pop(gang, {})
        self._came: dict[int, tuple[int, list[Any]]] = {}  # items and their results, by the first item
        self._following = 0
        self._ready: MapReady | None = None
        self.results: list[Any] = []

    def __enter__(self) -> Self:
        self._talk.__enter__()
        return self

    def __exit__(self, *about: Any) -> None:
        self._talk.__exit__(*about)

    @property
    def template(self) -> Any:
        """Of what the function returns for an item; when the ranks have said it."""
        assert self._ready is not None
        return self._ready.template

    def run(self, source: ItemSource, *, ordered: bool = True) -> Iterator[tuple[int, list[Any]]]:
        """Map all that `source` has. The results of items whose number is known are kept, those of others yielded.

        What is yielded is the number of items of a chunk, and the leaves of their results.
        """
        for rank, ready in self._gather().items():
            self._prepare(rank, ready)
        self._deal(source)
        while not self._dealer.finished:
            self._on_done(*self._receive())
            results = list(self._next_results(ordered=ordered))
            self._deal(source)  # before anybody works on the results
            yield from results
        self._end()
        _blocks[self._gang] = {rank: ring.block for rank, ring in self._rings.items()}
        self._note()

    def _next_results(self, *, ordered: bool) -> Iterator[tuple[int, list[Any]]]:
        """Of the chunks that have come, as far as their order allows."""
        while self._came and (not ordered or self._following in self._came):
            count, leaves = self._came.pop(self._following if ordered else next(iter(self._came)))
            self._following += count
            yield count, leaves

    def _gather(self) -> dict[int, MapReady]:
        """What each rank says it needs, when all have."""
        found: dict[int, MapReady] = {}
        while len(found) < len(self._gang.workers):
            rank, said = self._receive()
            if isinstance(said, CannotTrace):
                self._end()
                raise NotTraceable(_refusal(self._name, said))
            found[rank] = said
        return found

    def _prepare(self, rank: int, ready: MapReady) -> None:
        if self._ready is None:
            self._ready = ready
            self._check_numbers(ready)
            if self._count is not None:
                import numpy  # noqa: TID251

                self.results = [numpy.empty((self._count, *spec.shape), spec.dtype) for spec in ready.result_specs]
        self._dealer.windows[rank] = RankWindow(ready.chunk_size, ready.max_chunks)
        if self._talk.shares_memory:
            kept = self._blocks.get(rank)
            ring = SlotPool(
                ready.item_specs, ready.result_specs, ready.largest_chunk_size, ready.largest_max_chunks, kept
            )
            self._rings[rank] = ring
            self._talk.send(ring.shared, [rank])

    def _check_numbers(self, ready: MapReady) -> None:
        """JAX refuses a Python number that does not fit its type, and so do we; arrays it cuts off."""
        import numpy  # noqa: TID251

        for leaf, spec, exact in zip(self._items.mapped, ready.item_specs, self._items.exact, strict=True):
            if exact and leaf.size and spec.dtype.kind in "iu" and spec.dtype != leaf.dtype:
                limits = numpy.iinfo(spec.dtype)
                if leaf.max() > limits.max or leaf.min() < limits.min:
                    raise OverflowError(
                        f"the items have numbers that do not fit {spec.dtype}, which JAX takes unless "
                        "jax_enable_x64 is set: env={'JAX_ENABLE_X64': '1'}"
                    )

    def _deal(self, source: ItemSource) -> None:
        if len(self._came) >= sum(hand.capacity for hand in self._dealer.windows.values()):
            return  # they wait for a chunk that is late, and must not fill the memory
        for rank, start, size in self._dealer.next_chunks():
            leaves = source.read(start, size)
            count = len(leaves[0]) if leaves else 0
            self._dealer.assign(rank, count)
            if not count:
                return
            slot = -1
            if ring := self._rings.get(rank):
                slot = self._slots[start] = ring.acquire()
                ring.write_items(slot, size, leaves)
            self._talk.send(ItemChunk(start, count, size, slot, None if ring else leaves), [rank])

    def _on_done(self, rank: int, done: ChunkDone) -> None:
        start, ring = done.start, self._rings.get(rank)
        count = self._dealer.complete(rank, start, done.chunk_size, done.max_chunks)
        slot = self._slots.pop(start, -1)
        leaves = ring.read_results(slot, count) if ring else done.leaves or ()
        if self._count is None:
            self._came[start] = count, [leaf.copy() for leaf in leaves] if ring else list(leaves)
        for all_items, leaf in zip(self.results, leaves, strict=self._count is not None):
            all_items[start : start + count] = leaf
        if ring:
            ring.release(slot)

    def _receive(self) -> tuple[int, Any]:
        """What a rank says next; raises what one has raised."""
        while True:
            match self._talk.receive():
                case RankMessage(rank=rank, value=ChunkFailed()):
                    self._talk.send(EndOfChunks(), [rank])
                case RankMessage(rank=rank, value=value):
                    return rank, value
                case Printed() | LauncherOutput() as event:
                    self._talk.show(event)
                case Disconnected():
                    raise self._talk.explain_death()
                case Returned() | None:
                    self._end(_FAILURE_GRACE)
                    raise combined_exception(self._talk.failures)

    def _end(self, patience: float | None = None) -> None:
        """Let the ranks go, and wait until they have."""
        self._talk.send(EndOfChunks())
        while self._talk.running:
            match self._talk.receive(patience):
                case Printed() | LauncherOutput() as event:
                    self._talk.show(event)
                case None:
                    return
        if self._talk.failures:
            raise combined_exception(self._talk.failures)

    def _note(self) -> None:
        chunk = next(iter(self._dealer.windows.values())).size
        seconds = time.perf_counter() - self._began
        record_stats(self._gang, MapStats.of_gang(self._gang, "vmap and jit", chunk, self._dealer.done, seconds))


def _refusal(name: str, refused: CannotTrace) -> str:
    where = f"\n  at {refused.source_line}" if refused.source_line else ""
    return (
        f"JAX cannot trace {name}, so it cannot be compiled: {refused.reason}{where}\n"
        "use jnp and jax.lax there (jnp.where, lax.cond), or run it as plain Python, item by item: jax=False"
    )
