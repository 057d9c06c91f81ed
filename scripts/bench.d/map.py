"""Mapping a function: multiprocessing, JAX by hand and jaxrun, on three workloads.

Measures items per second of a warm call. All contenders take turns within a round; ratios are taken within a round;
medians. "first" is the first call, with the start of processes and the compilation. "Pool.map" calls a plain Python
function for each item, "Pool.map of chunks" a function of numpy arrays. Only a wrong result makes the exit status 1.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))  # spawned processes import this directory's modules, too

from _bench import Bench, Outcome, grouped, median_ratio, progress, shown, table
from _map_contenders import (
    CONTENDERS,
    ONE_PROCESS,
    POOL_CHUNKS,
    POOL_ITEMS,
    PYTHON_POOL,
    SHARD_MAP,
    WORKLOADS,
    Contender,
    Mapper,
    Workload,
    cores,
)

# workload, contender, the contender to compare with, and the ratio of items per second that it should reach
GOALS = (
    ("a: 1e7 numbers", ONE_PROCESS, SHARD_MAP, 1 / 1.3),
    ("b: 4e5 points", ONE_PROCESS, SHARD_MAP, 1 / 1.3),
    ("a: 1e7 numbers", ONE_PROCESS, POOL_CHUNKS, 4.0),
    ("b: 4e5 points", ONE_PROCESS, POOL_ITEMS, 100.0),
    ("c: 1e4 calls", f"gang.map, {cores()} x 1", POOL_ITEMS, 1.0),
    ("c: 1e4 calls", PYTHON_POOL, POOL_ITEMS, 1.0),
)


@dataclass(frozen=True)
class Sample:
    """One call; round 0 has the first call. `rate` in items per second."""

    workload: str
    contender: str
    round: int
    seconds: float
    rate: float


def measure(work: Workload, contender: Contender, mapper: Mapper, xs: Any, turn: int, right: Any) -> Sample:
    began = time.perf_counter()
    seconds, some, items = mapper(work, xs)
    if turn == 0:
        seconds = max(seconds, time.perf_counter() - began)
        if not np.allclose(np.asarray(some), np.asarray(right)[: len(some)], rtol=1e-2, atol=1e-2):
            raise ValueError(f"{contender.name} has wrong results for {work.name}")
    return Sample(work.name, contender.name, turn, seconds, items / seconds)


def ratio(samples: Sequence[Sample], workload: str, contender: str, against: str) -> float | None:
    """Return the median of the rounds' ratios of items per second; None if one of the two was left out."""
    warm = grouped((one for one in samples if one.workload == workload and one.round), lambda one: one.contender)
    ours, theirs = ({one.round: one.rate for one in warm.get(name, ())} for name in (contender, against))
    return median_ratio(ours, theirs)


def render(samples: Sequence[Sample]) -> str:
    """Return a table, the fastest first, with ratios to the hand-written shard_map, or for Python to a pool."""
    rows = []
    for workload, group in grouped(samples, lambda one: one.workload).items():
        against = SHARD_MAP if any(one.contender == SHARD_MAP for one in group) else POOL_ITEMS
        found = []
        for contender, own in grouped(group, lambda one: one.contender).items():
            rate = statistics.median(one.rate for one in own if one.round)
            relative = shown(ratio(samples, workload, contender, against), ".3g")
            found.append((rate, [workload, contender, _rate(rate), relative, f"{own[0].seconds:.2f}"]))
        rows += [row for _, row in sorted(found, reverse=True)]
    goals = []
    for workload, contender, against, wanted in GOALS:
        reached = ratio(samples, workload, contender, against)
        if reached is not None:
            name = f"{workload}: {contender} / {against}"
            goals.append([name, f"{reached:.2f}", f"{wanted:.2f}", "yes" if reached >= wanted else "no"])
    header = ["workload", "contender", "items/s", "/ by hand, or Pool.map", "first, s"]
    return f"{table(header, rows, left=2)}\n\n{table(['goal', 'reached', 'wanted', ''], goals, left=1)}"


def _rate(rate: float) -> str:
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if rate >= size:
            return f"{rate / size:.3g} {unit}"
    return f"{rate:.3g}"


def run(options: argparse.Namespace) -> Outcome:
    works = [one for one in WORKLOADS if one.name.startswith(tuple(options.work or ("",)))]
    chosen = [one for one in CONTENDERS if one.name.startswith(tuple(options.only or ("",)))]
    samples = []
    with ExitStack() as stack:
        mappers = {one.name: one.start(stack) for one in chosen}
        for work in works:
            xs, right = work.inputs(), work.right
            doing = [one for one in chosen if one.does(work)]
            for turn in range(options.rounds + 1):
                samples += [measure(work, one, mappers[one.name], xs, turn, right) for one in doing]
            progress(f"{work.name}: done")
    return Outcome(render(samples), samples)


if __name__ == "__main__":
    bench = Bench("map", __doc__, rounds=7, mine=("--only", "gang.map", "--only", "jaxrun.pool"))
    bench.add_option("--work", action="append", metavar="TEXT", help="workloads whose name begins so")
    bench.add_option("--only", action="append", metavar="TEXT", help="contenders whose name begins so")
    sys.exit(bench.main(run))
