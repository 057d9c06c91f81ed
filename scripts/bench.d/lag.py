"""Lag: whether a job names the rank that the others wait for, and no other, over many jobs of a few steps each.

In each job a random rank takes a little longer for its steps, or no rank does. Every other job runs beside processes
that keep `--load` cores busy. "found" counts the jobs that named the slow rank. "false" counts the jobs that named
another rank, or any rank if none was slow; only they make the exit status 1. A rank that is slower by less than a
twentieth of the time should not be named.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from _bench import Bench, Outcome, grouped, progress, table
from _contenders import JAXRUN
from _jobs import started

PROGRAM = Path(__file__).parent / "_programs" / "steps.py"
TIME_LIMIT_S = 120.0
DELAYS = (0.0, 0.05, 0.1, 0.3)
NAMED = re.compile(r"rank (\d+) came last to (\d+) % .* waited (\d+) % of the time(?:; it was in (\S+))?")
BUSY = "while True: pass"


@dataclass(frozen=True)
class Sample:
    """One job. `slow`: the slow rank, -1 for none; `named`: the rank that was named, and the figures about it."""

    delay: float
    load: int
    slow: int
    named: int = -1
    share: int = 0
    place: str = ""
    wrong: str = ""


def measure(delay: float, load: int, slow: int, options: argparse.Namespace) -> Sample:
    arguments = map(str, (options.steps, options.seconds, options.work, slow, delay))
    command = [str(JAXRUN.executable), "-n", str(options.processes), str(PROGRAM), *arguments]
    with busy(load), started(command, os.environ, {}) as job:
        if job.wait(TIME_LIMIT_S) is None:
            return Sample(delay, load, slow, wrong=f"still running after {TIME_LIMIT_S:g} s")
        if job.status():
            return Sample(delay, load, slow, wrong=f"status {job.status()}: {job.last_words()}")
        verdict = json.loads((job.directory / "jaxrun-runs" / "latest" / "verdict.json").read_text())
    found = NAMED.search(" ".join(verdict["details"]))
    if found is None:
        return Sample(delay, load, slow)
    return Sample(delay, load, slow, int(found[1]), int(found[3]), found[4] or "")


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Run `count` processes that only compute."""
    processes = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def render(samples: Sequence[Sample]) -> str:
    rows = []
    for (delay, load), group in sorted(grouped(samples, lambda one: (one.delay, one.load)).items()):
        good = [one for one in group if not one.wrong]
        found = [one for one in good if one.named == one.slow != -1]
        false = [one for one in good if one.named not in (-1, one.slow)]
        shares = sorted(one.share for one in found)
        rows.append(
            (
                f"{100 * delay:g} %" if delay else "none",
                str(load),
                str(len(good)),
                str(len(found)) if delay else "",
                str(len(false)),
                f"{shares[len(shares) // 2]} %" if shares else "",
                str(sum(bool(one.place) for one in found)) if found else "",
            )
        )
    return table(("slower", "busy beside", "jobs", "found", "false", "waited", "with its place"), rows, left=1)


def run(options: argparse.Namespace) -> Outcome:
    chance = random.Random(options.seed)
    samples: list[Sample] = []
    for turn in range(1, options.rounds + 1):
        for delay in DELAYS:
            load = options.load if turn % 2 == 0 else 0
            slow = chance.randrange(options.processes) if delay else -1
            sample = measure(delay, load, slow, options)
            samples.append(sample)
            what = f"rank {slow} is slow by {100 * delay:g} %, named {sample.named}"
            progress(f"round {turn}, load {load}: {what} {sample.wrong}")
    false = [f"{one}: another was named" for one in samples if one.named not in (-1, one.slow)]
    return Outcome(render(samples), samples, [*false, *(one.wrong for one in samples if one.wrong)])


if __name__ == "__main__":
    bench = Bench("lag", __doc__, rounds=50)
    bench.add_option("-n", "--processes", type=int, default=3, metavar="N")
    bench.add_option("--steps", type=int, default=50, metavar="N")
    bench.add_option("--seconds", type=float, default=0.05, help="of a step (default: 0.05)")
    bench.add_option("--work", choices=("sleep", "spin"), default="sleep", help="how these pass (default: sleep)")
    bench.add_option("--load", type=int, default=len(os.sched_getaffinity(0)), metavar="N")
    bench.add_option("--seed", type=int, default=1, help="of the choice of ranks")
    sys.exit(bench.main(run))
