"""Jobs over hosts that are started again: by the same agents, by an engine started anew, and on a spare host."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from cluster_fixture import HOSTS, UNTIL_GO, Bed, Job, JobRunner
from harness import Result, extended, kill, wait_until, write_fake_runtime
from launch_modes import (
    INTEL,
    LAUNCHED,
    MPICH,
    OPEN_MPI_4,
    OPEN_MPI_5,
    OPENSSH,
    PYTHON,
    SLURM,
    Engine,
    LaunchMode,
    ssh_env,
)

MPIRUN = ("mpirun", "prterun", "mpiexec.hydra")
# Of a worker by hand: in the first attempt it waits, or ends in its own way; in the second it ends well.
WAITS = "time.sleep(1000)"
OF_TWO_ATTEMPTS = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
run()
print("ready on", os.uname().nodename, flush=True)
if os.environ["JAXRUN_ATTEMPT"] == "1":
    {first}
done()
"""


@contextmanager
def started(bed: Bed, engine: Engine, directory: Path, *options: str, rank_1: str = WAITS) -> Iterator[Job]:
    """A job with restarts on all hosts of the testbed."""
    if reason := engine.missing():
        pytest.skip(reason)
    ends = [WAITS, rank_1, WAITS]
    program = ("by_hand.py", *(OF_TWO_ATTEMPTS.format(first=first) for first in ends))
    words = ("--run-dir", str(directory / "run"), "--max-restarts", "2", *options, *program)
    mode = LaunchMode(engine, LAUNCHED)
    command = mode.command(HOSTS, *words)
    if engine is SLURM:  # an allocation that outlives the loss of a node
        nodes = ["--no-kill", "-N", str(len(HOSTS)), "--ntasks-per-node", "1", "--nodelist", ",".join(HOSTS)]
        command = ["salloc", "--quiet", *nodes, PYTHON, "-m", "jaxrun", "--backend", "slurm", *words]
    env = {**write_fake_runtime(directory), **ssh_env(engine)}
    with bed.typed(mode.host, *command, directory=directory, env=env) as job:
        yield job


def hosts_of_second_attempt(run_dir: Path) -> list[str]:
    return hosts_of_attempt(run_dir / "attempt-2")


def hosts_of_attempt(folder: Path) -> list[str]:
    """The host of each rank, as its worker shows it."""
    logs = sorted(folder.glob("rank-*.out"))
    return [log.read_text().splitlines()[0].rpartition(" ")[2] for log in logs]


def agents(result: Result) -> Sequence[tuple[object, object, object]]:
    """(rank, host, process id) of each report of an agent."""
    return [(event["agent"], event["host"], event["pid"]) for event in result.events("AgentReport")]


@pytest.mark.extended
@pytest.mark.parametrize(
    ("engine", "victim"),
    [
        pytest.param(SLURM, "self", id="rank-Slurm"),
        pytest.param(SLURM, "agent", id="agent-Slurm"),
        extended(OPEN_MPI_5, "agent", id="agent-Open MPI 5"),
        extended(OPENSSH, "agent", id="agent-OpenSSH"),
        extended(MPICH, "agent", id="agent-MPICH"),
    ],
)
def test_a_job_is_started_again(bed: Bed, tmp_path: Path, engine: Engine, victim: str) -> None:
    pid = "os.getpid()" if victim == "self" else "os.getppid()"
    with started(bed, engine, tmp_path, rank_1=f"os.kill({pid}, 9); {WAITS}") as job:
        result = job.result()
        job.gone()
    assert result.code == 0, result
    assert "attempt 1 of 3 failed" in result.err and "1 restart)" in result.err
    assert hosts_of_second_attempt(job.run_dir) == list(HOSTS)
    reports = agents(result)
    assert sorted(host for _, host, _ in reports[:3]) == list(HOSTS)
    # The same agents report twice, unless what has started them had to be started anew.
    assert (len(reports), len(set(reports))) == (6, 3 if victim == "self" else 6)
    assert bool(re.search("starting .* again", result.err)) == (victim == "agent")


