"""Jobs over hosts that are started again: by the same agents, by an engine started anew, and on a spare host."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from cluster_fixture import HOSTS, Bed, Job
from harness import Result, extended, write_fake_runtime
from launch_modes import LAUNCHED, MPICH, OPEN_MPI_5, PYTHON, SLURM, Engine, LaunchMode

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
    with bed.typed(mode.host, *command, directory=directory, env=write_fake_runtime(directory)) as job:
        yield job


def hosts_of_second_attempt(run_dir: Path) -> list[str]:
    """The host of each rank, as its worker shows it."""
    logs = sorted((run_dir / "attempt-2").glob("rank-*.out"))
    return [log.read_text().splitlines()[0].rpartition(" ")[2] for log in logs]


def agents(result: Result) -> Sequence[tuple[object, object, object]]:
    """(rank, host, process id) of each report of an agent."""
    return [(event["rank"], event["host"], event["pid"]) for event in result.events("AgentReport")]


@pytest.mark.parametrize(
    ("engine", "victim"),
    [
        pytest.param(SLURM, "self", id="rank-Slurm"),
        pytest.param(SLURM, "agent", id="agent-Slurm"),
        extended(OPEN_MPI_5, "agent", id="agent-Open MPI 5"),
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


@pytest.mark.parametrize("engine", [OPEN_MPI_5, extended(MPICH)], ids=["Open MPI 5", "MPICH"])  # which notices late
@pytest.mark.usefixtures("mended")
def test_a_spare_host_takes_the_place_of_one_that_loses_its_power(bed: Bed, tmp_path: Path, engine: Engine) -> None:
    with started(bed, engine, tmp_path, "--spares", "1", "--quarantine", "bad") as job:
        job.wait_for_output("ready", count=2)
        bed.run("off", "h2")
        result = job.result()
    assert result.code == 0, result
    assert hosts_of_second_attempt(job.run_dir) == ["h1", "h3"]
    assert "h3 takes the place of h2" in result.err
    verdict = result.verdict()
    assert (verdict["outcome"], verdict["left_out"]) == ("ok", ["h2"])
    assert "rank 1 of 2 on h2 was lost" in str(verdict["earlier"][0]["headline"])  # type: ignore[index]
    (line,) = (tmp_path / "bad").read_text().splitlines()
    assert line.startswith("h2 ") and " lost: " in line


@pytest.mark.usefixtures("mended")
def test_an_agent_that_waits_takes_the_rank_of_a_host_that_loses_its_power(bed: Bed, tmp_path: Path) -> None:
    with started(bed, SLURM, tmp_path, "--spares", "1", "--quarantine", "bad") as job:
        job.wait_for_output("ready", count=2)
        job.wait_for_event("SpareReported")
        bed.run("off", "h2")
        result = job.result()
        job.gone()
    assert (
        result.code == 0 and "h3 takes the place of h2" in result.err and not re.search("starting .* again", result.err)
    ), result
    assert hosts_of_second_attempt(job.run_dir) == ["h1", "h3"]
    (line,) = (tmp_path / "bad").read_text().splitlines()
    assert line.startswith("h2 ") and " lost: " in line
    (spare,) = result.events("SpareReported")
    reports = agents(result)
    (of_rank_0,) = (report for report in reports[:2] if report[0] == 0)
    assert sorted(reports[2:]) == [of_rank_0, (1, "h3", spare["pid"])], reports
