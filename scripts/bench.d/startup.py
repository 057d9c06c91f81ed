"""Start-up: seconds from command to exit with one sum over all processes, jaxrun beside other launchers.

All contenders take turns in every round, and a ratio is taken within its round, so that a machine that is
busy for a while does not favour one of them. Only a wrong result makes the exit status 1, never a long time.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from _bench import Bench, Outcome, grouped, median_ratio, numbers, progress, shown, table
from _contenders import JAXRUN, JAXRUN_NO_FORK, MPIRUN, PLAIN, Contender, free_address, installed
from _jobs import Job, started

CONTENDERS = (PLAIN, MPIRUN, JAXRUN, JAXRUN_NO_FORK)
GOALS = {4: 0.25, 8: 0.18, 16: 0.15}  # of the time of plain subprocesses, by processes
TIME_LIMIT_S = 120.0


@dataclass(frozen=True)
class Sample:
    """One run; `wrong` is empty if every process had the right sum and the launcher ended with 0."""

    contender: str
    size: int
    round: int
    seconds: float
    wrong: str


def measure(contender: Contender, size: int, number: int) -> Sample:
    with started(contender.command(size, ()), os.environ, {"BENCH_ADDRESS": free_address()}) as job:
        ended = job.wait(TIME_LIMIT_S)
        if ended is None:
            return Sample(contender.name, size, number, TIME_LIMIT_S, f"still running after {TIME_LIMIT_S:g} s")
        return Sample(contender.name, size, number, ended - job.began, _wrong(job, size))


def _wrong(job: Job, size: int) -> str:
    """What is wrong with a run that has ended, and the end of what it printed."""
    sums = {path.name: path.read_text() for path in job.directory.glob("sum-*")}
    right = {f"sum-{rank}": f"{size * (size + 1) // 2}" for rank in range(size)}
    if job.status() == 0 and sums == right:
        return ""
    return f"status {job.status()}, {len(sums.items() & right.items())} of {size} right sums: {job.last_words()}"


def render(samples: Sequence[Sample]) -> str:
    """A line for each size and contender; the ratio is the median of the rounds' ratios to plain."""
    header = ("processes", "contender", "median s", "min-max s", "/ plain", "goal", "reached")
    groups = grouped((one for one in samples if not one.wrong), lambda one: (one.size, one.contender))
    seconds = {key: {one.round: one.seconds for one in group} for key, group in groups.items()}
    rows = []
    for (size, name), of in seconds.items():
        spread = f"{min(of.values()):.2f}-{max(of.values()):.2f}"
        ratio = median_ratio(of, seconds.get((size, PLAIN.name), {}))
        goal = GOALS.get(size) if name == JAXRUN.name else None
        reached = ("", "") if goal is None or ratio is None else (f"<= {goal:.2f}", "yes" if ratio <= goal else "no")
        rows.append((str(size), name, shown(statistics.median(of.values())), spread, shown(ratio), *reached))
    return table(header, rows, left=2)


def run(options: argparse.Namespace) -> Outcome:
    named = ("plain", *options.only) if options.only else ("",)
    chosen, missing = installed([one for one in CONTENDERS if one.name.startswith(named)])
    print(*missing, sep="\n", flush=True)
    for contender in chosen:  # brings programs and libraries into memory
        measure(contender, options.processes[0], 0)
    samples = []
    for size in options.processes:
        for number in range(1, options.rounds + 1):
            for contender in chosen:
                sample = measure(contender, size, number)
                samples.append(sample)
                progress(f"{size} x {contender.name}, round {number}: {sample.seconds:.2f} s {sample.wrong}")
    wrong = dict.fromkeys(f"{one.size} x {one.contender}: {one.wrong}" for one in samples if one.wrong)
    return Outcome(render(samples), samples, list(wrong))


if __name__ == "__main__":
    bench = Bench("startup", __doc__, rounds=5, mine=("--only", "jaxrun"))
    bench.add_option("-n", "--processes", type=numbers, default=[1, 2, 4, 8, 16], metavar="N,N")
    bench.add_option("--only", action="append", metavar="TEXT", help="contenders whose name begins so, and plain")
    sys.exit(bench.main(run))
