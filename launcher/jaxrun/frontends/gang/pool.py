"""Gangs for one purpose: launch, for one call; pool, to map over all devices, in place of multiprocessing.Pool.

    with jaxrun.pool() as pool:
        results = pool.map(f, xs)

The function is vmapped and compiled, and runs on the devices of one process for each host. With `jax=False` it runs as
plain Python, in one process for each core.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, Self

from jaxrun.errors import UsageError
from jaxrun.frontends.gang.call import Results
from jaxrun.frontends.gang.gang import Gang
from jaxrun.frontends.gang.gang_errors import GangError
from jaxrun.frontends.gang.keywords import ARGUMENTS, check_keywords, check_passed_on
from jaxrun.frontends.gang.map_call import map_items
from jaxrun.frontends.gang.spec import GangSpec
from jaxrun.protocol.probe_messages import Gpus
from jaxrun.spec.job.devices import probe_machine
from jaxrun.spec.job.job import Job
from jaxrun.spec.job.layout import decide_layout, wanted_platforms


class Pool:
    """Maps functions over items, in place of multiprocessing.Pool; made by `pool`.

    >>> with jaxrun.pool(2, jax=False) as pool:
    ...     pool.starmap(divmod, [(7, 2), (9, 4)])
    [(3, 1), (2, 1)]
    """

    def __init__(self, gang: Gang, *, jax: bool) -> None:
        self._gang, self._jax = gang, jax
        self._closed = False

    def map(self, func: Callable[[Any], Any], iterable: Iterable[Any], chunksize: int | None = None) -> Any:
        """Apply `func` to each item; returns NumPy arrays, or with `jax=False` a list, in the order of the items.

        chunksize:  how many items a device, or a process, takes at once

        Raises what `func` raises, and NotTraceable if JAX cannot compile it.
        """
        return self._map(func, iterable, chunksize, unpack_items=False)

    def starmap(self, func: Callable[..., Any], iterable: Iterable[Any], chunksize: int | None = None) -> Any:
        """As `map`, but each item is a tuple of arguments for `func`."""
        return self._map(func, iterable, chunksize, unpack_items=True)

    def __repr__(self) -> str:
        return f"<pool: {'closed' if self._closed else self._gang}>"

    def close(self) -> None:
        """Accept no more work."""
        self._closed = True

    def join(self) -> None:
        """Wait until all processes have ended. Call `close` first."""
        if not self._closed:
            raise ValueError("the pool still runs; close() it before join()")
        self._gang.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
        self.join()

    def _map(self, func: Callable[..., Any], iterable: Iterable[Any], chunk: int | None, *, unpack_items: bool) -> Any:
        if self._closed:
            raise GangError("this pool is closed; make another")
        # A tuple would be one tree of arrays for Gang.map; here it is a sequence of items, like a list.
        items = iterable if hasattr(iterable, "__array__") else list(iterable)
        return map_items(self._gang, func, items, chunk=chunk, jax=self._jax, unpack_items=unpack_items)


def launch(fn: Callable[..., Any], *args: Any, timeout: float | None = None, **kwargs: Any) -> Results:
    """Start a job, call `fn(*args, **kwargs)` on each of its ranks, and end the job; returns the results by rank.

    Gang takes the keywords that describe the job; `fn` gets all others. Results and errors are the same as in Gang.run.

    >>> jaxrun.launch(sum, [1, 2], processes=2)
    (3, 3)
    """
    named = {name: kwargs.pop(name) for name in GangSpec.__struct_fields__ if name in kwargs}
    check_passed_on(fn, kwargs)
    with Gang(**named) as gang:
        return gang.run(fn, *args, timeout=timeout, **kwargs)


def pool(processes: int | None = None, *, jax: bool = True, **gang: Any) -> Pool:
    """Start processes that map functions over items. End them with `close` and `join`, or a `with`.

    processes:  how many cores to use, by default all of this machine: as devices of one process, or with jax=False as
                processes
    jax:        False calls functions as plain Python, item by item

    The other arguments are Gang's, except devices. With several hosts, each has one process with devices.

    >>> with jaxrun.pool(2) as pool:
    ...     pool.map(lambda x: x * x, [1, 2, 3])
    array([1, 4, 9], dtype=int32)
    """
    if processes is not None and (isinstance(processes, bool) or not isinstance(processes, int) or processes < 1):
        raise UsageError(f"processes of a pool must be a whole number from 1, not {processes!r}")
    check_keywords("pool", gang, (ARGUMENTS - {"devices"}) | {"jax"})
    cores, spec = processes or len(os.sched_getaffinity(0)), GangSpec(**gang)
    hosts, platform = spec.hosts or 1, spec.platform
    if jax:
        return Pool(Gang(hosts, _devices_per_process(platform, cores, hosts, os.environ), **gang), jax=True)
    gang["platform"] = "cpu" if platform == "auto" else platform
    return Pool(Gang(math.ceil(cores / hosts) * hosts, 1, **gang), jax=False)


def _devices_per_process(platform: str, cores: int, hosts: int, environ: Mapping[str, str]) -> int | None:
    """Return how many devices a process should have: all GPUs of a machine, or as many CPU devices as it has cores.

    None for a TPU, which has its own number.
    """
    job = Job(program=("pool",), platform=platform)
    layout = decide_layout(job, probe_machine(wanted_platforms(job, environ), environ), environ)
    if layout.gpus != Gpus():
        return max(1, len(layout.gpus.names) // hosts)
    return max(1, cores // hosts) if layout.platform == "cpu" else layout.devices_per_process
