"""The failure table on three hosts, started by jaxrun and attached to.

What an engine may do in its own way is tried with every engine: its start, what it makes of a rank's failure, and how a
signal, a lost host and a killed launcher or agent reach it. What agents and head decide among themselves is tried with
one engine in each direction (ANY). Rank 1, which misbehaves, is on another host than the launcher. scripts/matrix makes
the table of docs/clusters.md from the marks of `row`.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

from cluster_fixture import ENGINE, HOSTS, Job, JobRunner
from harness import MISBEHAVE, Result
from launch_modes import ALL, ANY, ATTACHED, BASIC, LAUNCHED, MPICH, OF_MPI, OPEN_MPI_5, SLURM, SOME, LaunchMode, row

# The rank that fails notes when.
RAISES = """\
import sys, time
import jax
from jax.experimental import multihost_utils

for step in range(1000):
    multihost_utils.sync_global_devices(f"step {step}")
    if step == 20 and jax.process_index() == 1:
        print("raised at", time.time(), flush=True)
        raise ValueError("bad record in shard 1")
"""
RAISED = re.compile(r"raised at (\S+)\n")
SELFCHECK = "jaxrun_runtime.programs.selfcheck"
SELFCHECK_AND_ALLREDUCE = f"""\
from {SELFCHECK} import main
main()

import jax, jax.numpy as jnp
from jax.experimental import multihost_utils
from mpi4py import MPI

world = MPI.COMM_WORLD
assert (world.rank, world.size) == (jax.process_index(), jax.process_count()), (world.rank, world.size)
by_mpi = world.allreduce(world.rank + 1)
by_jax = multihost_utils.process_allgather(jnp.array([jax.process_index() + 1])).sum()
print("sums", by_mpi, by_jax)
"""


def exit_code(runner: JobRunner, result: Result) -> int:
    """The job's: under attach, the engine makes its own of it, of which only is known that it is not 0."""
    if runner.mode.direction == ATTACHED:
        assert result.code != 0
        return int(str(result.verdict()["exit_code"]))
    return result.code


def seconds_until(holds: Callable[[], bool], since: float, limit: float = 10) -> float:
    while not holds():
        assert time.time() - since < limit
        time.sleep(0.005)
    return time.time() - since


@row("selfcheck", *BASIC, LaunchMode(SLURM, ATTACHED), always=BASIC)
def test_the_selfcheck_passes(runner: JobRunner) -> None:
    check_hosts(runner.jaxrun("-m", SELFCHECK))


def check_hosts(result: Result) -> None:
    assert result.code == 0, result
    assert "psum, all_gather and ppermute are right on 3 device(s) in 3 process(es)" in result.out, result
    assert {str(event["host"]) for event in result.events("reported")} == set(HOSTS)


@row("regression", *ANY)
def test_the_main_job_runs(runner: JobRunner) -> None:
    result = runner.jaxrun("-d", "2", "-m", "jaxrun_runtime.programs.regression")
    assert result.code == 0, result
    assert "truth: 2 x - 1" in result.out


@row("selfcheck, mpi4py beside JAX", *OF_MPI)
def test_mpi_and_jax_agree_on_ranks_and_sums(runner: JobRunner, tmp_path: Path) -> None:
    program = tmp_path / "allreduce.py"
    program.write_text(SELFCHECK_AND_ALLREDUCE)
    result = runner.jaxrun(str(program))
    check_hosts(result)
    logs = [(result.run_dir / f"rank-{rank:04d}.out").read_text().splitlines() for rank in range(3)]
    assert all("sums 6 6" in log for log in logs), logs


@row("an exception", *ALL, always=BASIC)
def test_an_exception_on_another_host_ends_all_at_once(
    runner: JobRunner, tmp_path: Path, measured: Callable[[str, float], None]
) -> None:
    program = tmp_path / "raises.py"
    program.write_text(RAISES)
    with runner.started(str(program)) as job:
        job.wait_until(lambda: bool(RAISED.search(job.log(1))), "exception")
        raised = float(RAISED.search(job.log(1))[1])  # type: ignore[index]
        workers = seconds_until(lambda: not job.workers(), raised)
        result = job.result()
        measured("seconds until all workers had ended", workers)
        measured("seconds until the command had ended", time.time() - raised)
        job.gone()
    assert workers < 5  # a few hundredths of a second where the machine has nothing else to do
    assert exit_code(runner, result) == 1
    assert "ValueError: bad record in shard 1" in result.err and "rank 1 of 3 on h2 raised ValueError" in result.err
    assert result.err.count("Traceback (most recent call last)") == 1
    assert result.verdict()["culprits"] == [1]


