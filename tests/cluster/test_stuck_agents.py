"""An agent on another host that is stopped, as on one that swaps: it is named, and the job ends, with its processes."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from cluster_fixture import HOSTS, Bed, Job, JobRunner
from harness import MISBEHAVE, Result
from launch_modes import (
    ATTACHED,
    BASIC,
    INTEL,
    LAUNCHED,
    MPICH,
    OPEN_MPI_4,
    OPEN_MPI_5,
    SLURM,
    Engine,
    LaunchMode,
)

from jaxrun.head.interruption import REPEATED_SIGNAL_S

MakeRunner = Callable[[LaunchMode], JobRunner]
RUNS_ON = (MISBEHAVE, "--steps", "100000")
# Attached, it is the engine's to end processes of its own: each does so in its own way.
IN_ALL_ENGINES = [
    pytest.param(LaunchMode(engine, ATTACHED), id=engine.label, marks=() if engine is SLURM else pytest.mark.extended)
    for engine in (SLURM, MPICH, OPEN_MPI_5, OPEN_MPI_4, INTEL)
]


@pytest.mark.parametrize("mode", BASIC, ids=str)
def test_a_second_ctrl_c_ends_a_job_with_a_stopped_agent(make_runner: MakeRunner, mode: LaunchMode) -> None:
    with make_runner(mode).started(*RUNS_ON) as job:
        stop_agent(job)
        ctrl_c_twice(job)
        result = job.result(timeout=20)
        job.gone()
    assert result.code == 130, result
    check_named(result, 1, 2)


@pytest.mark.extended
@pytest.mark.parametrize("mode", BASIC, ids=str)
def test_a_time_limit_holds_against_a_stopped_agent(make_runner: MakeRunner, mode: LaunchMode) -> None:
    with make_runner(mode).started("--timeout", "20", *RUNS_ON) as job:
        stop_agent(job)
        result = job.result()
        job.gone()
    assert result.code == 124, result
    check_named(result, 1, 10)


@pytest.mark.extended
def test_slurm_ends_a_stopped_agent_also_where_srun_hangs(bed: Bed, tmp_path: Path) -> None:
    """In an allocation that outlives the job, as in a shell of salloc's."""
    command = LaunchMode(SLURM, LAUNCHED).command(HOSTS, "--run-dir", str(tmp_path / "run"), *RUNS_ON)
    first = command.index(sys.executable)
    command[first:first] = ["sh", "-c", '"$@"; echo ended with $?; exec sleep 1000', "sh"]
    with bed.typed("ctl", *command, directory=tmp_path) as job:
        stop_agent(job)
        for process in bed.job_processes():
            if process.command == "srun":
                os.kill(process.pid, signal.SIGSTOP)
        ctrl_c_twice(job)
        job.wait_until(lambda: "ended with 130" in job.result(timeout=0).out, "end of the job")
        check_named(job.result(timeout=0), 1, 2)
        job.gone(but_for=("salloc", "sleep"))
        assert job.process.poll() is None


@pytest.mark.parametrize("mode", IN_ALL_ENGINES)
def test_attached_a_further_signal_ends_a_job_with_a_stopped_agent(make_runner: MakeRunner, mode: LaunchMode) -> None:
    with make_runner(mode).started(*RUNS_ON) as job:
        stop_agent(job)
        launcher = job.launcher()
        os.kill(launcher, signal.SIGTERM)
        job.wait_until(lambda: "stopping 3 ranks" in job.result(timeout=0).err, "answer to SIGTERM")
        os.kill(launcher, signal.SIGINT)
        result = job.result(timeout=20)
        job.gone()
    assert result.code != 0 and result.verdict()["exit_code"] == 143, result
    check_named(result, 1, 2)


@pytest.mark.extended
@pytest.mark.parametrize(("engine", "rank"), [(SLURM, 1), (OPEN_MPI_5, 0)], ids=["another", "of rank 0"])
def test_attached_a_job_ends_without_a_stopped_agent(make_runner: MakeRunner, engine: Engine, rank: int) -> None:
    """The agent of rank 0 is a child of the head."""
    with make_runner(LaunchMode(engine, ATTACHED)).started(*RUNS_ON) as job:
        stop_agent(job, rank)
        os.kill(job.launcher(), signal.SIGTERM)
        result = job.result(timeout=30)
        job.gone()
    assert result.code != 0 and result.verdict()["exit_code"] == 143, result
    check_named(result, rank, 10)


@pytest.mark.extended
def test_attached_a_rank_that_hangs_before_it_is_one_is_ended_as_well(bed: Bed, tmp_path: Path) -> None:
    words = ("--run-dir", str(tmp_path / "run"), "--init-timeout", "12", *RUNS_ON)
    command = LaunchMode(SLURM, ATTACHED).command(HOSTS, *words)
    first = command.index(sys.executable)
    command[first:first] = ["sh", "-c", 'test $SLURM_PROCID != 1 || kill -STOP $$; exec "$@"', "sh"]
    with bed.typed("ctl", *command, directory=tmp_path) as job:
        result = job.result(timeout=30)
        job.gone()
    assert result.code != 0 and result.verdict()["exit_code"] == 69, result
    assert "2 of 3 agents" in result.err and "rank 1" in result.err, result


def stop_agent(job: Job, rank: int = 1) -> None:
    job.wait_for_output("ready")
    os.kill(job.agent(rank), signal.SIGSTOP)


def ctrl_c_twice(job: Job) -> None:
    launcher = job.launcher()
    os.kill(launcher, signal.SIGINT)
    job.wait_until(lambda: "another Ctrl-C" in job.result(timeout=0).err, "answer to Ctrl-C")
    time.sleep(1.5 * REPEATED_SIGNAL_S)
    os.kill(launcher, signal.SIGINT)


def check_named(result: Result, rank: int, seconds: int) -> None:
    text = f"rank {rank} (h{rank + 1}) did not answer: no end was reported within {seconds} s of SIGKILL"
    assert text in result.err, result
