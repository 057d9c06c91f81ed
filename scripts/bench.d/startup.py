"""Start-up: seconds from command to exit with one sum over all processes, jaxrun beside other launchers.

All contenders take turns in every round, and a ratio is taken within its round, so that a machine that is
busy for a while does not favour one of them. Only a wrong result makes the exit status 1, never a long time.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import _plots
from _contenders import (
    JAXRUN,
    JAXRUN_NO_FORK,
    MPIRUN,
    PLAIN,
    ROOT,
    TORCHRUN,
    Contender,
    free_address,
    install_peers,
    installed,
)
from _jobs import Job, started
from _report import keep, table, this_machine

CONTENDERS = (PLAIN, MPIRUN, TORCHRUN, JAXRUN, JAXRUN_NO_FORK)
GOALS = {4: 0.25, 8: 0.18, 16: 0.15}
TIME_LIMIT = 120.0


@dataclass(frozen=True)
class Sample:
    """One run; `wrong` is empty if every process had the right sum and the launcher ended with 0."""

    contender: str
    size: int
    round: int
    seconds: float
    wrong: str


@dataclass(frozen=True)
class Summary:
    """The good samples of one contender at one size; `ratio` is the median of the rounds' ratios to plain."""

    contender: str
    size: int
    good: int
    wrong: tuple[str, ...]
    median: float | None = None
    least: float | None = None
    most: float | None = None
    ratio: float | None = None
    goal: float | None = None


def measure(contender: Contender, size: int, number: int, environ: Mapping[str, str]) -> Sample:
    with started(contender.command(size, ()), environ, {"BENCH_ADDRESS": free_address()}) as job:
        ended = job.wait(TIME_LIMIT)
        if ended is None:
            return Sample(contender.name, size, number, TIME_LIMIT, f"still running after {TIME_LIMIT:g} s")
        return Sample(contender.name, size, number, ended - job.began, _wrong(job, size))


def _wrong(job: Job, size: int) -> str:
    """What is wrong with a run that has ended, and the end of what it printed."""
    sums = {path.name: path.read_text() for path in job.directory.glob("sum-*")}
    right = {f"sum-{rank}": f"{size * (size + 1) // 2}" for rank in range(size)}
    if job.status() == 0 and sums == right:
        return ""
    tail = " | ".join(job.output().strip().splitlines()[-3:])
    return f"status {job.status()}, {len(sums.items() & right.items())} of {size} right sums: {tail}"


def summarize(samples: Sequence[Sample]) -> list[Summary]:
    """One for each size and contender, in the order of the samples."""
    plain = {(one.size, one.round): one.seconds for one in samples if one.contender == PLAIN.name and not one.wrong}
    groups: dict[tuple[int, str], list[Sample]] = {}
    for one in samples:
        groups.setdefault((one.size, one.contender), []).append(one)
    summaries = []
    for (size, name), group in groups.items():
        good = [one for one in group if not one.wrong]
        seconds = [one.seconds for one in good]
        ratios = [one.seconds / plain[size, one.round] for one in good if (size, one.round) in plain]
        summaries.append(
            Summary(
                contender=name,
                size=size,
                good=len(good),
                wrong=tuple(dict.fromkeys(one.wrong for one in group if one.wrong)),
                median=statistics.median(seconds) if seconds else None,
                least=min(seconds, default=None),
                most=max(seconds, default=None),
                ratio=statistics.median(ratios) if ratios else None,
                goal=GOALS.get(size) if name == JAXRUN.name else None,
            )
        )
    return summaries


def render(summaries: Sequence[Summary]) -> str:
    header = ("processes", "contender", "median s", "min-max s", "/ plain", "goal", "reached")
    rows = []
    for one in summaries:
        times = ("-", "-") if one.median is None else (f"{one.median:.2f}", f"{one.least:.2f}-{one.most:.2f}")
        ratio = "-" if one.ratio is None else f"{one.ratio:.2f}"
        rows.append((str(one.size), one.contender, *times, ratio, *_against_goal(one)))
    wrong = [f"{one.size} x {one.contender}: {text}" for one in summaries for text in one.wrong]
    return "\n".join([table(header, rows, left=2), *wrong])


def _against_goal(one: Summary) -> tuple[str, str]:
    if one.goal is None:
        return "", ""
    return f"<= {one.goal:.2f}", "yes" if one.ratio is not None and one.ratio <= one.goal else "no"


def run(sizes: Sequence[int], rounds: int, chosen: Sequence[Contender], environ: Mapping[str, str]) -> list[Sample]:
    for contender in chosen:  # brings programs and libraries into memory
        measure(contender, sizes[0], 0, environ)
    samples = []
    for size in sizes:
        for number in range(1, rounds + 1):
            for contender in chosen:
                sample = measure(contender, size, number, environ)
                samples.append(sample)
                line = f"{size} x {contender.name}, round {number}: {sample.seconds:.2f} s {sample.wrong}"
                print(line, file=sys.stderr, flush=True)
    return samples


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench startup", description=__doc__)
    parser.add_argument("-n", "--processes", type=_sizes, default=[1, 2, 4, 8, 16], metavar="N,N")
    parser.add_argument("--rounds", type=int, default=5, metavar="R", help="of each (default: 5)")
    parser.add_argument("--only", action="append", metavar="TEXT", help="contenders whose name begins so, and plain")
    parser.add_argument("--out", type=Path, default=ROOT / "bench-results", metavar="DIR")
    parser.add_argument("--install-peers", action="store_true", help="make .venv-bench with Open MPI 5 and PyTorch")
    options = parser.parse_args(argv)
    if options.install_peers:
        return install_peers()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    named = ("plain", *options.only) if options.only else ("",)
    chosen, missing = installed([one for one in CONTENDERS if one.name.startswith(named)])
    machine = this_machine()
    print("\n".join([str(machine), *missing]), flush=True)
    samples = run(options.processes, options.rounds, chosen, dict(os.environ))
    summaries = summarize(samples)
    print(f"\n{render(summaries)}")
    written = keep(options.out, "startup", machine, summaries, samples, partial(_plots.startup, summaries, GOALS))
    print("", *written, sep="\n")
    return 1 if any(one.wrong for one in samples) else 0


def _sizes(text: str) -> list[int]:
    sizes = [int(part) for part in text.split(",")]
    if min(sizes) < 1:
        raise ValueError
    return sizes


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
