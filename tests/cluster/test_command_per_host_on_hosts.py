"""One command per host (`--host-rank`), without MPI or Slurm: hosts that share no directory, and a secret on each."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from cluster_fixture import HOSTS, Bed, Job
from harness import MISBEHAVE

TOKEN = {"JAXRUN_TOKEN": "5" * 64, "NO_COLOR": "1"}


@contextmanager
def typed_on_hosts(bed: Bed, tmp_path: Path, *words: str, ranks: tuple[int, ...] = (0, 1, 2)) -> Iterator[list[Job]]:
    """`jaxrun --host-rank … WORDS` on each host, in a directory of its own with a copy of the program."""
    with ExitStack() as stack:
        jobs = []
        for host, rank in zip(HOSTS, ranks, strict=True):
            folder = tmp_path / host
            folder.mkdir()
            shutil.copy(MISBEHAVE, folder / "program.py")
            place = ["--hosts", "3", "--host-rank", str(rank), "--head", "h1:7777", "--run-dir", str(folder / "run")]
            command = [sys.executable, "-m", "jaxrun", *place, *words]
            jobs.append(stack.enter_context(bed.typed(host, *command, directory=folder, env=TOKEN)))
        yield jobs


def test_three_commands_are_one_job_over_three_hosts(bed: Bed, tmp_path: Path) -> None:
    with typed_on_hosts(bed, tmp_path, "-m", "jaxrun_runtime.programs.selfcheck") as jobs:
        results = [job.result() for job in jobs]
        jobs[0].gone()
    assert [result.code for result in results] == [0, 0, 0], results
    assert "3 processes on 3 hosts, with a command on each" in results[0].err.replace(" (cpu)", "")
    assert results[0].verdict()["hosts"] == {"0": "h1", "1": "h2", "2": "h3"}
    assert all(result.err.endswith("jaxrun: done\n") and not result.out for result in results[1:])


def test_the_host_of_the_failure_is_named_and_every_host_ends_with_its_status(bed: Bed, tmp_path: Path) -> None:
    with typed_on_hosts(bed, tmp_path, "program.py", "--rank", "1", "--exit", "7") as jobs:
        results = [job.result() for job in jobs]
        jobs[0].gone()
    assert [result.code for result in results] == [7, 7, 7], results
    assert "rank 1 of 3 on h2 ended with status 7" in results[0].err


@pytest.mark.parametrize("victim", [1, pytest.param(0, marks=pytest.mark.extended)])
def test_where_the_command_of_one_host_is_killed_nothing_is_left_on_any(bed: Bed, tmp_path: Path, victim: int) -> None:
    with typed_on_hosts(bed, tmp_path, "program.py", "--steps", "100000") as jobs:
        jobs[0].wait_until(lambda: "ready" in jobs[0].log(0), "start")
        own = [
            found.pid
            for found in bed.job_processes()
            if found.argv[:3] == (sys.executable, "-m", "jaxrun") and str(jobs[victim].run_dir) in found.argv
        ]
        os.kill(min(own), signal.SIGKILL)
        results = [job.result() for job in jobs]
        jobs[0].gone()
    assert [result.code for result in results] == [
        -signal.SIGKILL if number == victim else 69 for number in range(3)
    ], results
    if victim:
        assert "rank 1 of 3 on h2 was lost" in results[0].err
    else:
        assert "was lost: its host is gone, or jaxrun there was killed" in results[1].err


def test_a_second_host_0_is_told_where_the_first_one_runs(bed: Bed, tmp_path: Path) -> None:
    with typed_on_hosts(bed, tmp_path, "--init-timeout", "8", "program.py", ranks=(0, 1, 0)) as jobs:
        third = jobs[2].result()
        jobs[0].process.send_signal(signal.SIGINT)
        for job in jobs[:2]:
            job.result()
        jobs[0].gone()
    # Whichever came first: the head on h1 may not have listened yet.
    assert third.code in (2, 69), third
    assert "h3 has no address of --head h1:7777" in third.err or "--host-rank 0 is taken" in third.err
