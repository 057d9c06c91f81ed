"""The two ways of a pool, and which of them a function takes: compiled on devices, or plain Python in processes."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from jaxrun.api import Gang
from jaxrun.errors import UsageError
from jaxrun.gang.exceptions import GangError
from jaxrun.job.devices import Gpus
from jaxrun.job.job import Job
from jaxrun.job.layout import decide_layout, wanted_platforms
from jaxrun.job.machine import probe_machine
from jaxrun.map import gang_map
from jaxrun.map.crew import Crew
from jaxrun.map.errands import PLAIN, pickled
from jaxrun.map.items import NotTraceable, parse_chunk_size
from jaxrun.map.jax_detection import uses_jax
from jaxrun.map.results import AsyncResult, ItemIterator, of_task, of_thread
from jaxrun.map.stats import MapStats, last_stats
from jaxrun.map.tasks import Task


class Ways:
    """Starts a gang for each way when it is taken first; arguments as for `pool`."""

    def __init__(
        self,
        processes: int | None = None,
        *,
        jax: bool | None = None,
        hosts: int | None = None,
        backend: str = "local",
        platform: str = "auto",
        env: Mapping[str, str] | None = None,
        options: Sequence[str] = (),
    ) -> None:
        if processes is not None and (isinstance(processes, bool) or not isinstance(processes, int) or processes < 1):
            raise UsageError(f"processes of a pool must be a whole number from 1, not {processes!r}")
        self._cores = processes or len(os.sched_getaffinity(0))
        self._jax, self._hosts, self._platform = jax, hosts or 1, platform
        self._gang_of = partial(Gang, hosts=hosts, backend=backend, env=env, options=options)
        self._devices: Gang | None = None
        self._lock = threading.Lock()
        self._closed = False
        self.crew = Crew(self._start_crew)
        self.why = "nothing has been mapped yet"

    def map(
        self, func: Callable[..., Any], xs: Iterable[Any], chunk: int | None, *, star: bool, apart: bool = False
    ) -> AsyncResult:
        """All results; `apart`: on devices, too, it goes on in a thread."""
        size: int | str = "auto" if chunk is None else chunk
        parse_chunk_size(size)
        # A tuple would be one tree of arrays for gang.map; here it is a sequence of items, like a list.
        items = xs if hasattr(xs, "__array__") else list(xs)
        if not self._tries_devices(func):
            return self._map_plain(func, items, chunk, star, _not_for_jax(func))

        def on_devices() -> Any:
            try:
                gang = self._device_gang()
                results = gang_map.map(gang, func, items, chunk=size, star=star)
            except NotTraceable as refusal:
                if self._jax:
                    raise
                return self._map_plain(func, items, chunk, star, _first_line(refusal)).get()
            self.why = f"{_name(func)} uses JAX: {last_stats(gang)}"
            return results

        return of_thread(on_devices, apart=apart)

    def imap(self, func: Callable[..., Any], xs: Iterable[Any], chunk: int | None, *, ordered: bool) -> Iterator[Any]:
        """Results one by one."""
        parse_chunk_size("auto" if chunk is None else chunk)
        if not self._tries_devices(func):
            return self._imap_plain(func, xs, chunk, ordered, _not_for_jax(func))
        return self._imap_on_devices(func, iter(xs), chunk, ordered)

    def apply(self, func: Callable[..., Any], args: Sequence[Any], kwds: Mapping[str, Any] | None) -> AsyncResult:
        """One call, always plain."""
        task = self.crew.give(Task.over_all(pickled(func, kwds), [tuple(args)], star=True))
        return of_task(task, lambda results: results[0])

    def close(self) -> None:
        self._closed = True
        self.crew.close()

    def join(self) -> None:
        self.crew.join()
        if self._devices is not None:
            self._devices.close()

    # ---- the choice

    def _tries_devices(self, func: Callable[..., Any]) -> bool:
        if self._closed:
            raise GangError("this pool is closed; make another")
        return uses_jax(func) if self._jax is None else self._jax

    def _map_plain(self, func: Callable[..., Any], items: Any, chunk: int | None, star: bool, why: str) -> AsyncResult:
        began = time.perf_counter()

        def told(results: list[Any]) -> list[Any]:
            assert self.crew.gang is not None
            seconds = time.perf_counter() - began
            self.why = f"{why}: {MapStats.of(self.crew.gang, PLAIN, task.largest, task.dealt, seconds)}"
            return results

        task = self.crew.give(Task.over_all(pickled(func, None), items, star=star, size=chunk))
        return of_task(task, told)

    def _imap_plain(
        self, func: Callable[..., Any], xs: Iterable[Any], chunk: int | None, ordered: bool, why: str
    ) -> Iterator[Any]:
        self.why = f"{why}: {PLAIN}"
        task = self.crew.give(Task.over_all(pickled(func, None), xs, size=chunk, through=True))
        return ItemIterator(task, ordered=ordered)

    def _imap_on_devices(
        self, func: Callable[..., Any], xs: Iterator[Any], chunk: int | None, ordered: bool
    ) -> Iterator[Any]:
        taken: list[Any] = []  # before it was clear that the function can be traced

        def noting() -> Iterator[Any]:
            for item in xs:
                if not running:
                    taken.append(item)
                yield item

        running = False
        gang = self._device_gang()
        results = gang_map.imap(gang, func, noting(), chunk="auto" if chunk is None else chunk, ordered=ordered)
        try:
            for result in results:
                running = True
                taken.clear()
                yield result
        except NotTraceable as refusal:
            if self._jax or running:
                raise
            yield from self._imap_plain(func, itertools.chain(taken, xs), chunk, ordered, _first_line(refusal))
        else:
            self.why = f"{_name(func)} uses JAX: {last_stats(gang)}"
        finally:
            results.close()

    # ---- the gangs

    def _start_crew(self) -> Gang:
        platform = "cpu" if self._platform == "auto" else self._platform  # plain Python needs no GPU
        return self._gang_of(-(-self._cores // self._hosts) * self._hosts, 1, platform=platform)

    def _device_gang(self) -> Gang:
        with self._lock:
            if self._devices is None:
                devices = devices_of_a_process(self._platform, self._cores, self._hosts, os.environ)
                self._devices = self._gang_of(self._hosts, devices, platform=self._platform)
            return self._devices


def devices_of_a_process(platform: str, cores: int, hosts: int, environ: Mapping[str, str]) -> int | None:
    """All GPUs of this machine, or as many CPU devices as there are cores for a host; None for a TPU's own."""
    job = Job(program=("pool",), platform=platform)
    machine = probe_machine(wanted_platforms(job, environ), environ)
    layout = decide_layout(job, machine, environ)
    if layout.gpus != Gpus():
        return max(1, len(layout.gpus.names) // hosts)
    return max(1, cores // hosts) if layout.platform == "cpu" else layout.devices_per_process


def _not_for_jax(func: Callable[..., Any]) -> str:
    return f"{_name(func)} does not use JAX"


def _first_line(refusal: NotTraceable) -> str:
    return str(refusal).partition("\n")[0]


def _name(func: Callable[..., Any]) -> str:
    return str(getattr(func, "__name__", type(func).__name__))
