"""Compiling: wall and CPU time of 40 programs on N processes, if one compiles for all, compared with other ways.

"alone" is the same program as one process. All take turns in every round, and ratios are taken within a round. With
--trivial the programs have one operation each. With --plugin, a suite of 60 tests that each compile something runs with
jaxrun's pytest plugin and as one process. Only a wrong result makes the exit status 1, never a long time: all processes
of a job, and both ways of jaxrun, must have the same results bit for bit.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from _bench import Bench, Outcome, grouped, median_ratio, numbers, progress, shown, table
from _contenders import free_address
from _jobs import Job, started

PROGRAMS = Path(__file__).parent / "_programs"
PROGRAM = str(PROGRAMS / "compiles.py")
TIME_LIMIT_S = 180.0
ALONE, PLAIN, EACH, ONCE = "alone", "plain", "jaxrun --compile each", "jaxrun --compile auto"
PLUGIN = "jaxrun's pytest plugin"
GOALS = {(4, ONCE): (1.3, 1.6), (4, PLUGIN): (1.5, None)}  # of the wall and CPU time of one process alone


def _jaxrun(how: str) -> Callable[[int], list[str]]:
    launcher = str(Path(sys.executable).with_name("jaxrun"))
    return lambda size: [launcher, "-n", str(size), "--compile", how, PROGRAM]


WAYS: dict[str, Callable[[int], list[str]]] = {
    ALONE: lambda size: [sys.executable, PROGRAM],
    PLAIN: lambda size: [sys.executable, str(PROGRAMS / "plain.py"), str(size), PROGRAM],
    EACH: _jaxrun("each"),
    ONCE: _jaxrun("auto"),
}
SUITE = str(PROGRAMS / "compiling_suite.py")
_PYTEST = [
    sys.executable,
    "-m",
    "pytest",
    "-q",
    "-p",
    "no:cacheprovider",
    "-c",
    os.devnull,
    f"--rootdir={PROGRAMS}",
    SUITE,
]
SUITES: dict[str, Callable[[int], list[str]]] = {
    ALONE: lambda size: ["env", "BENCH_SIZE=1", *_PYTEST],
    PLUGIN: lambda size: ["env", f"BENCH_SIZE={size}", *_PYTEST],
}


@dataclass(frozen=True)
class Sample:
    """One run, from the command to its end; `wrong` is empty if all processes had the same result."""

    way: str
    size: int
    round: int
    wall_s: float
    cpu_s: float
    result: str
    wrong: str


def measure(way: str, command: Sequence[str], size: int, number: int) -> Sample:
    before = _cpu_seconds()
    with started(command, os.environ, {"BENCH_ADDRESS": free_address()}) as job:
        ended = job.wait(TIME_LIMIT_S)
        if ended is None:
            return Sample(way, size, number, TIME_LIMIT_S, 0.0, "", f"still running after {TIME_LIMIT_S:g} s")
        status, results = job.status(), _results(job)
    processes = 0 if SUITE in command else 1 if way == ALONE else size
    right = status == 0 and len(results) == processes and len(set(results)) <= 1
    wrong = "" if right else f"status {status}, {len(set(results))} results of {len(results)} processes"
    return Sample(way, size, number, ended - job.began, _cpu_seconds() - before, "".join(results[:1]), wrong)


def _results(job: Job) -> list[str]:
    return [path.read_text() for path in job.directory.glob("result-*")]


def _cpu_seconds() -> float:
    """Return the CPU seconds of all processes that this process has started and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def render(samples: Sequence[Sample]) -> str:
    """Return a table with a line for each size and way: medians, and medians of the ratios to one process alone."""
    header = ("processes", "way", "wall s", "CPU s", "wall / alone", "CPU / alone", "goals", "reached")
    groups = grouped((one for one in samples if not one.wrong), lambda one: (one.size, one.way))
    rows = []
    for (size, way), group in groups.items():
        ratios = []
        for name in ("wall_s", "cpu_s"):
            ours, alone = (
                {one.round: getattr(one, name) for one in of} for of in (group, groups.get((size, ALONE), []))
            )
            ratios.append(median_ratio(ours, alone))
        times = (shown(statistics.median(getattr(one, name) for one in group)) for name in ("wall_s", "cpu_s"))
        reached = ("", "")
        goals = GOALS.get((size, way), ())
        pairs = [(ratio, goal) for ratio, goal in zip(ratios, goals, strict=False) if ratio is not None and goal]
        if pairs:
            met = ", ".join("yes" if ratio <= goal else "no" for ratio, goal in pairs)
            reached = ("<= " + ", ".join(f"{goal:.1f}" for _, goal in pairs), met)
        rows.append((str(size), way, *times, *map(shown, ratios), *reached))
    return table(header, rows, left=2)


def run(options: argparse.Namespace) -> Outcome:
    arguments = ["trivial"] if options.trivial else []
    ways = SUITES if options.plugin else WAYS
    samples = []
    for size in options.processes:
        for number in range(1, options.rounds + 1):
            for way in (way for way in ways if not options.only or way in (ALONE, *options.only)):
                sample = measure(way, [*ways[way](size), *arguments], size, number)
                samples.append(sample)
                times = f"{sample.wall_s:.2f} s, CPU {sample.cpu_s:.2f} s"
                progress(f"{size} x {way}, round {number}: {times} {sample.wrong}")
    wrong = dict.fromkeys(f"{one.size} x {one.way}: {one.wrong}" for one in samples if one.wrong)
    for size in options.processes:
        found = {one.result for one in samples if one.size == size and one.way in (EACH, ONCE) and not one.wrong}
        if len(found) > 1:
            wrong[f"{size}: the results of {EACH} and {ONCE} differ"] = None
    return Outcome(render(samples), samples, list(wrong))


if __name__ == "__main__":
    bench = Bench("compile", __doc__, rounds=3, mine=("--only", ONCE))
    bench.add_option("-n", "--processes", type=numbers, default=[2, 4, 8], metavar="N,N")
    bench.add_option("--only", action="append", metavar="WAY", help=f"{ALONE} and these of {', '.join(WAYS)}")
    bench.add_option("--plugin", action="store_true", help="60 tests instead of a program")
    bench.add_option("--trivial", action="store_true", help="programs of one operation each")
    sys.exit(bench.main(run))
