"""pool(): what multiprocessing.Pool offers, for functions that use JAX and for those that do not.

    with jaxrun.pool() as pool:
        results = pool.map(f, xs)

A function that uses JAX and can be traced is vmapped and compiled, and runs on all devices of one process: nothing
crosses a pipe. Any other runs as plain Python, item by item, in one process for each core. Both start when they are
first needed.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from jaxrun.frontends.gang.exceptions import GangError
from jaxrun.frontends.map.dispatch import MapDispatcher
from jaxrun.frontends.map.items import parse_chunk_size
from jaxrun.frontends.map.python_map import PythonMap
from jaxrun.frontends.map.results import AsyncResult, settle

_Callback = Callable[[Any], Any] | None
_ErrorCallback = Callable[[BaseException], Any] | None


class Pool:
    """Made by `pool`. Iterables are sequences of items, as for multiprocessing.Pool.

    A function that runs on devices gets its items stacked, and `map` returns numpy arrays of all results; a plain one
    gets them one by one, and `map` returns a list.
    """

    def __init__(self, dispatcher: MapDispatcher) -> None:
        self._dispatcher = dispatcher
        self._closed = False
        self._closing: threading.Thread | None = None
        self._threads: list[threading.Thread] = []
        self._iterators: weakref.WeakSet[PythonMap] = weakref.WeakSet()
        _pools.add(self)

    def map(self, func: Callable[[Any], Any], iterable: Iterable[Any], chunksize: int | None = None) -> Any:
        """Return `func` of each item, in order. Raises what func raises, for the first item that is known to."""
        return self._map(func, iterable, chunksize, unpack_items=False)()

    def starmap(self, func: Callable[..., Any], iterable: Iterable[Any], chunksize: int | None = None) -> Any:
        """As map; an item is a tuple of func's arguments."""
        return self._map(func, iterable, chunksize, unpack_items=True)()

    def map_async(
        self,
        func: Callable[[Any], Any],
        iterable: Iterable[Any],
        chunksize: int | None = None,
        callback: _Callback = None,
        error_callback: _ErrorCallback = None,
    ) -> AsyncResult:
        """As map, but return at once; a thread calls one of the callbacks, with the results or with the error."""
        work = self._map(func, iterable, chunksize, unpack_items=False)
        return self._in_thread(work, callback, error_callback)

    def starmap_async(
        self,
        func: Callable[..., Any],
        iterable: Iterable[Any],
        chunksize: int | None = None,
        callback: _Callback = None,
        error_callback: _ErrorCallback = None,
    ) -> AsyncResult:
        """As map_async; an item is a tuple of func's arguments."""
        work = self._map(func, iterable, chunksize, unpack_items=True)
        return self._in_thread(work, callback, error_callback)

    def imap(self, func: Callable[[Any], Any], iterable: Iterable[Any], chunksize: int | None = None) -> Iterator[Any]:
        """Return an iterator over the results, in order; items are read only so far ahead as there is room.

        On devices, the pool is busy until the iterator is exhausted or closed.
        """
        return self._imap(func, iterable, chunksize, ordered=True)

    def imap_unordered(
        self, func: Callable[[Any], Any], iterable: Iterable[Any], chunksize: int | None = None
    ) -> Iterator[Any]:
        """As imap, in the order in which results come."""
        return self._imap(func, iterable, chunksize, ordered=False)

    def apply(self, func: Callable[..., Any], args: Sequence[Any] = (), kwds: Mapping[str, Any] | None = None) -> Any:
        """Return `func(*args, **kwds)`, called in one of the processes."""
        return self.apply_async(func, args, kwds).get()

    def apply_async(
        self,
        func: Callable[..., Any],
        args: Sequence[Any] = (),
        kwds: Mapping[str, Any] | None = None,
        callback: _Callback = None,
        error_callback: _ErrorCallback = None,
    ) -> AsyncResult:
        """As apply, but return at once."""
        self._check_open()
        result = AsyncResult(callback, error_callback)
        self._dispatcher.apply(func, args, kwds, result.future)
        return result

    def close(self) -> None:
        """Take no more work; what has been given is done."""
        if not self._closed:
            self._closed = True
            self._closing = threading.Thread(target=self._finish, name="jaxrun-pool-close", daemon=True)
            self._closing.start()

    def join(self) -> None:
        """Wait until all is done and no process is left; after `close` or `terminate`."""
        if not self._closed:
            raise ValueError("the pool still runs; close() or terminate() it before join()")
        if self._closing is not None:
            self._closing.join()
        self._dispatcher.close_devices()

    def terminate(self) -> None:
        """Kill the plain processes; a map on devices that is in progress is waited for."""
        self._closed = True
        self._iterators.clear()
        self._dispatcher.terminate()
        if self._closing is None:  # and no thread can be started any more while the interpreter exits
            self._finish()
        self.join()

    def explain(self) -> str:
        """Return what was chosen for the last map, why, and how fast it was."""
        return self._dispatcher.explanation

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.terminate()

    def _map(
        self, func: Callable[..., Any], iterable: Iterable[Any], chunksize: int | None, *, unpack_items: bool
    ) -> Callable[[], Any]:
        """Return the work that a map is, once its arguments have been checked and its items read."""
        self._check(chunksize)
        # A tuple would be one tree of arrays for gang.map; here it is a sequence of items, like a list.
        items = iterable if hasattr(iterable, "__array__") else list(iterable)
        return lambda: self._dispatcher.map(func, items, chunksize, unpack_items=unpack_items)

    def _imap(
        self, func: Callable[..., Any], iterable: Iterable[Any], chunksize: int | None, *, ordered: bool
    ) -> Iterator[Any]:
        self._check(chunksize)
        results = self._dispatcher.imap(func, iterable, chunksize, ordered=ordered)
        if isinstance(results, PythonMap):
            self._iterators.add(results)
            results.start()
        return results

    def _in_thread(self, work: Callable[[], Any], callback: _Callback, error_callback: _ErrorCallback) -> AsyncResult:
        result = AsyncResult(callback, error_callback)
        thread = threading.Thread(target=settle, args=(result.future, work), name="jaxrun-map", daemon=True)
        self._threads = [*(one for one in self._threads if one.is_alive()), thread]
        thread.start()
        return result

    def _finish(self) -> None:
        """Have done all that has been given, and end the plain processes."""
        for iterator in tuple(self._iterators):
            iterator.submit_all()
        for thread in self._threads:
            thread.join()
        self._dispatcher.close()

    def _check(self, chunksize: int | None) -> None:
        parse_chunk_size("auto" if chunksize is None else chunksize)
        self._check_open()

    def _check_open(self) -> None:
        if self._closed:
            raise GangError("this pool is closed; make another")


def pool(processes: int | None = None, **more: Any) -> Pool:
    """As multiprocessing.Pool, for functions that use JAX, too; see Pool.

    processes:  cores to use, this machine's by default: as devices of one process, or as processes
    jax:        True: trace and compile every function, or raise NotTraceable; False: none; None: those that use JAX
    hosts, backend, platform, env, options:  as for Gang; over hosts there is one process with devices on each
    """
    return Pool(MapDispatcher(processes, **more))


_pools: weakref.WeakSet[Pool] = weakref.WeakSet()


def _terminate_all() -> None:
    for one in tuple(_pools):
        one.terminate()


atexit.register(_terminate_all)  # before the gangs', which was registered first: a pool holds its gang
