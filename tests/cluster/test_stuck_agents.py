"""An agent on another host that is stopped, as on one that swaps: it is named, and the job ends, with its processes."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from cluster_fixture import HOSTS, READY, RUNS, UNTIL_GO, Bed, Job, JobRunner
from harness import Result, extended, write_fake_runtime
from launch_modes import ATTACHED, LAUNCHED, MPICH, OPEN_MPI_5, SLURM, Engine, LaunchMode

from jaxrun.controller.head.head_state import REPEATED_SIGNAL_S

BY_HAND = ("by_hand.py", *[RUNS + READY] * len(HOSTS))


def stop_agent(job: Job, rank: int = 1) -> None:
    job.wait_for_output("ready")
    os.kill(job.agent(rank), signal.SIGSTOP)


def ctrl_c_twice(job: Job) -> None:
    launcher = job.launcher()
    os.kill(launcher, signal.SIGINT)
    job.wait_until(lambda: "another Ctrl-C" in job.result(timeout=0).err, "answer to Ctrl-C")
    time.sleep(1.5 * REPEATED_SIGNAL_S)
    os.kill(launcher, signal.SIGINT)


def two_signals(job: Job) -> None:
    launcher = job.launcher()
    os.kill(launcher, signal.SIGTERM)
    job.wait_until(lambda: "stopping 3 ranks" in job.result(timeout=0).err, "answer to SIGTERM")
    os.kill(launcher, signal.SIGINT)


def one_signal(job: Job) -> None:
    os.kill(job.launcher(), signal.SIGTERM)


def the_time_limit(job: Job) -> None:
    """Nothing more is done."""


def check_named(result: Result, rank: int, seconds: int) -> None:
    """The seconds are those that have passed: on a machine that has paused, more than the limit."""
    text = rf"rank {rank} \(h{rank + 1}\) did not answer: no end was reported within (\d+) s of SIGKILL"
    found = re.search(text, result.err)
    assert found and seconds <= int(found[1]) < seconds + 8, result


@pytest.mark.parametrize(
    ("direction", "engine", "end", "rank", "code", "seconds"),
    [
        (LAUNCHED, OPEN_MPI_5, ctrl_c_twice, 1, 130, 2),
        extended(LAUNCHED, SLURM, ctrl_c_twice, 1, 130, 2),
        extended(LAUNCHED, OPEN_MPI_5, the_time_limit, 1, 124, 10),
        # Attached, it is the engine's to end processes of its own: each does so in its own way.
        (ATTACHED, SLURM, two_signals, 1, 143, 2),
        *(extended(ATTACHED, engine, two_signals, 1, 143, 2) for engine in (MPICH, OPEN_MPI_5)),
        extended(ATTACHED, SLURM, one_signal, 1, 143, 10),
        extended(ATTACHED, OPEN_MPI_5, one_signal, 0, 143, 10),  # a child of the head
    ],
    ids=lambda value: value.label if isinstance(value, Engine) else getattr(value, "__name__", str(value)),
)
def test_a_job_ends_without_a_stopped_agent(
    make_runner: Callable[[LaunchMode], JobRunner],
    direction: str,
    engine: Engine,
    end: Callable[[Job], None],
    rank: int,
    code: int,
    seconds: int,
) -> None:
    # With the second, agents outlive their mpirun, and this one nothing but its being stopped.
    options = ("--timeout", "12", "--min-hosts", "3", "--max-restarts", "1") if end is the_time_limit else ()
    with make_runner(LaunchMode(engine, direction)).by_hand(*options) as job:
        stop_agent(job, rank)
        end(job)
        result = job.result()
        job.gone()
    assert result.verdict()["exit_code"] == code, result
    assert result.code == code if direction == LAUNCHED else result.code != 0
    check_named(result, rank, seconds)


@pytest.mark.extended
@pytest.mark.usefixtures("mended")
@pytest.mark.parametrize("engine", [OPEN_MPI_5, extended(SLURM)], ids=lambda engine: engine.label)
def test_a_job_outlives_a_stopped_agent_and_a_link_that_is_cut_for_less_than_the_host_timeout(
    make_runner: Callable[[LaunchMode], JobRunner], tmp_path: Path, engine: Engine
) -> None:
    go = tmp_path / "go"
    runner = make_runner(LaunchMode(engine, LAUNCHED))
    with runner.by_hand("--host-timeout", "60", code=UNTIL_GO.format(str(go))) as job:
        stop_agent(job)
        time.sleep(3.0)  # the default would end the job after 2 s if the kernel said nothing
        os.kill(job.agent(1), signal.SIGCONT)
        runner.bed.run("cut", "h2")
        time.sleep(3.0)  # and now it does not
        runner.bed.run("mend", "h2")
        go.touch()
        result = job.result()
        job.gone()
    assert result.code == 0 and not result.events("AgentLost"), result


@pytest.mark.extended
def test_slurm_ends_a_stopped_agent_also_where_srun_hangs(bed: Bed, tmp_path: Path) -> None:
    """In an allocation that outlives the job, as in a shell of salloc's."""
    command = LaunchMode(SLURM, LAUNCHED).command(HOSTS, "--run-dir", str(tmp_path / "run"), *BY_HAND)
    first = command.index(sys.executable)
    command[first:first] = ["sh", "-c", '"$@"; echo ended with $?; exec sleep 1000', "sh"]
    with bed.typed("ctl", *command, directory=tmp_path, env=write_fake_runtime(tmp_path)) as job:
        stop_agent(job)
        for process in bed.job_processes():
            if process.command == "srun":
                os.kill(process.pid, signal.SIGSTOP)
        ctrl_c_twice(job)
        job.wait_until(lambda: "ended with 130" in job.result(timeout=0).out, "end of the job")
        check_named(job.result(timeout=0), 1, 2)
        job.gone(but_for=("salloc", "sleep"))
        assert job.process.poll() is None
