"""How a pool runs a function: compiled on devices if it uses JAX, else as plain Python in processes."""

from __future__ import annotations

import itertools
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from jaxrun.errors import UsageError
from jaxrun.frontends.gang.gang import Gang
from jaxrun.frontends.map import gang_map
from jaxrun.frontends.map.gang_executor import GangExecutor
from jaxrun.frontends.map.items import NotTraceable
from jaxrun.frontends.map.jax_detection import uses_jax
from jaxrun.frontends.map.local_executor import LocalExecutor
from jaxrun.frontends.map.python_map import PLAIN_PYTHON, BatchOutcome, PythonMap, pickle_function
from jaxrun.frontends.map.results import settle
from jaxrun.frontends.map.stats import MapStats, last_stats
from jaxrun.protocol.map_messages import CallBatch
from jaxrun.spec.job.devices import Gpus, probe_machine
from jaxrun.spec.job.environment import worker_settings
from jaxrun.spec.job.job import Job
from jaxrun.spec.job.layout import Layout, decide_layout, wanted_platforms


class MapDispatcher:
    """Decides for each call of a pool, and starts the gang or the processes that it needs. Arguments as for `pool`."""

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
        self._make_gang = partial(Gang, hosts=hosts, backend=backend, env=env, options=options)
        self._lock = threading.Lock()
        self._device_gang: Gang | None = None
        self._executor: LocalExecutor | GangExecutor
        if self._hosts == 1 and backend == "local" and platform in ("auto", "cpu") and not options:
            self._executor = LocalExecutor(self._cores, _environment_of_processes(self._cores, env or {}))
        else:
            self._executor = GangExecutor(math.ceil(self._cores / self._hosts) * self._hosts, self._start_plain_gang)
        self.explanation = "nothing has been mapped yet"

    def map(self, func: Callable[..., Any], items: Any, chunk: int | None, *, unpack_items: bool) -> Any:
        """Return all results: arrays of them from devices, a list from plain Python."""
        if not self._tries_devices(func):
            return self._map_python(func, items, chunk, unpack_items, _not_for_jax(func))
        try:
            gang = self._started_device_gang()
            results = gang_map.map(
                gang, func, items, chunk="auto" if chunk is None else chunk, unpack_items=unpack_items
            )
        except NotTraceable as refusal:
            if self._jax:
                raise
            return self._map_python(func, items, chunk, unpack_items, _first_line(refusal))
        self.explanation = f"{_name(func)} uses JAX: {last_stats(gang)}"
        return results

    def imap(self, func: Callable[..., Any], xs: Iterable[Any], chunk: int | None, *, ordered: bool) -> Iterator[Any]:
        """Return an iterator over the results."""
        if not self._tries_devices(func):
            return self._imap_python(func, xs, chunk, ordered, _not_for_jax(func))
        return self._imap_on_devices(func, iter(xs), chunk, ordered)

    def apply(
        self, func: Callable[..., Any], args: Sequence[Any], kwds: Mapping[str, Any] | None, future: Future[Any]
    ) -> None:
        """Start one call, always as plain Python; its outcome is that of `future`."""
        batch = CallBatch(pickle_function(func, kwds), True, [tuple(args)], continue_on_error=False)
        outcome: Future[BatchOutcome] = Future()
        outcome.add_done_callback(lambda done: settle(future, partial(_only_result, done)))
        self._executor.submit(batch, outcome)

    def close(self) -> None:
        """Wait for all that has been started as plain Python, and end its processes."""
        self._executor.close()

    def close_devices(self) -> None:
        if self._device_gang is not None:
            self._device_gang.close()

    def terminate(self) -> None:
        """Kill what runs as plain Python."""
        self._executor.terminate()

    def _tries_devices(self, func: Callable[..., Any]) -> bool:
        return uses_jax(func) if self._jax is None else self._jax

    def _map_python(
        self, func: Callable[..., Any], items: Any, chunk: int | None, unpack_items: bool, why: str
    ) -> list[Any]:
        began = time.perf_counter()
        code = pickle_function(func, None)
        run = PythonMap(self._executor, code, items, batch_size=chunk, unpack_items=unpack_items)
        results = run.results()
        platform = "cpu" if self._platform == "auto" else self._platform
        shape = (PLAIN_PYTHON, self._executor.processes, 1, platform)
        self.explanation = f"{why}: {MapStats(*shape, run.largest_batch, run.item_count, time.perf_counter() - began)}"
        return results

    def _imap_python(
        self, func: Callable[..., Any], xs: Iterable[Any], chunk: int | None, ordered: bool, why: str
    ) -> PythonMap:
        self.explanation = f"{why}: {PLAIN_PYTHON}"
        code = pickle_function(func, None)
        return PythonMap(self._executor, code, xs, batch_size=chunk, continue_on_error=True, ordered=ordered)

    def _imap_on_devices(
        self, func: Callable[..., Any], xs: Iterator[Any], chunk: int | None, ordered: bool
    ) -> Iterator[Any]:
        read: list[Any] = []  # items read before it was known that JAX can trace the function
        is_traced = False

        def remembered() -> Iterator[Any]:
            for item in xs:
                if not is_traced:
                    read.append(item)
                yield item

        gang = self._started_device_gang()
        results = gang_map.imap(gang, func, remembered(), chunk="auto" if chunk is None else chunk, ordered=ordered)
        try:
            for result in results:
                is_traced = True
                read.clear()
                yield result
        except NotTraceable as refusal:
            if self._jax or is_traced:
                raise
            yield from self._imap_python(func, itertools.chain(read, xs), chunk, ordered, _first_line(refusal))
        else:
            self.explanation = f"{_name(func)} uses JAX: {last_stats(gang)}"
        finally:
            results.close()

    def _start_plain_gang(self) -> Gang:
        platform = "cpu" if self._platform == "auto" else self._platform  # plain Python needs no GPU
        return self._make_gang(self._executor.processes, 1, platform=platform)

    def _started_device_gang(self) -> Gang:
        with self._lock:
            if self._device_gang is None:
                devices = devices_per_process(self._platform, self._cores, self._hosts, os.environ)
                self._device_gang = self._make_gang(self._hosts, devices, platform=self._platform)
            return self._device_gang


