"""Warm gangs: what a start, a call and its data cost, compared with starting a job for each call.

"start" is the start of a gang after jax was imported once. "imports" is a call that imports the packages of --program,
which were imported before the fork (Gang(preload=…)). "none: …" are both for a gang without preloading. "first" is the
first program with a collective, with its compilation; "hot" a compiled program; "new" a program that is new at each
call; "empty" a call that does nothing; "to each" and "from each" carry an array. "job" is a whole `jaxrun -n N` with
one collective, in turn with the gangs of a round. Medians.
"""

from __future__ import annotations

import argparse
import importlib
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from _bench import Bench, Outcome, grouped, table
from _contenders import jaxrun
from _imports import BARE, ENVIRON, IMPORTS, why_not
from _jobs import started

from jaxrun import Gang

KINDS = (
    "job",
    "none: start",
    "none: imports",
    "start",
    "imports",
    "first",
    "hot",
    "new",
    "empty",
    "to each",
    "from each",
)
TIMES = {"empty": 200, "hot": 50, "new": 10, "to each": 5, "from each": 5}
TO_EACH, FROM_EACH = 32 * 2**20, 8 * 2**20  # bytes
PAUSE_S = 1.0  # before a start: the next launcher is made ready at leisure
LIMIT_S = 60.0


@dataclass(frozen=True)
class Sample:
    """Milliseconds that one operation took in one round."""

    size: int
    kind: str
    round: int
    ms: float


def collective(keep_it: bool) -> float:
    """Return a sum over all devices. If the function is kept, only the first call compiles."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    state: dict[str, Any] = sys.modules["builtins"].__dict__
    if not keep_it or "_kept_sum" not in state:
        mesh = jax.make_mesh((jax.device_count(),), ("x",))
        ones = np.ones(jax.device_count(), np.float32)
        sharding = NamedSharding(mesh, PartitionSpec("x"))
        array = jax.make_array_from_callback(ones.shape, sharding, lambda index: ones[index])
        state["_kept_sum"] = jax.jit(lambda x: x.sum()), array
    function, array = state["_kept_sum"]
    return float(function(array))


def nothing(*arguments: Any) -> None: ...


def imports(names: Sequence[str]) -> None:
    for name in names:
        importlib.import_module(name)


def timed(function: Callable[[], Any], times: int = 1) -> float:
    """Return the median in milliseconds."""
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        function()
        taken.append((time.perf_counter() - began) * 1000)
    return statistics.median(taken)


def measure(size: int, turn: int, program: str = BARE) -> list[Sample]:
    """Measure one round."""
    found = {"job": timed(partial(_job, size))}
    names = IMPORTS[program]
    gangs: list[Gang] = []
    time.sleep(PAUSE_S)
    found["none: start"] = timed(lambda: gangs.append(Gang(size, platform="cpu", env=ENVIRON, preload="none")))
    with gangs.pop() as gang:
        found["none: imports"] = timed(lambda: gang.run(imports, names))
    time.sleep(PAUSE_S)
    preload = list(names) or "none"
    found["start"] = timed(lambda: gangs.append(Gang(size, platform="cpu", env=ENVIRON, preload=preload)))
    with gangs[0] as gang:
        found["imports"] = timed(lambda: gang.run(imports, names))
        found["first"] = timed(lambda: gang.run(collective, True))
        large = np.ones(TO_EACH, np.uint8)
        calls: dict[str, Callable[[], Any]] = {
            "hot": lambda: gang.run(collective, True),
            "new": lambda: gang.run(collective, False),
            "empty": lambda: gang.run(nothing),
            "to each": lambda: gang.run(nothing, large),
            "from each": lambda: gang.run(np.ones, FROM_EACH, np.uint8),
        }
        found |= {kind: timed(call, TIMES[kind]) for kind, call in calls.items()}
    return [Sample(size, kind, turn, found[kind]) for kind in KINDS]


def _job(size: int) -> None:
    with started(jaxrun(size, ()), os.environ, {"BENCH_ADDRESS": ""}) as job:  # jaxrun knows it better
        if job.wait(LIMIT_S) is None or job.status() != 0:
            raise RuntimeError(f"the job of {size} did not end well:\n{job.output()}")


def render(samples: Sequence[Sample]) -> str:
    """Return a table of the medians; in brackets, as a fraction of a whole job."""
    groups = grouped(samples, lambda one: (one.size, one.kind))
    middle = {key: statistics.median(one.ms for one in group) for key, group in groups.items()}
    sizes = sorted({one.size for one in samples})
    rows = [
        [kind, *(f"{middle[size, kind]:.3g} ms ({middle[size, kind] / middle[size, 'job']:.2g})" for size in sizes)]
        for kind in KINDS
    ]
    return table(["", *(f"{size} ranks" for size in sizes)], rows, left=1) + "\n(in brackets: as a part of a whole job)"


def run(options: argparse.Namespace) -> Outcome:
    if reason := why_not(options.program):
        return Outcome(reason, [], [reason])
    Gang(1, platform="cpu").close()  # jax is imported once
    rounds = [(size, turn) for turn in range(1, options.rounds + 1) for size in options.processes]
    samples = [sample for size, turn in rounds for sample in measure(size, turn, options.program)]
    return Outcome(render(samples), samples)


if __name__ == "__main__":
    bench = Bench("gang", __doc__, rounds=5)
    bench.add_option("--program", choices=tuple(IMPORTS), default=BARE, help="what ranks import (default: bare)")
    bench.add_option("-n", "--processes", type=int, nargs="+", default=[2, 4, 8], metavar="N")
    sys.exit(bench.main(run))
