"""Jobs of a real Grid Engine on simulated hosts: submitted by jaxrun, started by qrsh, deleted, and started again."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from cluster_fixture import READY, RUNS, Bed, Job, parent_of
from harness import TIME_LIMIT, Result, write_fake_runtime
from launch_modes import OPEN_MPI_5, PYTHON

TWO = ("-n", "2", "--pe", "spread")
# A job that is started again may reach a host before that has forgotten the run before; sge_execd then ignores it, and
# sge_qmaster sends it once more after five minutes.
RESENT_S = 300 + TIME_LIMIT
may_be_resent = pytest.mark.timeout(RESENT_S + 60)
TRAIN = """
import os, time
import jax
from jaxrun_runtime import should_stop

attempt = os.environ["JAXRUN_ATTEMPT"]
while attempt == "1":
    time.sleep(0.1)
    if should_stop():
        print("stopped in attempt", attempt, flush=True)
        raise SystemExit
print("done in attempt", attempt, flush=True)
"""
DONE = "run(); print('on', os.uname().nodename, flush=True); done()"


@contextmanager
def submitted(
    cell: Bed, directory: Path, *options: str, program: Sequence[str] = ("by_hand.py", RUNS + READY, RUNS + READY)
) -> Iterator[Job]:
    """A job, of workers by hand if it runs their program, that `jaxrun --submit` has submitted and follows."""
    run_dir = ("--run-dir", str(directory / "run"))
    words = (PYTHON, "-m", "jaxrun", "--backend", "sge", "--submit", *run_dir, *options, *program)
    env = write_fake_runtime(directory) if program[0] == "by_hand.py" else {}
    try:
        with cell.typed("ctl", *words, directory=directory, env=env) as job:
            yield job
    finally:
        if cell.inside("ctl", "qstat", "-u", "root"):
            cell.inside("ctl", "qdel", "-f", "-u", "root")


def number_of(result: Result) -> str:
    found = re.search(r"jaxrun: submitted job (\d+) ", result.err)
    assert found, result
    return found[1]


def finish(cell: Bed, directory: Path, *options: str, codes: Sequence[str]) -> Result:
    """Run a job to its end, and check that nothing is left of it on any host."""
    with submitted(cell, directory, *options, program=["by_hand.py", *codes]) as job:
        result = job.result(RESENT_S if "--requeue" in options else TIME_LIMIT)
        job.gone()
    assert not list(directory.glob(".jaxrun*")), result
    return result


def test_a_job_of_two_hosts_is_submitted_followed_and_over(cell: Bed, tmp_path: Path) -> None:
    result = finish(cell, tmp_path, *TWO, "--time", "10", codes=[DONE, DONE])
    number = number_of(result)
    assert result.code == 0, result
    output = tmp_path / f"jaxrun-{number}.out"
    assert re.search(rf"is running on all\.q@h[123]; output: {re.escape(str(output))}", result.err), result
    assert f"2 processes on 2 hosts by qrsh in Grid Engine's job {number}" in result.out
    assert {line for line in result.out.splitlines() if line.startswith("[")} <= {
        f"[{rank}] on h{host}" for rank in (0, 1) for host in (1, 2, 3)
    }
    assert output.read_text() == result.out
    assert "granted_pe   spread" in cell.inside("ctl", "qacct", "-j", number)
    assert "category     -l h_rt=600 -pe spread 2" in cell.inside("ctl", "qacct", "-j", number)


def test_a_rank_that_fails_on_another_host_is_named_and_its_status_is_the_jobs(cell: Bed, tmp_path: Path) -> None:
    result = finish(cell, tmp_path, *TWO, codes=[RUNS + READY, "run(); os._exit(3)"])
    assert result.code == 3, result
    assert re.search(r"rank 1 of 2 on h[123] exited with status 3", result.out), result
    assert "1 other was stopped" in result.out, result


def test_a_deleted_job_leaves_nothing_on_any_host_and_is_said_to_be_over(cell: Bed, tmp_path: Path) -> None:
    with submitted(cell, tmp_path, *TWO) as job:
        job.wait_for_output("ready", count=2)
        number = job.wait_until(lambda: re.search(r"submitted job (\d+)", (tmp_path / "err").read_text()), "its number")
        cell.inside("ctl", "qdel", number[1])
        result = job.result()
        job.gone()
    assert result.code == 137, result
    assert f"jaxrun: job {number[1]} ended as failed (assumedly after job)" in result.err


@may_be_resent
def test_a_preempted_job_is_started_again_in_the_same_run_directory(cell: Bed, tmp_path: Path) -> None:
    once = "run(); print('attempt', os.environ['JAXRUN_ATTEMPT'], os.environ['RESTARTED'], flush=True); "
    once += "os._exit(75) if os.environ['JAXRUN_ATTEMPT'] == '1' else done()"
    result = finish(cell, tmp_path, *TWO, "--requeue", codes=[once, once])
    number = number_of(result)
    assert result.code == 0, result
    assert f"Grid Engine will start job {number} again (exit status 99), unless it was deleted" in result.out
    assert f"jaxrun: Grid Engine starts job {number} again (restart 1)" in result.err
    assert f"the job in {tmp_path / 'run'} continues with attempt 2" in result.out
    assert "[0] attempt 1 0" in result.out and "[0] attempt 2 1" in result.out, result


def test_where_grid_engine_may_start_no_tasks_ssh_does(cell: Bed, tmp_path: Path) -> None:
    result = finish(cell, tmp_path, "-n", "2", "--pe", "loose", codes=[DONE, DONE])
    assert result.code == 0, result
    assert "2 processes on 2 hosts by ssh (the parallel environment loose has control_slaves FALSE)" in result.out


@may_be_resent
@pytest.mark.extended
def test_a_job_with_a_time_limit_stops_before_it_and_goes_on(cell: Bed, tmp_path: Path) -> None:
    """The limit is known from qstat, and the program is asked in time: Grid Engine itself would kill it at once."""
    (tmp_path / "train.py").write_text(TRAIN)
    limits = ("--time", "1:00", "--save-time", "5")  # a start-up has taken 35 s on a machine at half its speed
    with submitted(cell, tmp_path, *TWO, "--requeue", *limits, program=["train.py"]) as job:
        result = job.result(RESENT_S)
        job.gone()
    assert result.code == 0, result
    assert "time limit in 5 s: asked ranks 0-1 to stop" in result.out and "(restart 1)" in result.err, result
    assert result.out.count("stopped in attempt 1") == result.out.count("done in attempt 2") == 2, result


@pytest.mark.extended
@pytest.mark.parametrize("backend", ["mpirun", "ssh"])
def test_other_backends_use_the_hosts_and_slots_of_the_job(cell: Bed, tmp_path: Path, backend: str) -> None:
    if reason := OPEN_MPI_5.missing():
        pytest.skip(reason)
    mpirun = ("--mpirun", OPEN_MPI_5.mpirun) if backend == "mpirun" else ()
    words = (PYTHON, "-m", "jaxrun", "--backend", backend, *mpirun, "--no-run-dir", "by_hand.py", *[DONE] * 3)
    env = write_fake_runtime(tmp_path)
    qsub = ("qsub", "-sync", "y", "-b", "y", "-shell", "n", "-V", "-cwd", "-j", "y", "-o", "job.out")
    with cell.typed("ctl", *qsub, "-pe", "spread", "3", *words, directory=tmp_path, env={**os.environ, **env}) as job:
        assert job.result().code == 0, (tmp_path / "job.out").read_text()
    assert "3 processes on 3 hosts by" in (tmp_path / "job.out").read_text()


def test_a_killed_jaxrun_leaves_nothing(cell: Bed, tmp_path: Path) -> None:
    with submitted(cell, tmp_path, *TWO) as job:
        job.wait_for_output("ready", count=2)
        os.kill(launcher_within(cell), signal.SIGKILL)
        result = job.result()
        job.gone()
    assert result.code == 137, result


def launcher_within(cell: Bed) -> int:
    """The jaxrun that replaced the shell of a batch script: its parent is Grid Engine's shepherd."""
    jaxrun = [
        one.pid for one in cell.job_processes() if one.argv[1:3] == ("-m", "jaxrun") and "--submit" not in one.argv
    ]
    return next(pid for pid in jaxrun if "sge_shepherd" in Path(f"/proc/{parent_of(pid)}/cmdline").read_text())
