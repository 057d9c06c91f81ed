"""Start-up over three hosts of a testbed that is up: jaxrun by ssh, jaxrun by Open MPI 5, and Open MPI 5 alone.

All of them reach the hosts by OpenSSH, with a real sshd on each host.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from _bench import ROOT, grouped, median_ratio, progress, shown, table
from _contenders import JAX_SUM, MPIRUN
from _jobs import started

TESTBED, TESTBED_DIR = ROOT / "scripts" / "testbed", "JAXRUN_TESTBED_DIR"
HOSTS = ("h1", "h2", "h3")
LIMIT_S = 120.0
GOAL = 1.3  # times what jaxrun takes with Open MPI 5
_JAXRUN = (sys.executable, "-m", "jaxrun", "--no-run-dir")
_VARIABLES = ("BENCH_DIR", "BENCH_ADDRESS", "BENCH_JOB", "JAX_PLATFORMS", "PATH")
BY_SSH, BY_MPIRUN, ALONE = "jaxrun, by ssh", "jaxrun, by Open MPI 5", "Open MPI 5"


@dataclass(frozen=True)
class HostSample:
    """One start: seconds from the command to its end. `wrong` is empty if every process had the right sum."""

    contender: str
    round: int
    seconds: float
    wrong: str = ""


def why_not() -> str:
    """Return why there can be no measurement; empty if there can be one."""
    if subprocess.run([TESTBED, "exec", "h1", "--", "true"], capture_output=True).returncode:
        return "over hosts: the testbed is not up; as root: scripts/testbed up"
    return "" if MPIRUN.is_installed() else f"over hosts: {MPIRUN.name} is not installed; to have it: {MPIRUN.install}"


def commands() -> dict[str, tuple[str, ...]]:
    named, mpirun = ",".join(HOSTS), str(MPIRUN.executable)
    exported = [word for name in _VARIABLES for word in ("-x", name)]
    shape = ("--allow-run-as-root", *exported, "-n", str(len(HOSTS)), "--host", named)
    return {
        BY_SSH: (*_JAXRUN, "--backend", "ssh", "-H", named, str(JAX_SUM)),
        BY_MPIRUN: (*_JAXRUN, "--backend", "mpirun", "--mpirun", mpirun, "-H", named, str(JAX_SUM)),
        ALONE: (mpirun, *shape, sys.executable, str(JAX_SUM)),
    }


def measure(contender: str, number: int) -> HostSample:
    extra = {"JRTB_OPENSSH": "1", "BENCH_ADDRESS": f"10.77.0.1:{20_000 + os.getpid() % 20_000 + number}"}
    extra |= {TESTBED_DIR: os.environ[TESTBED_DIR]} if TESTBED_DIR in os.environ else {}
    command = (str(TESTBED), "exec", HOSTS[0], "--", *commands()[contender])
    with started(command, os.environ, extra) as job:
        ended = job.wait(LIMIT_S)
        if ended is None:
            return HostSample(contender, number, LIMIT_S, f"still running after {LIMIT_S:g} s")
        sums = [path.read_text() for path in job.directory.glob("sum-*")]
        right = sums == ["6"] * len(HOSTS) and job.status() == 0
        return HostSample(contender, number, ended - job.began, "" if right else job.last_words())


def run_rounds(rounds: int) -> list[HostSample]:
    """All contenders take turns; before, each runs once, which brings programs into memory."""
    samples = []
    for number in range(rounds + 1):
        for contender in commands():
            sample = measure(contender, number)
            progress(f"3 hosts x {contender}, round {number}: {sample.seconds:.2f} s {sample.wrong}")
            samples += [sample] if number else []
    return samples


def render(samples: Sequence[HostSample]) -> str:
    """A line for each contender; ratios are the median of the rounds' ratios."""
    wall = {
        name: {one.round: one.seconds for one in group}
        for name, group in grouped((one for one in samples if not one.wrong), lambda one: one.contender).items()
    }
    rows = []
    for name, of in wall.items():
        ratios = [median_ratio(of, wall.get(other, {})) for other in (BY_MPIRUN, ALONE)]
        goal = ("", "")
        if name == BY_SSH and ratios[0] is not None:
            goal = (f"<= {GOAL:g}", "yes" if ratios[0] <= GOAL else "no")
        spread = f"{min(of.values()):.2f}-{max(of.values()):.2f}"
        rows.append((name, f"{statistics.median(of.values()):.2f}", spread, *map(shown, ratios), *goal))
    header = (
        *("3 processes on 3 hosts", "wall s", "min-max"),
        *(f"wall / {BY_MPIRUN}", "wall / Open MPI 5 alone", "goal", "reached"),
    )
    return table(header, rows, left=1)