@row("`sys.exit(7)`", *ANY)
def test_sys_exit_is_the_jobs_status(runner: JobRunner) -> None:
    result = runner.jaxrun(MISBEHAVE, "--exit", "7")
    assert exit_code(runner, result) == 7
    assert "rank 1 of 3 on h2 ended with status 7" in result.err


@row("`os._exit(7)`", *ANY)
def test_a_sudden_exit_is_named(runner: JobRunner) -> None:
    result = runner.jaxrun(MISBEHAVE, "--os-exit", "7")
    assert exit_code(runner, result) == 7
    assert "rank 1 of 3 on h2 exited with status 7" in result.err


@row("SIGKILL", *SOME)
def test_a_killed_rank_is_named(runner: JobRunner) -> None:
    result = runner.jaxrun(MISBEHAVE, "--signal", "SIGKILL")
    assert exit_code(runner, result) == 137
    assert "rank 1 of 3 on h2 was killed by SIGKILL (9)" in result.err


@row("SIGKILL of rank 0", *ANY)
def test_rank_0_may_be_the_one_that_is_killed(runner: JobRunner) -> None:
    result = runner.jaxrun(MISBEHAVE, "--signal", "SIGKILL", "--rank", "0")
    assert exit_code(runner, result) == 137
    assert "rank 0 of 3 on h1 was killed by SIGKILL (9)" in result.err


@row("SIGSEGV", *ANY)
def test_a_crash_shows_where_python_was(runner: JobRunner) -> None:
    result = runner.jaxrun(MISBEHAVE, "--signal", "SIGSEGV")
    assert exit_code(runner, result) == 139
    assert "rank 1 of 3 on h2 crashed with SIGSEGV (11)" in result.err
    assert "in misbehave" in result.err


@row("it ends while others wait", *ANY)
def test_an_early_exit_is_named_with_where_the_others_wait(runner: JobRunner) -> None:
    result = runner.jaxrun(MISBEHAVE, "--finish")
    assert exit_code(runner, result) == 124
    assert "rank 1 finished" in result.err and "misbehave.py:" in result.err


@row("stuck, `--timeout`", *ANY)
def test_a_time_limit_shows_where_every_rank_is(runner: JobRunner) -> None:
    result = runner.jaxrun("--timeout", "12", MISBEHAVE, "--hang")
    assert exit_code(runner, result) == 124
    assert re.search(r"2 ranks +0, 2 .*misbehave.py:\d+ main", result.err), result
    assert re.search(r"1 rank +1 \(h2\) .*misbehave.py:\d+ misbehave", result.err), result


@row("SIGQUIT shows stacks", *ANY)
def test_sigquit_shows_the_stacks_of_all_hosts_and_does_no_harm(runner: JobRunner) -> None:
    with runner.started(MISBEHAVE, "--steps", "100") as job:
        job.wait_for_output("ready")
        os.kill(job.launcher(), signal.SIGQUIT)
        result = job.result()
    assert result.code == 0, result
    assert re.search(r"3 ranks, \d groups?\n", result.err) and "misbehave.py:" in result.err, result


@row("Ctrl-C", *SOME)
def test_ctrl_c_ends_the_job_within_the_grace(runner: JobRunner) -> None:
    with runner.started("--grace", "0.5", MISBEHAVE, "--rank", "-1", "--hang") as job:
        job.wait_for_output("ready")
        if runner.mode.direction == LAUNCHED:
            os.kill(job.launcher(), signal.SIGINT)
        else:  # it is mpirun's and srun's business; srun wants to be told twice
            for _ in range(2 if runner.mode.engine is SLURM else 1):
                os.killpg(job.process.pid, signal.SIGINT)
                time.sleep(0.3)
        result = job.result(timeout=20)  # sooner than after the grace of those that set none
        job.gone()
    assert result.code != 0
    if runner.mode.direction == LAUNCHED:
        assert result.code == 130 and "interrupted by Ctrl-C (SIGINT)" in result.err, result


