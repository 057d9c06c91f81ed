"""Jobs over hosts that are started again: by the same agents, by an engine started anew, and on a spare host."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from cluster_fixture import HOSTS, Bed, Job
from harness import Result
from launch_modes import LAUNCHED, MPICH, OPEN_MPI_5, PYTHON, SLURM, Engine, LaunchMode

PROGRAM = str(Path(__file__).parent / "restarted.py")


def engines(always: Engine, among: Sequence[Engine] = (SLURM, OPEN_MPI_5, MPICH)) -> list[object]:
    """All that are tried, of which only one is not for scripts/test --all."""
    return [
        pytest.param(engine, id=engine.label, marks=() if engine is always else pytest.mark.extended)
        for engine in among
    ]


@contextmanager
def started(bed: Bed, engine: Engine, directory: Path, *words: str) -> Iterator[Job]:
    """A job with restarts on all hosts of the testbed."""
    if reason := engine.missing():
        pytest.skip(reason)
    mode, words = LaunchMode(engine, LAUNCHED), ("--run-dir", str(directory / "run"), "--max-restarts", "2", *words)
    command = mode.command(HOSTS, *words)
    if engine is SLURM:  # an allocation that outlives the loss of a node
        nodes = ["--no-kill", "-N", str(len(HOSTS)), "--ntasks-per-node", "1", "--nodelist", ",".join(HOSTS)]
        command = ["salloc", "--quiet", *nodes, PYTHON, "-m", "jaxrun", "--backend", "slurm", *words]
    with bed.typed(mode.host, *command, directory=directory, env=engine.env()) as job:
        yield job


def hosts_of_attempt(run_dir: Path, attempt: int) -> list[str]:
    """The host of each rank, as its program shows it."""
    logs = sorted((run_dir / f"attempt-{attempt}").glob("rank-*.out")) if attempt > 1 else sorted(run_dir.glob("*.out"))
    return [log.read_text().splitlines()[0].rpartition(" ")[2] for log in logs]


def agents(run_dir: Path) -> Sequence[tuple[int, int]]:
    """(rank, process id) of each report of an agent."""
    events = map(json.loads, (run_dir / "events.jsonl").read_text().splitlines())
    return [(event["rank"], event["pid"]) for event in events if event["event"] == "reported"]


@pytest.mark.parametrize("engine", engines(SLURM))
@pytest.mark.parametrize("fate", ["kill", "agent"])
def test_a_job_is_started_again(bed: Bed, tmp_path: Path, engine: Engine, fate: str) -> None:
    with started(bed, engine, tmp_path, PROGRAM, fate) as job:
        result: Result = job.result()
        job.gone()
    assert result.code == 0, result
    assert "attempt 1 of 3 failed" in result.err and "1 restart)" in result.err
    assert hosts_of_attempt(job.run_dir, 1) == hosts_of_attempt(job.run_dir, 2) == list(HOSTS)
    reports = agents(job.run_dir)
    # The same agents report twice, unless what has started them had to be started anew.
    assert (len(reports), len(set(reports))) == (6, 3 if fate == "kill" else 6)
    assert ("anew" in result.err) == (fate == "agent")


@pytest.mark.parametrize("engine", engines(OPEN_MPI_5, (OPEN_MPI_5, MPICH)))  # the first notices the loss at once
@pytest.mark.usefixtures("mended")
def test_a_spare_host_takes_the_place_of_one_that_loses_its_power(bed: Bed, tmp_path: Path, engine: Engine) -> None:
    with started(bed, engine, tmp_path, "--spares", "1", PROGRAM, "wait") as job:
        job.wait_for_output("step 3", count=2)
        bed.run("off", "h2")
        result = job.result(timeout=60)
    assert result.code == 0, result
    assert hosts_of_attempt(job.run_dir, 2) == ["h1", "h3"]
    assert "h3 takes the place of h2" in result.err
    verdict = result.verdict()
    assert (verdict["outcome"], verdict["left_out"]) == ("ok", ["h2"])
    assert "rank 1 of 2 on h2 was lost" in str(verdict["earlier"][0]["headline"])


@pytest.mark.usefixtures("mended")
def test_an_agent_that_waits_takes_the_rank_of_a_host_that_loses_its_power(bed: Bed, tmp_path: Path) -> None:
    with started(bed, SLURM, tmp_path, "--spares", "1", PROGRAM, "sum") as job:
        job.wait_for_output("step 3", count=2)
        job.wait_until(lambda: "spare_reported" in (job.run_dir / "events.jsonl").read_text(), "spare agent")
        bed.run("off", "h2")
        result = job.result(timeout=90)
        job.gone(within=5)
    assert result.code == 0 and "h3 takes the place of h2" in result.err and "anew" not in result.err, result
    assert hosts_of_attempt(job.run_dir, 2) == ["h1", "h3"]
    (spare,) = result.events("spare_reported")
    reports = agents(job.run_dir)
    assert dict(reports[2:]) == {0: dict(reports[:2])[0], 1: spare["pid"]}, reports
    total, steps = map(int, re.findall(r"sum (\d+) of (\d+) steps", result.out)[0])
    assert total == 3 * sum(range(steps))


@pytest.mark.extended
@pytest.mark.usefixtures("mended")
def test_without_a_spare_host_the_job_goes_on_smaller(bed: Bed, tmp_path: Path) -> None:
    with started(bed, MPICH, tmp_path, "--min-hosts", "2", PROGRAM, "wait") as job:
        job.wait_for_output("step 3")
        bed.run("off", "h2")
        result = job.result(timeout=60)
    assert result.code == 0, result
    assert hosts_of_attempt(job.run_dir, 2) == ["h1", "h3"] and "h2 is left out: 2 ranks on 2 hosts" in result.err


@pytest.mark.extended
def test_spares_that_are_not_there_are_refused(bed: Bed, tmp_path: Path) -> None:
    with started(bed, MPICH, tmp_path, "--spares", "3", PROGRAM, "kill") as job:
        result = job.result()
    assert result.code == 2 and "--spares 3 leave no host for the job, and there are 3 hosts" in result.err
