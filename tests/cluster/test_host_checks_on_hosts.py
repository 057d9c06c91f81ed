"""--host-check and --quarantine on several hosts: a sick host is left out, of this job and of the next."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cluster_fixture import HOSTS, READY, RUNS, Bed, Job
from harness import extended, write_fake_runtime
from launch_modes import LAUNCHED, MPICH, OPEN_MPI_5, OPENSSH, PYTHON, SLURM, Engine, LaunchMode, ssh_env

# Stands in for ssh. The job's own mpirun fails after the spare host's mpirun, because the job ends with it.
NO_ROUTE = """#!/bin/sh
case "$*" in *h2*) until grep -q "spare host h3 is lost" {err}; do sleep 0.1; done ;; esac
echo no route >&2
exit 255
"""
SHOWS_ITS_HOST = 'run(); print("ready on", os.uname().nodename, flush=True); done()'


@contextmanager
def started(
    bed: Bed,
    engine: Engine,
    directory: Path,
    *options: str,
    code: str = SHOWS_ITS_HOST,
    path: str = "",
) -> Iterator[Job]:
    """A job on all hosts of the testbed, whose quarantine is the file `bad` beside this directory.

    path: where commands are found before all other places
    """
    if reason := engine.missing():
        pytest.skip(reason)
    directory.mkdir()
    words = ("--run-dir", str(directory / "run"), "--quarantine", "../bad", *options, "by_hand.py")
    words = (*words, *(code for _ in HOSTS))
    mode = LaunchMode(engine, LAUNCHED)
    command = mode.command(HOSTS, *words)
    if engine is SLURM:
        nodes = ["--no-kill", "-N", str(len(HOSTS)), "--ntasks-per-node", "1", "--nodelist", ",".join(HOSTS)]
        command = ["salloc", "--quiet", *nodes, PYTHON, "-m", "jaxrun", "--backend", "slurm", *words]
    if path:
        command = ["env", f"PATH={path}:{os.environ['PATH']}", *command]
    env = {**write_fake_runtime(directory), **ssh_env(engine)}
    with bed.typed(mode.host, *command, directory=directory, env=env) as job:
        yield job


def hosts_of_ranks(directory: Path) -> list[str]:
    """The host of each rank, as its worker shows it."""
    return [log.read_text().splitlines()[0].rpartition(" ")[2] for log in sorted(directory.glob("rank-*.out"))]


@pytest.mark.extended
@pytest.mark.parametrize("engine", [OPEN_MPI_5, SLURM, OPENSSH], ids=["Open MPI 5", "Slurm", "OpenSSH"])
def test_a_spare_host_takes_the_place_of_one_that_fails_and_the_next_job_does_without(
    bed: Bed, tmp_path: Path, engine: Engine
) -> None:
    check = ("--host-check", "echo on $(uname -n); [ $JAXRUN_HOST = $(uname -n) -a $(uname -n) != h2 ]")
    with started(bed, engine, tmp_path / "first", "--spares", "1", *check) as job:
        result = job.result()
        job.gone()
    assert result.code == 0, result
    assert "attempt 1 of 2 failed: h2 failed --host-check: exited with status 1: on h2; restarting" in result.err
    assert "h3 takes the place of h2" in result.err and hosts_of_ranks(job.run_dir / "attempt-2") == ["h1", "h3"]
    assert result.verdict()["left_out"] == ["h2"]
    (line,) = (tmp_path / "bad").read_text().splitlines()
    assert line.startswith("h2 20") and line.endswith("Z failed --host-check: exited with status 1: on h2")
    with started(bed, engine, tmp_path / "next", *check) as job:
        result = job.result()
        job.gone()
    assert result.code == 0, result
    assert "jaxrun: without h2 (../bad: 20" in result.err and hosts_of_ranks(job.run_dir) == ["h1", "h3"]
    assert len((tmp_path / "bad").read_text().splitlines()) == 1


@pytest.mark.extended
@pytest.mark.parametrize("engine", [SLURM, extended(OPEN_MPI_5)], ids=["Slurm", "Open MPI 5"])
def test_without_another_host_the_job_is_refused_by_name(bed: Bed, tmp_path: Path, engine: Engine) -> None:
    check = ("--host-check", "echo no GPU; [ $(uname -n) = h1 ]", "--min-hosts", "2")
    with started(bed, engine, tmp_path / "job", *check) as job:
        result = job.result()
        job.gone()
    assert result.code == 69 and not result.events("WorkerSpawned"), result
    for host in ("h2", "h3"):
        assert f"{host} failed --host-check: exited with status 1: no GPU" in result.err
    assert "not restarted: no spare host is left for h3" in result.err


@pytest.mark.extended
@pytest.mark.parametrize("engine", [OPEN_MPI_5, extended(SLURM)], ids=["Open MPI 5", "Slurm"])
def test_ctrl_c_ends_the_checks_of_all_hosts(bed: Bed, tmp_path: Path, engine: Engine) -> None:
    with started(bed, engine, tmp_path / "job", "--host-check", f"touch {tmp_path}/on-$JAXRUN_HOST; sleep 1000") as job:
        job.wait_until(lambda: len(list(tmp_path.glob("on-*"))) == len(HOSTS), "a check on each host")
        os.kill(job.launcher(), signal.SIGINT)
        result = job.result()
        job.gone()
    assert result.code == 130, result
    assert not (tmp_path / "bad").exists()


@pytest.mark.parametrize("engine", [OPEN_MPI_5, extended(MPICH)], ids=["Open MPI 5", "MPICH"])
def test_a_spare_host_is_not_blamed_where_mpirun_reaches_nobody(bed: Bed, tmp_path: Path, engine: Engine) -> None:
    broken = tmp_path / "bin"
    broken.mkdir()
    (broken / "ssh").write_text(NO_ROUTE.format(err=tmp_path / "job" / "err"))
    (broken / "ssh").chmod(0o755)
    with started(bed, engine, tmp_path / "job", "--spares", "1", "--max-restarts", "1", path=str(broken)) as job:
        result = job.result()
        job.gone()
    assert result.code == 69 and "spare host h3 is lost" in result.err, result
    assert "h3 not added to ../bad (--quarantine): no agent on another host has reported" in result.err
    assert not (tmp_path / "bad").exists()


@pytest.mark.extended
@pytest.mark.usefixtures("mended")
def test_no_host_is_blamed_where_the_launchers_own_is_cut_off(bed: Bed, tmp_path: Path) -> None:
    with started(bed, OPEN_MPI_5, tmp_path / "job", code=RUNS + READY) as job:
        job.wait_for_output("ready", count=len(HOSTS))
        bed.run("cut", "h1")
        result = job.result()
    assert "not added to ../bad (--quarantine): all other hosts are silent as well" in result.err, result
    assert not (tmp_path / "bad").exists()