@pytest.mark.extended
@pytest.mark.parametrize("engine", [OPEN_MPI_5, *map(extended, (MPICH, SLURM))], ids=lambda engine: engine.label)
def test_a_job_whose_launch_command_is_killed_is_started_again(bed: Bed, tmp_path: Path, engine: Engine) -> None:
    with started(bed, engine, tmp_path) as job:
        job.wait_for_output("ready", count=3)
        kill(one.pid for one in bed.job_processes() if one.command in (*MPIRUN, "srun"))
        result = job.result()
        job.gone()
    assert result.code == 0 and "was killed by SIGKILL (9) before the job was over" in result.err, result
    assert hosts_of_second_attempt(job.run_dir) == list(HOSTS)


@pytest.mark.parametrize(
    "engine",
    [SLURM, OPEN_MPI_5, *map(extended, (OPEN_MPI_4, MPICH, INTEL, OPENSSH))],
    ids=lambda engine: engine.label,
)
@pytest.mark.usefixtures("mended")
def test_an_agent_that_waits_takes_the_rank_of_a_host_that_loses_its_power(
    bed: Bed, tmp_path: Path, engine: Engine
) -> None:
    with started(bed, engine, tmp_path, "--spares", "1", "--quarantine", "bad") as job:
        job.wait_for_output("ready", count=2)
        job.wait_for_event("SpareReported")
        bed.run("off", "h2")
        result = job.result()
        job.gone()
    assert (
        result.code == 0 and "h3 takes the place of h2" in result.err and not re.search("starting .* again", result.err)
    ), result
    assert hosts_of_second_attempt(job.run_dir) == ["h1", "h3"]
    verdict = result.verdict()
    assert (verdict["outcome"], verdict["left_out"]) == ("ok", ["h2"])
    assert "rank 1 of 2 on h2 was lost" in str(verdict["earlier"][0]["headline"])  # type: ignore[index]
    (line,) = (tmp_path / "bad").read_text().splitlines()
    assert line.startswith("h2 ") and " lost: " in line
    (spare,) = result.events("SpareReported")
    reports = agents(result)
    (of_rank_0,) = (report for report in reports[:2] if report[0] == 0)
    assert sorted(reports[2:]) == [of_rank_0, (2, "h3", spare["pid"])], reports


@pytest.mark.parametrize(
    "engine", [OPEN_MPI_5, *map(extended, (MPICH, SLURM, OPENSSH))], ids=lambda engine: engine.label
)
@pytest.mark.usefixtures("mended")
def test_a_host_that_is_there_again_is_waited_for_and_all_others_keep_their_agents(
    bed: Bed, tmp_path: Path, engine: Engine
) -> None:
    with started(bed, engine, tmp_path, "--wait-hosts", "2m") as job:
        job.wait_for_output("ready", count=3)
        bed.run("off", "h2")
        wait_until(lambda: "waiting for h2 (rank 1)" in (tmp_path / "err").read_text())
        bed.run("up")
        result = job.result()
        job.gone()
    assert result.code == 0 and "h2 (rank 1) is back after" in result.err, result
    last = max(job.run_dir.glob("attempt-*"))
    assert hosts_of_attempt(last) == list(HOSTS) and not re.search("starting .* again", result.err)
    reports = agents(result)
    # Slurm ends the step as the daemon of a lost host begins anew. Each host is awaited then; if all were there again,
    # and the second attempt has begun, a third one follows.
    if engine is not SLURM:
        assert last.name == "attempt-2"
        assert len(set(reports)) == 4 and {host for _, host, _ in reports[3:]} == set(HOSTS), reports


