"""Warm gangs: what a start, a call and its data cost, beside a job that is started for each call.

"start" is a gang's, when jax has been imported once; "first" its first program with a collective, compiled; "hot" one
that is compiled already; "new" one that is new at each call; "empty" a call that does nothing; "to each" and "from
each" carry an array. "job" is a whole `jaxrun -n N` with one collective, in turn with the gangs of a round. Medians.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from _contenders import ROOT, jaxrun
from _jobs import started
from _report import keep, table, this_machine

from jaxrun import Gang

KINDS = ("job", "start", "first", "hot", "new", "empty", "to each", "from each")
TIMES = {"empty": 200, "hot": 50, "new": 10, "to each": 5, "from each": 5}
TO_EACH, FROM_EACH = 32 * 2**20, 8 * 2**20  # bytes
ROUNDS = 5
PAUSE = 1.0  # seconds before a start: the next launcher is made ready at leisure
LIMIT = 60.0


@dataclass(frozen=True)
class Sample:
    """Milliseconds that one thing took, in one round."""

    size: int
    kind: str
    round: int
    ms: float


@dataclass(frozen=True)
class Summary:
    """The median of the rounds; `ratio` to that of a whole job."""

    size: int
    kind: str
    ms: float
    ratio: float


def collective(keep_it: bool) -> float:
    """A sum over all devices; compiled at the first call only, if it is kept."""
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


def timed(function: Callable[[], Any], times: int = 1) -> float:
    """The median of milliseconds."""
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        function()
        taken.append((time.perf_counter() - began) * 1000)
    return statistics.median(taken)


def measure(size: int, turn: int) -> list[Sample]:
    """One round."""
    found = {"job": timed(partial(_job, size))}
    time.sleep(PAUSE)
    gangs: list[Gang] = []
    found["start"] = timed(lambda: gangs.append(Gang(size, platform="cpu")))
    with gangs[0] as gang:
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
        if job.wait(LIMIT) is None or job.status() != 0:
            raise RuntimeError(f"the job of {size} did not end well:\n{job.output()}")


def summarize(samples: Sequence[Sample]) -> list[Summary]:
    found = []
    for size in sorted({sample.size for sample in samples}):
        middle = {
            kind: statistics.median(one.ms for one in samples if (one.size, one.kind) == (size, kind)) for kind in KINDS
        }
        found += [Summary(size, kind, middle[kind], middle[kind] / middle["job"]) for kind in KINDS]
    return found


def render(summaries: Sequence[Summary]) -> str:
    sizes = sorted({one.size for one in summaries})
    rows = []
    for kind in KINDS:
        of = {one.size: one for one in summaries if one.kind == kind}
        rows.append([kind, *(f"{of[size].ms:.3g} ms ({of[size].ratio:.2g})" for size in sizes)])
    return table(["", *(f"{size} ranks" for size in sizes)], rows, left=1)


def draw(summaries: Sequence[Summary], plt: Any) -> Any:
    figure, axes = plt.subplots(figsize=(7, 4))
    sizes = sorted({one.size for one in summaries})
    for kind in KINDS:
        axes.plot(sizes, [one.ms for one in summaries if one.kind == kind], marker="o", label=kind)
    axes.set(xlabel="ranks", ylabel="ms", yscale="log", xticks=sizes, title="A warm gang, beside a job for each call")
    axes.legend(fontsize="small")
    return figure


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench gang", description=__doc__)
    parser.add_argument("-n", "--processes", type=int, nargs="+", default=[2, 4, 8], metavar="N")
    parser.add_argument("--rounds", type=int, default=ROUNDS, metavar="R", help=f"(default: {ROUNDS})")
    parser.add_argument("--out", type=Path, default=ROOT / "bench-results", metavar="DIR")
    options = parser.parse_args(argv)
    machine = this_machine()
    print(machine, flush=True)
    Gang(1, platform="cpu").close()  # jax is imported once
    samples = [
        sample for turn in range(1, options.rounds + 1) for size in options.processes for sample in measure(size, turn)
    ]
    summaries = summarize(samples)
    print(f"\n{render(summaries)}\n(in brackets: as a part of a whole job)\n")
    print(*keep(options.out, "gang", machine, summaries, samples, partial(draw, summaries)), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
