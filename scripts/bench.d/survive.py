"""Survive: time from a host's loss of power to the end of the next step, and how many steps are repeated.

Runs on a testbed, by Slurm and by Open MPI, with steps of 0.1 s. One job has two hosts and a spare host, with the state
on disk every 50 steps, or in memory after each step. Another has three hosts, and two continue until the third is back;
there the pause is from the last step on two hosts to the end of the first step on three. With `--fault cut` the host
loses only its link.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import restart
from _bench import Bench, Outcome, grouped, progress, table
from _jobs import Job, started

PROGRAM = restart.PROGRAM.with_name("survives.py")
ENGINES = {
    "Slurm": (restart.IN_ALLOCATION, ("--backend", "slurm")),
    "Open MPI 5": (restart.IN_H1, (*restart.BY_MPIRUN, "h1,h2,h3")),
}
SPARE, SMALLER = ("--spares", "1"), ("--min-hosts", "2", "--grow", "1s")
RUNS = (
    ("spare host, from disk", SPARE, "disk", 50),
    ("spare host, from memory", SPARE, "memory", 1),
    ("smaller, from memory", SMALLER, "memory", 1),
)
GROWN = "grown again"
LOST = "h2"


@dataclass(frozen=True)
class Step:
    """The end of a step, at `time` seconds since the epoch."""

    attempt: int
    size: int
    number: int
    time: float


@dataclass(frozen=True)
class Sample:
    engine: str
    what: str
    seconds: float = 0.0
    steps: int = 0
    wrong: str = ""


def measure(engine: str, what: str, options: Sequence[str], how: Sequence[str], fault: str) -> list[Sample]:
    before, after = ENGINES[engine]
    command = [*before, *restart.JAXRUN, *after, "--max-restarts", "3", *options, str(PROGRAM), *how]
    extra = {name: os.environ[name] for name in (restart.TESTBED_DIR,) if name in os.environ}
    with started(command, os.environ, extra) as job:
        try:
            restart.lose_host(LOST, job, fault)
            began = float((job.directory / "fault").read_text())
            first = _wait_for(job, lambda step: step.attempt > 1 and step.time > began)
            lost = [step for step in _steps(job) if step.attempt == 1][-1]
            samples = [Sample(engine, what, first.time - began, lost.number - first.number + 1)]
            if options is SMALLER:
                _restore()
                grown = _wait_for(job, lambda step: step.attempt > first.attempt and step.size == lost.size)
                last = [step for step in _steps(job) if step.time < grown.time][-1]
                samples.append(Sample(engine, GROWN, grown.time - last.time, last.number - grown.number + 1))
            (job.directory / "over").touch()
            if job.wait(restart.LIMIT_S) is None or job.status():
                raise TimeoutError(f"it did not end well: {job.last_words()}")
            return samples
        except (TimeoutError, OSError) as error:
            return [Sample(engine, what, wrong=str(error))]


def _restore() -> None:
    subprocess.run([restart.TESTBED, "mend", LOST], capture_output=True)  # if it was cut
    subprocess.run([restart.TESTBED, "up"], check=True, capture_output=True)


def _steps(job: Job) -> list[Step]:
    lines = [line.split() for line in (job.directory / "steps").read_text().splitlines() if line.count(" ") == 3]
    return [Step(int(attempt), int(size), int(number), float(at)) for attempt, size, number, at in lines]


def _wait_for(job: Job, is_it: Callable[[Step], bool]) -> Step:
    """Return the first step for which `is_it` is true. Raises TimeoutError if there is none for long."""
    for _ in range(int(restart.LIMIT_S / 0.1)):
        if found := [step for step in _steps(job) if is_it(step)]:
            return found[0]
        if job.wait(0.1) is not None:
            break
    raise TimeoutError(f"there was no such step: {job.last_words()}")


def render(samples: Sequence[Sample]) -> str:
    header = ("engine", "what", "median s", "min-max", "steps done again", "runs")
    rows = []
    for (engine, what), group in grouped(samples, lambda one: (one.engine, one.what)).items():
        seconds, steps = ([getattr(one, name) for one in group] for name in ("seconds", "steps"))
        spread = f"{min(seconds):.1f}-{max(seconds):.1f}"
        again = f"{statistics.median(steps):g} ({min(steps)}-{max(steps)})"
        rows.append((engine, what, f"{statistics.median(seconds):.1f}", spread, again, str(len(group))))
    return table(header, rows, left=2)


def run(options: argparse.Namespace) -> Outcome:
    samples = []
    if subprocess.run([restart.TESTBED, "up"], capture_output=True).returncode:
        return Outcome("", [], ["there is no testbed; as root: scripts/testbed up"])
    for _ in range(options.rounds):
        for engine in ENGINES:
            for what, places, how, every in RUNS:
                try:
                    found = measure(engine, what, places, (how, str(every)), options.fault)
                finally:
                    time.sleep(1.0)  # until Slurm has taken the allocation back
                    _restore()
                for one in found:
                    progress(f"{engine}, {one.what}: {one.wrong or f'{one.seconds:.1f} s, {one.steps} steps'}")
                samples += found
    good = [one for one in samples if not one.wrong]
    wrong = [f"{one.engine}, {one.what}: {one.wrong}" for one in samples if one.wrong]
    return Outcome(render(good), samples, wrong)


if __name__ == "__main__":
    bench = Bench("survive", __doc__, rounds=5)
    bench.add_option("--fault", choices=("off", "cut"), default="off", help="what becomes of the host (default: off)")
    sys.exit(bench.main(run))