@pytest.mark.extended
@pytest.mark.parametrize("engine", [OPEN_MPI_5, MPICH, extended(OPENSSH)], ids=lambda engine: engine.label)
@pytest.mark.usefixtures("mended")
def test_a_spare_host_that_is_off_keeps_nobody_waiting(bed: Bed, tmp_path: Path, engine: Engine) -> None:
    bed.run("off", "h3")
    with started(bed, engine, tmp_path, "--spares", "1", rank_1="os.kill(os.getpid(), 9)") as job:
        result = job.result()
        job.gone()
    assert result.code == 0 and "1 restart" in result.err, result
    assert hosts_of_second_attempt(job.run_dir) == ["h1", "h2"]


@pytest.mark.extended
@pytest.mark.parametrize("engine", [OPEN_MPI_5, extended(MPICH)], ids=lambda engine: engine.label)
def test_a_job_that_could_lose_a_host_outlives_its_mpirun(
    make_runner: Callable[[LaunchMode], JobRunner], tmp_path: Path, engine: Engine
) -> None:
    go = tmp_path / "go"
    runner = make_runner(LaunchMode(engine, LAUNCHED))
    with runner.by_hand("--min-hosts", "2", "--max-restarts", "1", code=UNTIL_GO.format(str(go))) as job:
        job.wait_for_output("ready")
        (mpirun,) = (one.pid for one in runner.bed.job_processes() if one.command in MPIRUN)
        os.kill(mpirun, signal.SIGKILL)
        job.wait_for_event("LaunchCommandEnded")
        time.sleep(1.5)  # in which hosts that are there answer
        go.touch()
        result = job.result()
        job.gone()
    assert result.code == 0 and not result.events("AgentLost"), result


@pytest.mark.extended
@pytest.mark.usefixtures("mended")
def test_a_host_that_is_cut_off_as_mpirun_ends_is_lost_after_the_host_timeout_and_no_earlier(
    make_runner: Callable[[LaunchMode], JobRunner], tmp_path: Path
) -> None:
    go = tmp_path / "go"
    runner = make_runner(LaunchMode(OPEN_MPI_5, LAUNCHED))
    options = ("--min-hosts", "2", "--max-restarts", "1", "--host-timeout", "60")
    with runner.by_hand(*options, code=UNTIL_GO.format(str(go))) as job:
        job.wait_for_output("ready")
        (mpirun,) = (one.pid for one in runner.bed.job_processes() if one.command in MPIRUN)
        runner.bed.run("cut", "h2")
        os.kill(mpirun, signal.SIGKILL)
        job.wait_for_event("LaunchCommandEnded")
        time.sleep(3.0)  # the head asks whether all hosts are alive, and h2 cannot answer yet
        runner.bed.run("mend", "h2")
        go.touch()
        result = job.result()
        job.gone()
    assert result.code == 0 and not result.events("AgentLost"), result


MPI_PROGRAM = """
import time
from mpi4py import MPI
import jaxrun_runtime
print("ready", MPI.COMM_WORLD.Get_size(), "processes", flush=True)
if jaxrun_runtime.attempt().number == 1:
    time.sleep(1000)
"""


@pytest.mark.extended
@pytest.mark.parametrize("engine", [OPEN_MPI_5, MPICH], ids=lambda engine: engine.label)
@pytest.mark.usefixtures("mended")
def test_a_program_that_uses_mpi_gets_another_mpirun_on_the_spare_host(
    make_runner: Callable[[LaunchMode], JobRunner], tmp_path: Path, engine: Engine
) -> None:
    program = tmp_path / "uses_mpi.py"
    program.write_text(MPI_PROGRAM)
    with make_runner(LaunchMode(engine, LAUNCHED)).started("--spares", "1", "--max-restarts", "1", str(program)) as job:
        job.wait_for_output("ready 2 processes", count=2)
        job.wait_for_event("SpareReported")
        job.bed.run("off", "h2")
        result = job.result()
        job.gone()
    assert result.code == 0 and re.search("starting .* again", result.err), result
    assert result.out.count("ready 2 processes") == 4 and "h3 takes the place of h2" in result.err
