"""map over a gang: applies a function of one item to many items, which are sent in parts to ranks with room.

A function for JAX is sent to the ranks once; they compile it for chunks of items and run these on all their devices. A
function of plain Python is called item by item.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Protocol

from jaxrun.errors import UsageError, add_note
from jaxrun.frontends.gang.call import GangCall
from jaxrun.frontends.gang.call_events import Disconnected, LauncherOutput, Printed, RankMessage, Returned
from jaxrun.frontends.gang.map_items import MapItems, parse_items
from jaxrun.protocol.map_messages import PARTS_AHEAD, MapTask, Part, map_leaves
from jaxrun.protocol.message_tags import digest
from jaxrun.protocol.names import RUNTIME
from jaxrun.protocol.payload import FunctionReference, OwnedDescriptor, dump, make_memory_file

_ON_DEVICES = FunctionReference(f"{RUNTIME}.gang.map_share", "serve_on_devices")
_AS_PYTHON = FunctionReference(f"{RUNTIME}.gang.map_share", "serve_python")
_PART_BYTES = 2**21  # of arrays: while one part is computed, the next ones are copied
_PYTHON_PARTS = 16  # per rank; parts may take very different times


class Caller(Protocol):
    """The part of a gang that a map uses."""

    @property
    def processes(self) -> int: ...

    def start_call(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> GangCall: ...


def map_items(
    gang: Caller,
    f: Callable[..., Any],
    xs: Any,
    *,
    chunk: int | None = None,
    in_axes: Any = 0,
    static: Mapping[str, Any] | None = None,
    jax: bool = True,
    unpack_items: bool = False,
) -> Any:
    """Do what Gang.map does; with `unpack_items`, an item is a tuple of f's arguments."""
    if chunk is not None and (isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1):
        raise UsageError(f"chunk must be a number of items from 1, not {chunk!r}")
    if not jax:
        if isinstance(xs, dict) or in_axes != 0:
            raise UsageError(
                "with jax=False give a sequence of items; only JAX maps over the axes of arrays in dicts and tuples"
            )
        return _map_as_python(gang, f, list(xs), chunk, static or {}, unpack_items)
    if not isinstance(xs, (dict, tuple)) and not hasattr(xs, "__array__"):
        xs = list(xs)
        if not xs:
            return []
    return _map_on_devices(gang, f, parse_items(xs, in_axes), chunk, static or {}, unpack_items)


def _map_as_python(
    gang: Caller, f: Callable[..., Any], xs: list[Any], chunk: int | None, static: Mapping[str, Any], unpack_items: bool
) -> list[Any]:
    size = chunk or max(1, math.ceil(len(xs) / _PYTHON_PARTS / gang.processes))
    parts = (Part(start, xs[start : start + size]) for start in range(0, len(xs), size))
    with gang.start_call(_AS_PYTHON, f, static, unpack_items) as call:
        found: dict[int, list[Any]] = {}
        _deal(call, parts, found.__setitem__, ahead=1)  # in new memory, because the function may keep its items
        if call.failures:
            # The first is enough, and the other ranks need not finish their items.
            raise call.failures[0].to_exception()
        return [result for start in sorted(found) for result in found[start]]


def _map_on_devices(
    gang: Caller,
    f: Callable[..., Any],
    items: MapItems,
    chunk: int | None,
    static: Mapping[str, Any],
    unpack_items: bool,
) -> Any:
    import numpy  # noqa: TID251

    nbytes = sum(leaf.nbytes for leaf in items.mapped)
    rounds = max(1, math.ceil(nbytes / _PART_BYTES / gang.processes))
    size = max(1, math.ceil(items.count / rounds / gang.processes))
    code = dump((f, static), share=False)
    task = MapTask(
        key=digest(code.body, *code.buffers),
        function=f,
        static=static,
        unpack_items=unpack_items,
        template=items.template,
        specs=items.specs,
        shared=items.shared,
        part_size=size,
        chunk_size=chunk,
    )
    parts = (
        Part(start, [leaf[start : start + size] for leaf in items.mapped]) for start in range(0, items.count, size)
    )
    results: list[Any] = []  # arrays of all items, made when the first part arrives

    def store(start: int, chunks: list[tuple[Any, ...]]) -> None:
        for leaves in chunks:
            if not results:
                results.extend(numpy.empty((items.count, *leaf.shape[1:]), leaf.dtype) for leaf in leaves)
            for whole, leaf in zip(results, leaves, strict=True):
                whole[start : start + len(leaf)] = leaf
            start += len(leaves[0]) if leaves else 0

    with gang.start_call(_ON_DEVICES, task) as call:
        _deal(call, parts, store, PARTS_AHEAD, _memory_files(call))
        returned = call.results().main
    results = results or [numpy.empty((0, *spec.shape), spec.dtype) for spec in returned.specs]
    return map_leaves(results.__getitem__, returned.template)


def _memory_files(call: GangCall) -> dict[int, Iterator[OwnedDescriptor]]:
    """Return for each rank the memory files of its parts, in turn; empty if memory is not shared."""
    ranks = call.running if call.shares_memory else ()
    return {rank: itertools.cycle([make_memory_file() for _ in range(PARTS_AHEAD)]) for rank in ranks}


def _deal(
    call: GangCall,
    parts: Iterator[Part],
    store: Callable[[int, Any], None],
    ahead: int,
    files: Mapping[int, Iterator[OwnedDescriptor]] = MappingProxyType({}),
) -> None:
    """Send parts to the ranks, `ahead` at a time to each, and store the answers by the part's start.

    Returns when all ranks have ended, or one has raised. Raises WorkerDied if one has died.
    """
    told = set[int]()  # ranks that know that there are no more parts

    def send_next(rank: int) -> None:
        part = None if rank in told else next(parts, None)
        if part is not None:
            _send_part(call, part, rank, next(files[rank]) if files else None)
        elif rank not in told:
            told.add(rank)
            call.send(None, [rank])

    for rank in call.running * ahead:
        send_next(rank)
    while (event := call.receive()) is not None:
        match event:
            case Returned(error=error) if error is not None:
                break
            case RankMessage(rank=rank, value=Part(start, content)):
                store(start, content)
                send_next(rank)
            case Printed() | LauncherOutput():
                call.show(event)
            case Disconnected():
                raise call.explain_death()
    call.send(None, set(call.running) - told)


def _send_part(call: GangCall, part: Part, rank: int, file: OwnedDescriptor | None) -> None:
    try:
        call.send(part, [rank], file)
    except Exception as error:
        add_note(error, f"an item of {part.start} to {part.start + len(part.content) - 1} cannot be sent")
        raise
