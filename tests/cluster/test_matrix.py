"""The failure table on three hosts, started by jaxrun and attached to.

What an engine may do in its own way is tried with every engine: its start, what it makes of a rank's failure, and how a
signal, a lost host and a killed launcher or agent reach it. What agents and head decide among themselves is tried with
one engine in each direction (ANY). The start is one of JAX's, in all others the workers are by hand. Rank 1, which
fails, is on another host than the launcher. scripts/matrix makes the table of docs/evidence.md from the marks of `row`.
"""

from __future__ import annotations

import os
import re
import signal
import time
from itertools import count
from pathlib import Path

import pytest
from cluster_fixture import ENGINE, HOSTS, READY, RUNS, TIME_LIMIT, Job, JobRunner
from harness import Result
from launch_modes import (
    ALL,
    ANY,
    ATTACHED,
    BASIC,
    LAUNCHED,
    MPICH,
    OPEN_MPI_5,
    OPENSSH,
    SLURM,
    SOME,
    SSH,
    LaunchMode,
    row,
)

STARTS_AND_RAISES = """\
from jaxrun_runtime.programs.selfcheck import main
main()

import os, jax, jax.numpy as jnp
from jax.experimental import multihost_utils

if "MPI4PY_LIBMPI" in os.environ:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    assert (world.rank, world.size) == (jax.process_index(), jax.process_count()), (world.rank, world.size)
    by_mpi = world.allreduce(world.rank + 1)
    by_jax = multihost_utils.process_allgather(jnp.array([jax.process_index() + 1])).sum()
    print("sums", by_mpi, by_jax, flush=True)
for step in range(1000):
    multihost_utils.sync_global_devices(f"step {step}")
    if step == 20 and jax.process_index() == 1:
        raise ValueError("bad record in shard 1")
"""
SSHD = ("sshd: root@notty", "sshd: root [priv]")
# For a worker by hand: leaves a process behind, in a session of its own.
LEAVES = "import subprocess; subprocess.Popen(['sleep', '1000'], start_new_session=True); "


def exit_code(runner: JobRunner, result: Result) -> int:
    """The job's: under attach, the engine makes its own of it, of which only is known that it is not 0."""
    if runner.mode.direction == ATTACHED:
        assert result.code != 0
        return int(str(result.verdict()["exit_code"]))
    return result.code


@row("start, collectives beside mpi4py's, an exception", *ALL, SSH, always=(*BASIC, SSH))
def test_ranks_start_work_together_and_end_all_at_once_where_one_raises(runner: JobRunner, tmp_path: Path) -> None:
    program = tmp_path / "raises.py"
    program.write_text(STARTS_AND_RAISES)
    result = runner.jaxrun(str(program))
    assert exit_code(runner, result) == 1, result
    assert "psum, all_gather and ppermute are right on 3 device(s) in 3 process(es)" in result.out, result
    assert {event["host"] for event in result.events("AgentReport")} == set(HOSTS)
    if runner.mode.engine not in (SLURM, OPENSSH):
        logs = [(result.run_dir / f"rank-{rank:04d}.out").read_text().splitlines() for rank in range(3)]
        assert all("sums 6 6" in log for log in logs), logs
    assert "ValueError: bad record in shard 1" in result.err and "rank 1 of 3 on h2 raised ValueError" in result.err
    assert result.err.count("Traceback (most recent call last)") == 1
    assert result.verdict()["culprits"] == [1]
    if "The first process to do so was:" in result.err:  # Open MPI, if it has started all processes
        assert re.search(r"Process name: \[(prterun-.*|\[\d+,\d+\]),1\]", result.err), result


@row("SIGKILL, children left behind", *SOME, SSH, always=BASIC)
def test_a_killed_rank_is_named_and_what_all_have_started_is_ended(runner: JobRunner) -> None:
    with runner.by_hand(code=RUNS + LEAVES + READY, rank_1=f"{RUNS}{LEAVES}os.kill(os.getpid(), 9)") as job:
        result = job.result()
        job.gone()
    assert exit_code(runner, result) == 137
    assert "rank 1 of 3 on h2 was killed by SIGKILL (9)" in result.err


