"""pool(): what multiprocessing.Pool offers, for functions that use JAX and for those that do not.

    with jaxrun.pool() as pool:
        results = pool.map(f, xs)

A function that uses JAX and can be traced is vmapped and compiled, and runs on all devices of one process: nothing
crosses a pipe. Any other runs as plain Python, item by item, in one process for each core. Both start when they are
needed first.
"""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from jaxrun.map.dispatch import Ways
from jaxrun.map.results import AsyncResult

_Callback = Callable[[Any], Any] | None
_ErrorCallback = Callable[[BaseException], Any] | None


class Pool:
    """Made by `pool`. Iterables are sequences of items, as for multiprocessing.Pool.

    A function that runs on devices gets its items stacked, and `map` returns numpy arrays of all results; a plain one
    gets them one by one, and `map` returns a list.
    """

    def __init__(self, ways: Ways) -> None:
        self._ways = ways
        self._closed = False
        _pools.add(self)

    def map(self, func: Callable[[Any], Any], iterable: Iterable[Any], chunksize: int | None = None) -> Any:
        """`func` of each item, in order. Raises what func raises for the first item of which it is known."""
        return self._ways.map(func, iterable, chunksize, star=False).get()

    def starmap(self, func: Callable[..., Any], iterable: Iterable[Any], chunksize: int | None = None) -> Any:
        """As map; an item is a tuple of func's arguments."""
        return self._ways.map(func, iterable, chunksize, star=True).get()

    def map_async(
        self,
        func: Callable[[Any], Any],
        iterable: Iterable[Any],
        chunksize: int | None = None,
        callback: _Callback = None,
        error_callback: _ErrorCallback = None,
    ) -> AsyncResult:
        """As map, at once; the callbacks are called with the results, or with the error, by another thread."""
        return self._ways.map(func, iterable, chunksize, star=False, apart=True).then(callback, error_callback)

    def starmap_async(
        self,
        func: Callable[..., Any],
        iterable: Iterable[Any],
        chunksize: int | None = None,
        callback: _Callback = None,
        error_callback: _ErrorCallback = None,
    ) -> AsyncResult:
        """As map_async; an item is a tuple of func's arguments."""
        return self._ways.map(func, iterable, chunksize, star=True, apart=True).then(callback, error_callback)

    def imap(self, func: Callable[[Any], Any], iterable: Iterable[Any], chunksize: int | None = None) -> Iterator[Any]:
        """Results one by one, in order; items are taken only so far ahead as there is room.

        On devices, the pool is busy until the iterator is exhausted or closed.
        """
        return self._ways.imap(func, iterable, chunksize, ordered=True)

    def imap_unordered(
        self, func: Callable[[Any], Any], iterable: Iterable[Any], chunksize: int | None = None
    ) -> Iterator[Any]:
        """As imap, in the order in which results come."""
        return self._ways.imap(func, iterable, chunksize, ordered=False)

    def apply(self, func: Callable[..., Any], args: Sequence[Any] = (), kwds: Mapping[str, Any] | None = None) -> Any:
        """`func(*args, **kwds)` in one of the processes."""
        return self._ways.apply(func, args, kwds).get()

    def apply_async(
        self,
        func: Callable[..., Any],
        args: Sequence[Any] = (),
        kwds: Mapping[str, Any] | None = None,
        callback: _Callback = None,
        error_callback: _ErrorCallback = None,
    ) -> AsyncResult:
        """As apply, at once."""
        return self._ways.apply(func, args, kwds).then(callback, error_callback)

    def close(self) -> None:
        """Take no more; what was given is done."""
        self._closed = True
        self._ways.close()

    def join(self) -> None:
        """Wait until all is done and no process is left; after `close` or `terminate`."""
        if not self._closed:
            raise ValueError("the pool still runs; close() or terminate() it before join()")
        self._ways.join()

    def terminate(self) -> None:
        """Stop the plain processes as they are; a map on devices that is under way is waited for."""
        self.close()
        self._ways.crew.terminate()
        self.join()

    def explain(self) -> str:
        """What was chosen for the last map, why, and how fast it was."""
        return self._ways.why

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.terminate()


def pool(processes: int | None = None, **more: Any) -> Pool:
    """As multiprocessing.Pool, for functions that use JAX, too; see Pool.

    processes:  cores to use, this machine's by default: as devices of one process, or as processes
    jax:        True: trace and compile every function, or raise NotTraceable; False: none; None: those that use JAX
    hosts, backend, platform, env, options:  as for Gang; over hosts there is one process with devices on each
    """
    return Pool(Ways(processes, **more))


_pools: weakref.WeakSet[Pool] = weakref.WeakSet()


def _terminate_all() -> None:
    for one in tuple(_pools):
        one.terminate()


atexit.register(_terminate_all)  # before the gangs', which was registered first: a pool holds its gang
