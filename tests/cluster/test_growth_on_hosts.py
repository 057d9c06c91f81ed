"""A training that loses a host goes on with two, and has three again once the host is there: its steps and losses."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from cluster_fixture import HOSTS, Bed, Job
from harness import Result, wait_until
from launch_modes import LAUNCHED, OPEN_MPI_5, PYTHON, SLURM, Engine, LaunchMode

pytestmark = pytest.mark.extended
GROWS = ("--min-hosts", "2", "--max-restarts", "3", "--grow", "1s", "--platform", "cpu")
STEPS = 200


def training(directory: Path, *options: str) -> list[str]:
    words = ["--steps", str(STEPS), "--save-every", "10", "--step-time", "0.05", *options]
    return ["-m", "jaxrun_runtime.programs.train", str(directory / "checkpoints"), *words]


def losses(result: Result) -> list[str]:
    """What the training says of its steps, with so many digits that rounding does not show."""
    return sorted(set(re.findall(r"step +\d+  loss [0-9.]+  [0-9.]+% right", result.out)))


@pytest.fixture(scope="session")
def undisturbed(bed: Bed, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    directory = tmp_path_factory.mktemp("undisturbed")
    words = [PYTHON, "-m", "jaxrun", "-n", "3", "--platform", "cpu", *training(directory, "--step-time", "0")]
    with bed.typed("h1", *words, directory=directory) as job:
        return losses(job.result())


def lose_and_bring_back(bed: Bed, job: Job, directory: Path) -> None:
    """Once the job has saved a step h2 loses its power, and has it again once the job goes on with two hosts."""
    job.wait_for_event("CheckpointSaved")
    bed.run("off", "h2")
    wait_until(lambda: list((directory / "run").glob("attempt-*/rank-0001.out")), "a smaller attempt")
    bed.run("up")


def check_grown(result: Result, undisturbed: list[str]) -> None:
    assert result.code == 0, result
    assert losses(result) == undisturbed and len(undisturbed) == STEPS // 100
    verdict = result.verdict()
    outcomes = [earlier["outcome"] for earlier in verdict["earlier"]]  # type: ignore[attr-defined]
    # Where Slurm ends the step as the daemon of a lost host begins anew, a further attempt is lost meanwhile.
    assert outcomes[0] == "lost" and outcomes[-1] == "grown" and set(outcomes) == {"lost", "grown"}, outcomes
    assert sorted(verdict["hosts"].values()) == list(HOSTS) and verdict["left_out"] == []  # type: ignore[attr-defined]
    goes_on = [int(step) for step in re.findall(r"goes on after step (\d+)", result.out)]
    assert len(goes_on) >= 2 and goes_on == sorted(goes_on), goes_on
    assert "h2 is there again: asked ranks 0-1 to stop" in result.err and "size: 3 hosts" in result.err


@pytest.mark.parametrize("engine", [OPEN_MPI_5, SLURM], ids=["Open MPI 5", "Slurm"])
@pytest.mark.usefixtures("mended")
def test_a_training_has_all_hosts_again(bed: Bed, tmp_path: Path, undisturbed: list[str], engine: Engine) -> None:
    if reason := engine.missing():
        pytest.skip(reason)
    words = ("--run-dir", str(tmp_path / "run"), *GROWS, *training(tmp_path))
    mode = LaunchMode(engine, LAUNCHED)
    command = mode.command(HOSTS, *words)
    if engine is SLURM:  # an allocation that outlives the loss of a node
        nodes = ["--no-kill", "-N", str(len(HOSTS)), "--ntasks-per-node", "1", "--nodelist", ",".join(HOSTS)]
        command = ["salloc", "--quiet", *nodes, PYTHON, "-m", "jaxrun", "--backend", "slurm", *words]
    with bed.typed(mode.host, *command, directory=tmp_path, env=engine.env()) as job:
        lose_and_bring_back(bed, job, tmp_path)
        result = job.result()
        job.gone()
    check_grown(result, undisturbed)


@pytest.mark.usefixtures("mended")
def test_a_host_whose_command_is_typed_again_is_taken_back(bed: Bed, tmp_path: Path, undisturbed: list[str]) -> None:
    def command(number: int) -> list[str]:
        place = ["--hosts", "3", "--host-rank", str(number), "-n", "3", "--head", "h1:7788"]
        words = [*place, "--rendezvous", str(tmp_path), "--run-dir", str(tmp_path / "run"), *GROWS]
        return [PYTHON, "-m", "jaxrun", *words, *training(tmp_path)]

    quiet = {"cwd": tmp_path, "stdout": -3, "stderr": -3}
    with bed.typed("h1", *command(0), directory=tmp_path) as job:
        others = [bed.start("exec", f"h{number + 1}", "--", *command(number), **quiet) for number in (1, 2)]
        lose_and_bring_back(bed, job, tmp_path)
        others.append(bed.start("exec", "h2", "--", *command(1), **quiet))
        result = job.result()
        assert [other.wait() for other in others[1:]] == [0, 0]
        others[0].wait()
        job.gone()
    check_grown(result, undisturbed)