@row("SIGSEGV", *ANY)
def test_a_crash_shows_where_python_was(runner: JobRunner) -> None:
    with runner.by_hand(rank_1="run(); os.kill(os.getpid(), signal.SIGSEGV)") as job:
        result = job.result()
        job.gone()
    assert exit_code(runner, result) == 139
    assert "rank 1 of 3 on h2 crashed with SIGSEGV (11)" in result.err and "in live" in result.err


@row("stuck: SIGQUIT shows stacks, `--timeout` ends it", *ANY)
def test_the_stacks_of_all_hosts_are_shown_on_sigquit_and_where_the_time_is_over(runner: JobRunner) -> None:
    stacks = re.compile(r"3 ranks, 1 group\n +3 ranks +0-2 .*worker_by_hand\.py:\d+ live")
    with runner.by_hand("--timeout", "12") as job:
        job.wait_for_output("ready")
        os.kill(job.launcher(), signal.SIGQUIT)
        job.wait_until(lambda: stacks.search(job.result(timeout=0).err), "stacks")
        shown = job.result(timeout=0).err
        result = job.result()
        job.gone()
    assert exit_code(runner, result) == 124
    for text in (shown, result.err.removeprefix(shown)):
        assert stacks.search(text), result


@row("Ctrl-C", *SOME, SSH, always=BASIC)
def test_ctrl_c_ends_the_job(runner: JobRunner) -> None:
    with runner.by_hand("--grace", "0.5") as job:
        job.wait_for_output("ready")
        if runner.mode.direction == LAUNCHED:
            os.kill(job.launcher(), signal.SIGINT)
        elif runner.mode.engine is SLURM:
            type_ctrl_c_until_srun_ends_its_tasks(job)
        else:
            os.killpg(job.process.pid, signal.SIGINT)
        result = job.result()
        job.gone()
    assert result.code != 0
    if runner.mode.direction == LAUNCHED:
        assert result.code == 130 and "interrupted by Ctrl-C (SIGINT)" in result.err, result


def type_ctrl_c_until_srun_ends_its_tasks(job: Job) -> None:
    """It wants a second one within a second of the first, and says so each time."""
    for asked in count(1):
        os.killpg(job.process.pid, signal.SIGINT)
        deadline = time.monotonic() + TIME_LIMIT
        while (text := job.result(timeout=0).err).count("one more within 1 sec") < asked:
            if "sending Ctrl-C" in text or job.process.poll() is not None:
                return
            assert time.monotonic() < deadline, text
            time.sleep(0.01)


@pytest.mark.extended
@row("SIGTERM by the scheduler", *SOME, always=BASIC)
def test_sigterm_by_the_scheduler_is_named_as_such(runner: JobRunner) -> None:
    with runner.by_hand("--grace", "0.5") as job:
        job.wait_for_output("ready")
        cancel(runner)
        result = job.result()
        job.gone()
    # It leaves a process a quarter of a second from SIGTERM to SIGKILL: a head that has said nothing was killed before.
    if runner.mode == LaunchMode(OPEN_MPI_5, ATTACHED):
        says_nothing = result.err.endswith("jaxrun: run dir run\n")
        assert result.code != 0 and (says_nothing or re.search(r"SIGTERM: .*stopping 3 ranks", result.err)), result
    else:
        assert exit_code(runner, result) == 143 and "interrupted by SIGTERM" in result.err, result


def cancel(runner: JobRunner) -> None:
    """As a scheduler does: end the tasks of the job, or mpirun."""
    if runner.mode.engine is SLURM:
        jobs = runner.bed.inside("ctl", "squeue", "--noheader", "--format=%i").split()
        runner.bed.inside("ctl", "scancel", *jobs)
    else:
        launch_command = next(found for found in runner.bed.job_processes() if found.command in ("mpirun", "prterun"))
        os.kill(launch_command.pid, signal.SIGTERM)


