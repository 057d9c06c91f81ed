"""Mapping a function: multiprocessing, joblib, JAX by hand and jaxrun, on three workloads.

Items per second of a warm call, all contenders in turn within a round, ratios within the round; medians. "first" is
the first call, with the start of processes and compilation. "Pool.map" has a plain Python function of one item,
"Pool.map of chunks" and joblib one of numpy arrays. "2 hosts" are simulated on this machine, and chunks travel within
messages, as they do between hosts. Only a wrong result makes the exit status 1.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))  # spawned processes import this directory's modules, too

from _contenders import ROOT
from _map_contenders import (
    CONTENDERS,
    ONE_PROCESS,
    POOL_CHUNKS,
    POOL_ITEMS,
    SHARD_MAP,
    WORKLOADS,
    Contender,
    Mapper,
    Workload,
    cores,
)
from _report import keep, table, this_machine

# workload, contender, the one it is held against, and how many times as many items it should map
GOALS = (
    ("a: 1e7 numbers", ONE_PROCESS, SHARD_MAP, 1 / 1.3),
    ("b: 4e5 points", ONE_PROCESS, SHARD_MAP, 1 / 1.3),
    ("a: 1e7 numbers", ONE_PROCESS, POOL_CHUNKS, 4.0),
    ("b: 4e5 points", ONE_PROCESS, POOL_ITEMS, 100.0),
    ("c: 1e4 calls", f"gang.map, {cores()} x 1", POOL_ITEMS, 1.0),
    ("c: 1e4 calls", "jaxrun.pool", POOL_ITEMS, 1.0),
)


@dataclass(frozen=True)
class Sample:
    """One call; round 0 is the first one. `rate` in items per second."""

    workload: str
    contender: str
    round: int
    seconds: float
    rate: float


@dataclass(frozen=True)
class Summary:
    """`ratio` to the hand-written shard_map, or for Python to a pool."""

    workload: str
    contender: str
    rate: float
    ratio: float
    first: float


def measure(work: Workload, contender: Contender, mapper: Mapper, xs: Any, turn: int, right: Any) -> Sample:
    began = time.perf_counter()
    seconds, some, items = mapper(work, xs)
    if turn == 0:
        seconds = max(seconds, time.perf_counter() - began)
        if not np.allclose(np.asarray(some), np.asarray(right)[: len(some)], rtol=1e-2, atol=1e-2):
            raise ValueError(f"{contender.name} has wrong results for {work.name}")
    return Sample(work.name, contender.name, turn, seconds, items / seconds)


def run(works: Sequence[Workload], chosen: Sequence[Contender], rounds: int) -> list[Sample]:
    samples = []
    with ExitStack() as stack:
        mappers = {one.name: one.start(stack) for one in chosen}
        for work in works:
            xs, right = work.inputs(), work.right
            doing = [one for one in chosen if one.does(work)]
            for turn in range(rounds + 1):
                samples += [measure(work, one, mappers[one.name], xs, turn, right) for one in doing]
            print(f"{work.name}: done", file=sys.stderr, flush=True)
    return samples


def ratio(samples: Sequence[Sample], workload: str, contender: str, against: str) -> float:
    """The median over the rounds of how many times as many items `contender` maps; nan where one was left out."""
    rates = {(one.contender, one.round): one.rate for one in samples if one.workload == workload and one.round}
    rounds = {turn for name, turn in rates if name == contender} & {turn for name, turn in rates if name == against}
    if not rounds:
        return float("nan")
    return statistics.median(rates[contender, turn] / rates[against, turn] for turn in rounds)


def summarize(samples: Sequence[Sample]) -> list[Summary]:
    found = []
    for workload, contender in dict.fromkeys((one.workload, one.contender) for one in samples):
        own = [one for one in samples if (one.workload, one.contender) == (workload, contender)]
        rate = statistics.median(one.rate for one in own if one.round)
        against = SHARD_MAP if any(one.contender == SHARD_MAP for one in samples if one.workload == workload) else ""
        relative = ratio(samples, workload, contender, against or POOL_ITEMS)
        found.append(Summary(workload, contender, rate, relative, own[0].seconds))
    return found


def render(summaries: Sequence[Summary], samples: Sequence[Sample]) -> str:
    rows = []
    for workload in dict.fromkeys(one.workload for one in summaries):
        of = sorted((one for one in summaries if one.workload == workload), key=lambda one: -one.rate)
        rows += [[workload, one.contender, _rate(one.rate), f"{one.ratio:.3g}", f"{one.first:.2f}"] for one in of]
    header = ["workload", "contender", "items/s", "/ by hand, or Pool.map", "first, s"]
    goals = [["goal", "", "reached", "wanted", ""]]
    for workload, contender, against, wanted in GOALS:
        reached = ratio(samples, workload, contender, against)
        if not math.isnan(reached):
            good = "yes" if reached >= wanted else "no"
            goals.append([f"{workload}: {contender} / {against}", "", f"{reached:.2f}", f"{wanted:.2f}", good])
    return f"{table(header, rows, left=2)}\n\n{table(goals[0], goals[1:], left=2)}"


def _rate(rate: float) -> str:
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if rate >= size:
            return f"{rate / size:.3g} {unit}"
    return f"{rate:.3g}"


def draw(summaries: Sequence[Summary], plt: Any) -> Any:
    works = list(dict.fromkeys(one.workload for one in summaries))
    names = list(dict.fromkeys(one.contender for one in summaries))
    figure, all_axes = plt.subplots(1, len(works), figsize=(3.2 * len(works), 4.5), sharey=True, layout="constrained")
    for axes, work in zip(np.atleast_1d(all_axes), works, strict=True):
        of = {one.contender: one.rate for one in summaries if one.workload == work}
        ours = ["C1" if name.startswith(("gang", "jaxrun")) else "C0" for name in of]
        axes.scatter(list(of.values()), [names.index(name) for name in of], color=ours)
        axes.set(title=work, xscale="log", xlabel="items/s", yticks=range(len(names)), yticklabels=names)
        axes.set_xlim(10 ** math.floor(math.log10(min(of.values()))), 10 ** math.ceil(math.log10(max(of.values()))))
        axes.grid(alpha=0.3)
        axes.tick_params(which="minor", labelbottom=False)
    np.atleast_1d(all_axes)[0].invert_yaxis()
    return figure


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench map", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, metavar="R", help="of each (default: 7)")
    parser.add_argument("--work", action="append", metavar="TEXT", help="workloads whose name begins so")
    parser.add_argument("--only", action="append", metavar="TEXT", help="contenders whose name begins so")
    parser.add_argument("--out", type=Path, default=ROOT / "bench-results", metavar="DIR")
    options = parser.parse_args(argv)
    machine = this_machine()
    print(machine, flush=True)
    works = [one for one in WORKLOADS if one.name.startswith(tuple(options.work or ("",)))]
    chosen = [one for one in CONTENDERS if one.name.startswith(tuple(options.only or ("",)))]
    samples = run(works, chosen, options.rounds)
    summaries = summarize(samples)
    print(f"\n{render(summaries, samples)}\n")
    print(*keep(options.out, "map", machine, summaries, samples, partial(draw, summaries)), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
