"""The contenders of `bench map`. A started contender gets a workload and returns seconds and some results."""

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

from jaxrun import Gang, pool

SHOWN = 50  # results that are compared
_CHUNKS_PER_CORE = 8


@dataclass(frozen=True)
class Workload:
    """One function, for JAX, for a numpy array and in plain Python. `few`: number of items for a slow pool."""

    name: str
    items: int
    few: int
    jax: Callable[[Any], Any] | None
    numpy: Callable[[Any], Any] | None
    python: Callable[[Any], Any] | None

    def inputs(self) -> Any:
        if self.jax is None:
            return range(self.items)
        shape = (self.items, 3) if self.jax is functions.ode else (self.items,)
        return np.random.default_rng(0).standard_normal(shape).astype(np.float32)

    @property
    def right(self) -> Any:
        """Return the first results."""
        few = self.inputs()[:SHOWN]
        return self.numpy(few) if self.numpy else [self.python(one) for one in few]  # type: ignore[misc]


WORKLOADS = (
    Workload("a: 1e6 numbers", 10**6, 0, functions.maths, functions.maths_numpy, None),
    Workload("a: 1e7 numbers", 10**7, 0, functions.maths, functions.maths_numpy, None),
    Workload("b: 4e3 points", 4000, 400, functions.ode, None, functions.ode_python),
    Workload("b: 4e5 points", 400_000, 400, functions.ode, None, functions.ode_python),
    Workload("c: 1e4 calls", 10_000, 10_000, None, None, functions.words),
)
Outcome = tuple[float, Any, int]  # seconds, the first results, items
Mapper = Callable[[Workload, Any], Outcome]


@dataclass(frozen=True)
class Contender:
    """One way to map. `start` is entered once; `does` says which workloads it can do."""

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


def _pool_of_items(stack: ExitStack) -> Mapper:
    workers = stack.enter_context(multiprocessing.get_context("fork").Pool(cores()))

    def run(work: Workload, xs: Any) -> Outcome:
        items = xs if work.jax is None else xs[: work.few].tolist()
        return timed(lambda: workers.map(work.python, items), work.few)  # type: ignore[arg-type]

    return run


def _pool_of_chunks(stack: ExitStack) -> Mapper:
    workers = stack.enter_context(multiprocessing.get_context("fork").Pool(cores()))

    def run(work: Workload, xs: Any) -> Outcome:
        chunks = np.array_split(xs, _CHUNKS_PER_CORE * cores())
        return timed(lambda: np.concatenate(workers.map(work.numpy, chunks, 1)), work.items)  # type: ignore[arg-type]

    return run


def _shard_map(stack: ExitStack) -> Mapper:
    """JAX in a separate process, which measures itself and sends only the first results."""
    talk = stack.enter_context(_jax_process())

    def run(work: Workload, xs: Any) -> Outcome:
        talk.send(work)
        seconds, results = talk.recv()
        return seconds, results, work.items

    return run


@contextlib.contextmanager
def _jax_process() -> Iterator[Any]:
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_map_by_hand, args=(theirs,), daemon=True)
    process.start()
    theirs.close()  # so that this process notices the end of the other
    yield ours
    with contextlib.suppress(BrokenPipeError):
        ours.send(None)
    process.join()


def _map_by_hand(talk: Any) -> None:
    os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(cores())}
    import jax
    from jax.sharding import Mesh, PartitionSpec

    functions_of: dict[str, Any] = {}
    inputs: dict[str, Any] = {}
    mesh = Mesh(np.array(jax.devices()), ("items",))
    spec = PartitionSpec("items")
    while (work := talk.recv()) is not None:
        mapped = jax.shard_map(jax.vmap(work.jax), mesh=mesh, in_specs=spec, out_specs=spec)
        compiled = functions_of.setdefault(work.jax.__name__, jax.jit(mapped))
        xs = inputs.setdefault(work.name, work.inputs())
        began = time.perf_counter()
        results = np.asarray(compiled(xs))
        talk.send((time.perf_counter() - began, results[:SHOWN]))


def _gang(processes: int, devices: int) -> Callable[[ExitStack], Mapper]:
    def start(stack: ExitStack) -> Mapper:
        gang = stack.enter_context(Gang(processes, devices, platform="cpu"))
        return lambda work, xs: timed(
            lambda: gang.map(work.jax or work.python, xs, jax=work.jax is not None),  # type: ignore[arg-type]
            work.items,
        )

    return start


def _our_pool(jax: bool) -> Callable[[ExitStack], Mapper]:
    def start(stack: ExitStack) -> Mapper:
        ours = stack.enter_context(pool(jax=jax, platform="cpu"))
        return lambda work, xs: timed(lambda: ours.map(work.jax or work.python, xs), work.items)  # type: ignore[arg-type]

    return start


def _with_jax(work: Workload) -> bool:
    return work.jax is not None


def _always(work: Workload) -> bool:
    return True


SHARD_MAP = "shard_map by hand"
POOL_ITEMS, POOL_CHUNKS = "Pool.map, fork", "Pool.map of chunks, fork"
PYTHON_POOL = "jaxrun.pool, jax=False"
ONE_PROCESS = f"gang.map, 1 x {cores()}"
CONTENDERS = (
    # Contenders that fork come first, while this process has no threads.
    Contender(POOL_ITEMS, _pool_of_items, lambda work: work.python is not None),
    Contender(POOL_CHUNKS, _pool_of_chunks, lambda work: work.numpy is not None),
    Contender(SHARD_MAP, _shard_map, _with_jax),
    Contender(ONE_PROCESS, _gang(1, cores()), _with_jax),
    Contender(f"gang.map, {cores()} x 1", _gang(cores(), 1), _always),
    Contender("jaxrun.pool", _our_pool(True), _with_jax),
    Contender(PYTHON_POOL, _our_pool(False), lambda work: work.jax is None),
)