@pytest.mark.extended
@row(
    "`kill -9` of jaxrun at its start",
    *(mode for mode in ALL if mode.direction == LAUNCHED),
    SSH,
    always=(*BASIC, SSH),
)
def test_kill_9_of_the_launcher_leaves_no_agent_that_looks_for_it(runner: JobRunner) -> None:
    with runner.by_hand("--init-timeout", "60") as job:
        job.wait_until(lambda: agents(job), "agent")
        os.kill(job.launcher(), signal.SIGKILL)
        job.gone()


def agents(job: Job) -> list[int]:
    """Those that have started by now."""
    return [found.pid for found in job.bed.job_processes() if found.argv[1:3] == ("-m", "jaxrun.node.agent")]


@row("`kill -9` of jaxrun", *ALL, SSH)
def test_kill_9_of_the_launcher_leaves_nothing_on_any_host(runner: JobRunner) -> None:
    with runner.by_hand(code=RUNS + LEAVES + READY) as job:
        job.wait_for_output("ready")
        os.kill(job.launcher(), signal.SIGKILL)
        job.gone()


# Attached to MPICH, rank 0 and its head are killed by Hydra as soon as any of its processes dies of a signal.
@pytest.mark.extended
@row("`kill -9` of an agent", *(mode for mode in SOME if mode != LaunchMode(MPICH, ATTACHED)), SSH, always=BASIC)
def test_a_killed_agent_is_named_by_its_host(runner: JobRunner) -> None:
    with runner.by_hand() as job:
        job.wait_for_output("ready", count=3)  # else what another has just sent may be read together with its end
        os.kill(job.agent(1), signal.SIGKILL)
        result = job.result()
        job.gone()
    assert exit_code(runner, result) == 69, result
    assert "rank 1 of 3 on h2 was lost" in result.err


@row("`host cut`", *SOME, SSH, always=BASIC)
@pytest.mark.usefixtures("mended")
def test_a_host_that_is_cut_off_is_named_and_ends_its_worker_by_itself(runner: JobRunner) -> None:
    lose(runner, "cut")


# To its engine, such a host is one that is cut off. (Attached to Open MPI 5, mpirun kills rank 0, and the head with it,
# once it has lost its daemon there.)
@row("`host off`", *ANY, SSH)
@pytest.mark.usefixtures("mended")
def test_a_host_that_loses_its_power_is_named(runner: JobRunner) -> None:
    lose(runner, "off")


def lose(runner: JobRunner, how: str) -> None:
    """Take h2 away in this way, which closes no connection; check the report and what is left of the job."""
    ours = runner.mode.direction == LAUNCHED
    with runner.by_hand() as job:
        job.wait_for_output("ready")
        runner.bed.run(how, "h2")
        job.wait_until((job.run_dir / "verdict.json").exists, "verdict")
        # An mpirun that we have not started may wait for its own daemon on that host for as long as it likes.
        if ours:
            job.result()
        # The sshd of a host that is cut off holds its session until its TCP connection fails, after minutes.
        job.gone(but_for=SSHD if runner.mode == SSH else () if ours else ENGINE)
        result = job.result(timeout=0)
    verdict = result.verdict()
    assert (verdict["exit_code"], verdict["culprits"]) == (69, [1]), result
    assert "rank 1 of 3 on h2 was lost" in str(verdict["headline"])
    assert "rank 1 of 3 on h2 was lost" in result.err or not ours  # an mpirun that dies shows no more of what we say
    assert result.code == 69 or not ours


@row("another program on one host", LaunchMode(SLURM, ATTACHED))
def test_a_program_that_differs_on_one_host_is_refused(runner: JobRunner) -> None:
    for host in ("ctl", *HOSTS):  # /dev/shm is each host's own
        text = f"print('the program ran on', {host if host == 'h3' else 'h'!r})"
        runner.bed.inside(host, "sh", "-c", 'printf "%s\\n" "$1" >/dev/shm/program.py', "sh", text)
    result = runner.jaxrun("/dev/shm/program.py")
    assert exit_code(runner, result) == 65, result
    assert re.search(r"rank 2 +program \w+ +\(h3\)", result.err), result
    assert "the program ran" not in result.out