def devices_per_process(platform: str, cores: int, hosts: int, environ: Mapping[str, str]) -> int | None:
    """Return how many devices a process should have: all GPUs of a machine, or as many CPU devices as it has cores.

    None for a TPU, which has its own number.
    """
    job = Job(program=("pool",), platform=platform)
    layout = _layout(job, environ)
    if layout.gpus != Gpus():
        return max(1, len(layout.gpus.names) // hosts)
    return max(1, cores // hosts) if layout.platform == "cpu" else layout.devices_per_process


def _environment_of_processes(processes: int, env: Mapping[str, str]) -> dict[str, str]:
    """Return what the ranks of a gang with one CPU device each would find in their environment."""
    job = Job(program=("pool",), platform="cpu", processes=processes, devices_per_process=1)
    environ = {**os.environ, **env}
    return {**worker_settings(job, _layout(job, environ), environ, cores=len(os.sched_getaffinity(0))), **env}


def _layout(job: Job, environ: Mapping[str, str]) -> Layout:
    return decide_layout(job, probe_machine(wanted_platforms(job, environ), environ), environ)


def _only_result(done: Future[BatchOutcome]) -> Any:
    outcome = done.result()
    if outcome.errors:
        raise outcome.errors[0]
    return outcome.results[0]


def _not_for_jax(func: Callable[..., Any]) -> str:
    return f"{_name(func)} does not use JAX"


def _first_line(refusal: NotTraceable) -> str:
    return str(refusal).partition("\n")[0]


def _name(func: Callable[..., Any]) -> str:
    return str(getattr(func, "__name__", type(func).__name__))
