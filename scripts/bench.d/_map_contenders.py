"""Who maps in `bench map`. A contender, once started, takes a workload and returns seconds and some results."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
from _programs import workloads as functions

from jaxrun import Gang
from jaxrun.map import gang_map
from jaxrun.map.pool import pool

SHOWN = 50  # results that are compared
_CHUNKS_PER_CORE = 8


@dataclass(frozen=True)
class Workload:
    """`few`: items for those that take one at a time, where that is slow; rates are per item."""

    name: str
    items: int
    few: int
    jax: Callable[[Any], Any] | None
    numpy: Callable[[Any], Any] | None
    python: Callable[[Any], Any]

    def inputs(self) -> Any:
        if self.jax is None:
            return range(self.items)
        shape = (self.items, 3) if self.jax is functions.ode else (self.items,)
        return np.random.default_rng(0).standard_normal(shape).astype(np.float32)

    @property
    def right(self) -> Any:
        """The first results."""
        few = self.inputs()[:SHOWN]
        return self.numpy(few) if self.numpy else [self.python(one) for one in few]


_MATHS = (functions.maths, functions.maths_numpy, functions.maths_python)
_ODE = (functions.ode, functions.ode_numpy, functions.ode_python)
WORKLOADS = (
    Workload("a: 1e6 numbers", 10**6, 10**6, *_MATHS),
    Workload("a: 1e7 numbers", 10**7, 10**6, *_MATHS),
    Workload("b: 4e3 points", 4000, 400, *_ODE),
    Workload("b: 4e5 points", 400_000, 400, *_ODE),
    Workload("c: 1e4 calls", 10_000, 10_000, None, None, functions.words),
)
Outcome = tuple[float, Any, int]  # seconds, the first results, items
Mapper = Callable[[Workload, Any], Outcome]


@dataclass(frozen=True)
class Contender:
    """`start` is entered once; `does` says for which workloads."""

    name: str
    start: Callable[[ExitStack], Mapper]
    does: Callable[[Workload], bool]


def timed(call: Callable[[], Any], items: int) -> Outcome:
    began = time.perf_counter()
    results = call()
    seconds = time.perf_counter() - began
    return seconds, [*results[:SHOWN]] if isinstance(results, list) else results[:SHOWN], items


def cores() -> int:
    return len(os.sched_getaffinity(0))


def _numpy_alone(stack: ExitStack) -> Mapper:
    return lambda work, xs: timed(lambda: work.numpy(xs), work.items)  # type: ignore[misc]


def _loop(stack: ExitStack) -> Mapper:
    return lambda work, xs: timed(lambda: [work.python(x) for x in xs[: work.few // 4]], work.few // 4)


def _pool_by_item(method: str) -> Callable[[ExitStack], Mapper]:
    def start(stack: ExitStack) -> Mapper:
        workers = stack.enter_context(multiprocessing.get_context(method).Pool(cores()))

        def run(work: Workload, xs: Any) -> Outcome:
            items = xs if work.jax is None else xs[: work.few].tolist()
            return timed(lambda: workers.map(work.python, items), work.few)

        return run

    return start


def _pool_by_chunk(method: str) -> Callable[[ExitStack], Mapper]:
    def start(stack: ExitStack) -> Mapper:
        workers = stack.enter_context(multiprocessing.get_context(method).Pool(cores()))

        def run(work: Workload, xs: Any) -> Outcome:
            return timed(lambda: np.concatenate(workers.map(work.numpy, _chunks(xs), 1)), work.items)

        return run

    return start


def _joblib(stack: ExitStack) -> Mapper:
    import joblib

    workers = stack.enter_context(joblib.Parallel(n_jobs=cores()))

    def run(work: Workload, xs: Any) -> Outcome:
        if work.numpy is None:
            return timed(lambda: list(workers(joblib.delayed(work.python)(x) for x in xs)), work.items)
        return timed(lambda: np.concatenate(workers(joblib.delayed(work.numpy)(x) for x in _chunks(xs))), work.items)

    return run


def _chunks(xs: Any) -> list[Any]:
    return np.array_split(xs, _CHUNKS_PER_CORE * cores())


def _by_hand(kind: str) -> Callable[[ExitStack], Mapper]:
    """JAX in one process of its own, which measures itself; nothing is sent but the first results."""

    def start(stack: ExitStack) -> Mapper:
        talk = stack.enter_context(_jax_process(kind))

        def run(work: Workload, xs: Any) -> Outcome:
            talk.send(work)
            seconds, results = talk.recv()
            return seconds, results, work.items

        return run

    return start


@contextlib.contextmanager
def _jax_process(kind: str) -> Iterator[Any]:
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    devices = cores() if kind == "shard_map" else 1
    process = spawn.Process(target=_map_by_hand, args=(theirs, kind, devices), daemon=True)
    process.start()
    theirs.close()  # so that its end is told here
    yield ours
    with contextlib.suppress(BrokenPipeError):
        ours.send(None)
    process.join()


def _map_by_hand(talk: Any, kind: str, devices: int) -> None:
    os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
    import jax
    from jax.sharding import Mesh, PartitionSpec

    functions_of: dict[str, Any] = {}
    inputs: dict[str, Any] = {}
    mesh = Mesh(np.array(jax.devices()), ("items",))
    spec = PartitionSpec("items")
    while (work := talk.recv()) is not None:
        mapped = jax.vmap(work.jax)
        if kind == "shard_map":
            mapped = jax.shard_map(mapped, mesh=mesh, in_specs=spec, out_specs=spec)
        compiled = functions_of.setdefault(work.jax.__name__, jax.jit(mapped))
        xs = inputs.setdefault(work.name, work.inputs())
        began = time.perf_counter()
        results = np.asarray(compiled(xs))
        talk.send((time.perf_counter() - began, results[:SHOWN]))


class _Far(Gang):
    """Hosts share no memory; simulated ones would."""

    shares_memory = False


def _gang(kind: type[Gang], processes: int, devices: int, hosts: int | None = None) -> Callable[[ExitStack], Mapper]:
    def start(stack: ExitStack) -> Mapper:
        gang = stack.enter_context(kind(processes, devices, hosts=hosts, platform="cpu"))

        def run(work: Workload, xs: Any) -> Outcome:
            function = work.jax or work.python
            return timed(lambda: gang_map.map(gang, function, xs, jax=work.jax is not None), work.items)

        return run

    return start


def _our_pool(stack: ExitStack) -> Mapper:
    ours = stack.enter_context(pool(platform="cpu"))
    return lambda work, xs: timed(lambda: ours.map(work.jax or work.python, xs), work.items)


def _with_jax(work: Workload) -> bool:
    return work.jax is not None


def _always(work: Workload) -> bool:
    return True


SHARD_MAP = "shard_map by hand"
POOL_ITEMS, POOL_CHUNKS = "Pool.map, fork", "Pool.map of chunks, fork"
ONE_PROCESS = f"gang.map, 1 x {cores()}"
CONTENDERS = (
    # Those that fork come first, while this process has no threads.
    Contender(POOL_ITEMS, _pool_by_item("fork"), _always),
    Contender(POOL_CHUNKS, _pool_by_chunk("fork"), _with_jax),
    Contender("Pool.map, spawn", _pool_by_item("spawn"), _always),
    Contender("Pool.map of chunks, spawn", _pool_by_chunk("spawn"), _with_jax),
    Contender("joblib", _joblib, _always),
    Contender("numpy alone", _numpy_alone, _with_jax),
    Contender("a loop", _loop, lambda work: work.jax is None),
    Contender("jit(vmap), 1 device", _by_hand("vmap"), _with_jax),
    Contender(SHARD_MAP, _by_hand("shard_map"), _with_jax),
    Contender(ONE_PROCESS, _gang(Gang, 1, cores()), _with_jax),
    Contender(f"gang.map, {cores()} x 1", _gang(Gang, cores(), 1), _always),
    Contender("gang.map, 2 hosts", _gang(_Far, 2, max(1, cores() // 2), hosts=2), _always),
    Contender("jaxrun.pool", _our_pool, _always),
)
