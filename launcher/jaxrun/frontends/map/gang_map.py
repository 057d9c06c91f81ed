"""map and imap over a gang: a function of one item over many items, on all devices of all processes.

A JAX function is sent to the ranks once; they compile it for chunks of items. Each rank has several chunks at a time,
in shared memory on one machine, so that the memory for chunks is bounded, whatever the number of items. A plain Python
function (`jax=False`) is called item by item on all ranks; see python_map.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from jaxrun.errors import UsageError
from jaxrun.frontends.map import gang_calls, pytree
from jaxrun.frontends.map.gang_executor import SERVE_BATCHES, RankExecutor
from jaxrun.frontends.map.items import ArraySource, IteratorSource, parse_chunk_size, parse_items
from jaxrun.frontends.map.python_map import PLAIN_PYTHON, PythonMap, pickle_function
from jaxrun.frontends.map.session import MapSession
from jaxrun.frontends.map.stats import MapStats, record_stats

if TYPE_CHECKING:
    from jaxrun.frontends.gang.gang import Gang


def map(
    gang: Gang,
    f: Callable[..., Any],
    xs: Any,
    *,
    chunk: int | str = "auto",
    in_axes: Any = 0,
    static: Mapping[str, Any] | None = None,
    jax: bool = True,
    unpack_items: bool = False,
) -> Any:
    """Return `f` of each item of `xs`, in order: f is vmapped, compiled, and run on all devices of the gang.

    xs:            an array, or a dict, tuple or named tuple of arrays, whose first axis counts the items; or a list of
                   items
    chunk:         items that a device takes at once; "auto" measures how many take it about 5 ms
    in_axes:       as in jax.vmap, for xs: an axis, None for what all items share, or a dict or tuple of such
    static:        keyword arguments for f, the same for all items; JAX sees them as constants
    jax:           False runs f as plain Python, one item at a time over the processes, and returns a list
    unpack_items:  whether an item is a tuple of f's arguments

    Returns numpy arrays of shape [items, …], in the containers that f returns. As in JAX, float64 and int64 become 32
    bits wide unless jax_enable_x64 is set. Raises NotTraceable where JAX cannot trace f, UsageError for arguments
    that do not fit, and what f raises; WorkerDied if a rank dies.
    """
    size = parse_chunk_size(chunk)
    if not jax:
        return _map_python(gang, f, _check_items(xs, in_axes), size, static, unpack_items)
    xs = xs if isinstance(xs, (dict, tuple, list)) or hasattr(xs, "__array__") else list(xs)
    if isinstance(xs, list) and not xs:
        return []
    items = parse_items(xs, in_axes)
    with MapSession(gang, f, items, items.count, chunk_size=size, static=static, unpack_items=unpack_items) as session:
        for _ in session.run(ArraySource(items)):
            pass
        return pytree.unflatten(session.template, session.results)


def imap(
    gang: Gang,
    f: Callable[..., Any],
    xs: Iterable[Any],
    *,
    chunk: int | str = "auto",
    static: Mapping[str, Any] | None = None,
    jax: bool = True,
    unpack_items: bool = False,
    ordered: bool = True,
) -> Generator[Any, None, None]:
    """Yield `f` of each item of `xs`, whose items need not fit into memory: they are read as the ranks have room.

    A result is numpy scalars or arrays, in the containers that f returns. With `ordered` results come in the items'
    order, else as they are done. The gang is busy until the iterator is exhausted or closed.
    """
    size = parse_chunk_size(chunk)
    if not jax:
        code = pickle_function(f, static)
        with gang.start_call(SERVE_BATCHES) as call:
            ranks = RankExecutor(gang, call)
            yield from PythonMap(
                ranks, code, xs, batch_size=size, unpack_items=unpack_items, continue_on_error=True, ordered=ordered
            )
            gang_calls.finish(call)
        return
    source = IteratorSource(iter(xs))
    if source.first is None:
        return
    with MapSession(gang, f, source.first, None, chunk_size=size, static=static, unpack_items=unpack_items) as session:
        for count, leaves in session.run(source, ordered=ordered):
            for number in range(count):
                yield pytree.unflatten(session.template, [leaf[number] for leaf in leaves])


def _map_python(
    gang: Gang,
    f: Callable[..., Any],
    xs: Iterable[Any],
    size: int | None,
    static: Mapping[str, Any] | None,
    unpack_items: bool,
) -> list[Any]:
    code = pickle_function(f, static)
    began = time.perf_counter()
    with gang.start_call(SERVE_BATCHES) as call:
        run = PythonMap(RankExecutor(gang, call), code, xs, batch_size=size, unpack_items=unpack_items)
        results = run.results()
        gang_calls.finish(call)
    seconds = time.perf_counter() - began
    record_stats(gang, MapStats.of_gang(gang, PLAIN_PYTHON, run.largest_batch, run.item_count, seconds))
    return results


def _check_items(xs: Any, in_axes: Any) -> Iterable[Any]:
    """Return `xs`. Raises UsageError if it is not a sequence of items, as plain Python needs it."""
    if isinstance(xs, dict) or in_axes != 0:
        raise UsageError("with jax=False give a sequence of items; only JAX maps over the axes of a tree of arrays")
    return xs  # type: ignore[no-any-return]
