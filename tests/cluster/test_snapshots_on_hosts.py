"""Snapshots in memory on several hosts, each with a /dev/shm of its own: what is left when one is lost, or an agent."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cluster_fixture import HOSTS, Bed, Job
from harness import HERE, extended, wait_until
from launch_modes import LAUNCHED, OPEN_MPI_5, OPENSSH, PYTHON, SLURM, Engine, LaunchMode, ssh_env

PROGRAM = str(HERE / "keeps_snapshots.py")


@contextmanager
def started(bed: Bed, engine: Engine, directory: Path, *words: str) -> Iterator[Job]:
    """A job on all hosts of the testbed, each rank with two devices."""
    if reason := engine.missing():
        pytest.skip(reason)
    given = ("--run-dir", str(directory / "run"), "--max-restarts", "1", "-d", "2", *words)
    mode = LaunchMode(engine, LAUNCHED)
    command = mode.command(HOSTS, *given)
    if engine is SLURM:  # an allocation that outlives the loss of a node
        nodes = ["--no-kill", "-N", str(len(HOSTS)), "--ntasks-per-node", "1", "--nodelist", ",".join(HOSTS)]
        command = ["salloc", "--quiet", *nodes, PYTHON, "-m", "jaxrun", "--backend", "slurm", *given]
    with bed.typed(mode.host, *command, directory=directory, env=ssh_env(engine)) as job:
        yield job


def check_end(bed: Bed, job: Job, hosts: tuple[str, ...]) -> None:
    """All ranks have gone on from step 7, with what only the memory of the hosts knew, and nothing is left there."""
    result = job.result()
    job.gone()
    assert result.code == 0, result
    logs = [log.read_text() for log in sorted((job.run_dir / "attempt-2").glob("rank-*.out"))]
    assert all(re.fullmatch(r"restored 7\nbits \w+ True\n", log) for log in logs) and len(set(logs)) == len(logs), logs
    own = f"ls -A /dev/shm/jaxrun-{os.geteuid()} 2>/dev/null || true"
    for host in hosts:  # other tests leave things in its memory, too
        wait_until(lambda host=host: job.job_id not in bed.inside(host, "sh", "-c", own), f"end of snapshots on {host}")  # type: ignore[misc]


@pytest.mark.extended
@pytest.mark.parametrize(
    "engine",
    [pytest.param(OPEN_MPI_5, id="Open MPI 5"), extended(SLURM, id="Slurm"), extended(OPENSSH, id="OpenSSH")],
)
def test_snapshots_outlive_a_killed_agent(bed: Bed, tmp_path: Path, engine: Engine) -> None:
    """The engine is started again: all agents are others then."""
    with started(bed, engine, tmp_path, PROGRAM, "agent", "1") as job:
        check_end(bed, job, HOSTS)


@pytest.mark.extended
@pytest.mark.usefixtures("mended")
def test_a_spare_host_gets_the_part_of_one_that_loses_its_power_from_its_neighbour(bed: Bed, tmp_path: Path) -> None:
    with started(bed, SLURM, tmp_path, "--spares", "1", PROGRAM, "hold") as job:
        job.wait_for_output("holds", count=2)
        job.wait_for_event("SpareReported")
        bed.run("off", "h2")
        check_end(bed, job, ("h1", "h3"))