@row("SIGTERM by the scheduler", *SOME)
def test_sigterm_by_the_scheduler_is_named_as_such(runner: JobRunner) -> None:
    with runner.started("--grace", "0.5", MISBEHAVE, "--rank", "-1", "--hang") as job:
        job.wait_for_output("ready")
        _cancel(runner)
        result = job.result(timeout=20)
        job.gone()
    # It leaves a process a quarter of a second from SIGTERM to SIGKILL.
    if runner.mode == LaunchMode(OPEN_MPI_5, ATTACHED):
        assert result.code != 0 and re.search(r"SIGTERM: .*stopping 3 ranks", result.err), result
    else:
        assert exit_code(runner, result) == 143 and "interrupted by SIGTERM" in result.err, result


def _cancel(runner: JobRunner) -> None:
    """As a scheduler does: end the tasks of the job, or mpirun."""
    if runner.mode.engine is SLURM:
        jobs = runner.bed.inside("ctl", "squeue", "--noheader", "--format=%i").split()
        runner.bed.inside("ctl", "scancel", *jobs)
    else:
        launch_command = next(found for found in runner.bed.job_processes() if found.command in ("mpirun", "prterun"))
        os.kill(launch_command.pid, signal.SIGTERM)


@row("`kill -9` of jaxrun at its start", *(mode for mode in ALL if mode.direction == LAUNCHED), always=BASIC)
def test_kill_9_of_the_launcher_leaves_no_agent_that_looks_for_it(runner: JobRunner) -> None:
    with runner.started("--init-timeout", "60", MISBEHAVE, "--rank", "-1", "--hang") as job:
        job.wait_until(lambda: _agents(job), "agent")
        os.kill(job.launcher(), signal.SIGKILL)
        job.gone()


def _agents(job: Job) -> list[int]:
    """The agents that have started by now."""
    return [found.pid for found in job.bed.job_processes() if found.argv[1:3] == ("-m", "jaxrun.agent")]


@row("`kill -9` of jaxrun", *ALL)
def test_kill_9_of_the_launcher_leaves_nothing_on_any_host(
    runner: JobRunner, measured: Callable[[str, float], None]
) -> None:
    with runner.started(MISBEHAVE, "--rank", "-1", "--leave-children", "--hang") as job:
        job.wait_for_output("children")
        assert len(job.workers()) >= 3
        os.kill(job.launcher(), signal.SIGKILL)
        took = job.gone(but_for=ENGINE)  # the engine's own daemons end in their own time
        measured("seconds until nothing was left", took)
        job.gone()


# Attached to MPICH, rank 0 and its head are killed by Hydra as soon as any of its processes dies of a signal.
@row("`kill -9` of an agent", *(mode for mode in SOME if mode != LaunchMode(MPICH, ATTACHED)))
def test_a_killed_agent_is_named_by_its_host(runner: JobRunner) -> None:
    with runner.started(MISBEHAVE, "--rank", "-1", "--hang") as job:
        job.wait_for_output("ready")
        os.kill(job.agent(1), signal.SIGKILL)
        result = job.result()
        job.gone()
    assert exit_code(runner, result) == 69, result
    assert "rank 1 of 3 on h2 was lost" in result.err


@row("children left behind", *ANY)
def test_processes_that_workers_leave_behind_are_ended_on_every_host(runner: JobRunner) -> None:
    result = runner.jaxrun(MISBEHAVE, "--rank", "-1", "--leave-children", "--finish")
    assert result.code == 0, result
    assert result.out.count("children") == 3


@row("another program on one host", *ANY)
def test_a_program_that_differs_on_one_host_is_refused(runner: JobRunner) -> None:
    for host in ("ctl", *HOSTS):  # /dev/shm is each host's own
        text = f"print('the program ran on', {host if host == 'h3' else 'h'!r})"
        runner.bed.inside(host, "sh", "-c", 'printf "%s\\n" "$1" >/dev/shm/program.py', "sh", text)
    result = runner.jaxrun("/dev/shm/program.py")
    assert exit_code(runner, result) == 65, result
    assert re.search(r"rank 2 +program \w+ +\(h3\)", result.err), result
    assert "the program ran" not in result.out
