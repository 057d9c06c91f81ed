"""Jobs that a real Slurm preempts, warns, cancels and starts again (--requeue)."""

from __future__ import annotations

import json
import signal
import sys
import time
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from cluster_fixture import Bed, Job

# Counts its steps in a file when it is told to stop, and goes on from there.
COUNTS = """
import os, pathlib, sys, time
import jax
from jax.experimental import multihost_utils
saved = pathlib.Path(os.environ["SLURM_JOB_NAME"] + ".saved")
step = int(saved.read_text()) if saved.exists() else 0
print("from step", step, "in attempt", os.environ["JAXRUN_ATTEMPT"], flush=True)
while step < int(sys.argv[1]):
    step += 1
    time.sleep(0.1)
    if multihost_utils.reached_preemption_sync_point(step):
        if jax.process_index() == 0:
            saved.write_text(str(step))
        sys.exit(0)
print("done", flush=True)
"""
JAXRUN = (sys.executable, "-m", "jaxrun", "--backend", "slurm", "-N", "2")

pytestmark = pytest.mark.extended


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "counts.py"
    path.write_text(COUNTS)
    return path


def submitted(bed: Bed, program: Path, *words: str) -> AbstractContextManager[Job]:
    return bed.typed("ctl", *JAXRUN, *words, "--submit", str(program), "60", directory=program.parent)


def wait_for_step(job: Job) -> str:
    """Until the program counts; returns the number of the job of Slurm's."""
    job.wait_until(lambda: "from step 0" in (job.directory / "out").read_text(), "first step")
    return job.bed.inside("ctl", "squeue", "--noheader", "--states=R", "--format=%i").strip()


def attempts(directory: Path) -> list[list[str]]:
    """The words of the lines that each attempt began with, of rank 0."""
    (out,) = directory.glob("out")
    lines = out.read_text().splitlines()
    return [line.split()[3::3] for line in lines if line.startswith("[0] from step")]


def run_dirs(directory: Path) -> list[dict[str, object]]:
    found = [path for path in (directory / "jaxrun-runs").iterdir() if not path.is_symlink() and path.is_dir()]
    return [json.loads((path / "verdict.json").read_text()) for path in found]


def test_a_preempted_job_goes_on_where_it_was_told_to_stop(bed: Bed, program: Path, tmp_path: Path) -> None:
    with submitted(bed, program, "--requeue") as job:
        wait_for_step(job)
        bed.inside(
            "ctl", "sbatch", "--partition=urgent", "-N3", "--exclusive", "--output=/dev/null", "--wrap", "sleep 1"
        )
        result = job.result()
    assert result.code == 0 and "[0] done" in result.out, result
    saved = (tmp_path / "counts.saved").read_text()
    assert attempts(tmp_path) == [["0", "1"], [saved, "2"]], result
    assert [verdict["outcome"] for verdict in run_dirs(tmp_path)] == ["ok"]


def test_a_job_that_its_user_cancels_is_not_started_again(bed: Bed, program: Path, tmp_path: Path) -> None:
    with submitted(bed, program, "--requeue") as job:
        number = wait_for_step(job)
        bed.inside("ctl", "scancel", number)
        result = job.result()
    assert result.code == 128 + signal.SIGTERM and "ended as CANCELLED" in result.err, result
    assert "Slurm itself ends job" in result.out
    assert not bed.inside("ctl", "squeue", "--noheader")


def test_a_chain_goes_on_without_scontrol_and_ends_with_its_work(bed: Bed, program: Path, tmp_path: Path) -> None:
    with submitted(bed, program, "--requeue=chain:3") as job:
        bed.inside("ctl", "scancel", "--batch", "--signal=USR2", wait_for_step(job))
        job.wait_until(lambda: "the next job of the chain goes on" in (tmp_path / "out").read_text(), "end of a job")
        job.process.send_signal(signal.SIGINT)  # nobody follows any more
        assert job.result().code == 0
        deadline = time.monotonic() + 60
        while bed.inside("ctl", "squeue", "--noheader") and time.monotonic() < deadline:
            time.sleep(0.2)
    first, second, third = sorted(tmp_path.glob("jaxrun-*.out"), key=lambda path: path.stat().st_mtime)
    assert "[0] from step 0" in first.read_text() and "[0] done" in second.read_text(), second.read_text()
    assert "has ended (done); there is nothing left to do" in third.read_text(), third.read_text()
    assert [verdict["outcome"] for verdict in run_dirs(tmp_path)] == ["ok"]


def test_an_interactive_job_cannot_go_on(bed: Bed, program: Path, tmp_path: Path) -> None:
    with bed.typed("ctl", "salloc", "-Q", "-N2", *JAXRUN, "--requeue", str(program), directory=tmp_path) as job:
        result = job.result()
    assert result.code == 2 and "interactive one; leave it out" in result.err, result
