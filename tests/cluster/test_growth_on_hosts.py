"""Trainings that lose a host at a random moment: a spare one takes its place, or they go on smaller until it is back.

They end with the parameters of a training that nothing has disturbed: bit for bit where the number of devices stayed,
else up to rounding. JAXRUN_SOAK_RUNS is how many runs there are with each engine, as in test_soak.py; what befalls a
run follows from its number. Without it there is one with each.
"""

from __future__ import annotations

import os
import random
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from cluster_fixture import HOSTS, Bed, Job, brought_up
from harness import Result, wait_until
from launch_modes import LAUNCHED, OPEN_MPI_5, PYTHON, SLURM, Engine, LaunchMode

pytestmark = pytest.mark.extended
SOAK_RUNS = int(os.environ.get("JAXRUN_SOAK_RUNS", "0"))
LOSSES = [(engine, number) for engine in (OPEN_MPI_5, SLURM) for number in range(SOAK_RUNS)]
LOSSES = LOSSES or [(OPEN_MPI_5, 0), (SLURM, 1)]  # with a spare host, and smaller
SPARE = "h4"
RANKS_PER_HOST = 2
STEPS = 150
LAST_LOSS_S = 3.0  # after the first step; the training takes longer
GROWS = ("--min-hosts", "2", "--grow", "1s")
# The training, slow while hosts are missing, however long it takes to find them again. It leaves its parameters.
SLOW_IF_SMALLER = """import sys
import jax, numpy
import jaxrun_runtime as jr
from jaxrun_runtime.programs import train

def keep_and_hash(state, fingerprint=train.fingerprint):
    if jr.rank == 0:
        numpy.savez(sys.argv[2], *map(numpy.asarray, jax.tree.leaves(state["params"])))
    return fingerprint(state)

train.fingerprint = keep_and_hash
train.main([*sys.argv[2:], "--step-time", "0.03" if jr.attempt().size == int(sys.argv[1]) else "0.4"])
"""


@dataclass(frozen=True)
class Loss:
    """Which host loses its power, so many seconds `after` the first step, and whether there is a spare one."""

    host: str
    after: float
    has_spare: bool


def draw_loss(number: int, engine: Engine) -> Loss:
    draw = random.Random(f"{number} {engine.label}")
    hosts = HOSTS if engine is SLURM else HOSTS[1:]  # on the first one mpirun is typed
    return Loss(draw.choice(hosts), draw.uniform(0, LAST_LOSS_S), number % 2 == 0)


@pytest.fixture(scope="module")
def bed(machine: None) -> Iterator[Bed]:
    with brought_up((*HOSTS, SPARE)) as bed:
        yield bed


def training(directory: Path, ranks: int) -> list[str]:
    (directory / "slow_if_smaller.py").write_text(SLOW_IF_SMALLER)
    words = ["--steps", str(STEPS), "--save-every", "50", "--snapshot-every", "5"]
    return [str(directory / "slow_if_smaller.py"), str(ranks), str(directory / "checkpoints"), *words]


@pytest.fixture(scope="module")
def undisturbed(bed: Bed, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """The hash of the parameters after an undisturbed training, and where they are."""
    directory, ranks = tmp_path_factory.mktemp("undisturbed"), RANKS_PER_HOST * len(HOSTS)
    words = [PYTHON, "-m", "jaxrun", "-n", str(ranks), "--platform", "cpu", *training(directory, ranks)]
    with bed.typed("h1", *words, directory=directory) as job:
        return parameters(job.result()), directory / "checkpoints"


def parameters(result: Result) -> str:
    found = re.search(rf"parameters (\w+) after {STEPS} steps", result.out)
    assert result.code == 0 and found, result
    return found[1]


def check_rounding(*directories: Path) -> None:
    one, other = (np.load(directory.with_suffix(".npz")) for directory in directories)
    for name in one:
        np.testing.assert_allclose(one[name], other[name], rtol=1e-3, atol=1e-4)


def command(engine: Engine, hosts: tuple[str, ...], *words: str) -> list[str]:
    if engine is SLURM:  # an allocation that outlives the loss of a node
        each = ["--ntasks-per-node", str(RANKS_PER_HOST), "--nodelist", ",".join(hosts)]
        words = ("-m", "jaxrun", "--backend", "slurm", *words)
        return ["salloc", "--quiet", "--no-kill", "-N", str(len(hosts)), *each, PYTHON, *words]
    return LaunchMode(engine, LAUNCHED).command(tuple(host for host in hosts for _ in range(RANKS_PER_HOST)), *words)


def bring_back(bed: Bed, job: Job) -> None:
    """Once the job goes on without the host, that has its power again."""
    wait_until(lambda: list(job.run_dir.glob("attempt-*/rank-0001.out")), "the next attempt")
    bed.run("up")


@pytest.mark.usefixtures("mended")
@pytest.mark.parametrize(("engine", "number"), LOSSES, ids=[f"{engine.label} {number}" for engine, number in LOSSES])
def test_a_training_that_loses_a_host_has_the_same_parameters(
    bed: Bed, tmp_path: Path, undisturbed: tuple[str, Path], engine: Engine, number: int
) -> None:
    if reason := engine.missing():
        pytest.skip(reason)
    loss = draw_loss(number, engine)
    hosts = (*HOSTS, SPARE) if loss.has_spare else HOSTS
    words = ("--run-dir", str(tmp_path / "run"), "--max-restarts", "3", "--platform", "cpu")
    words += ("--spares", "1") if loss.has_spare else GROWS
    typed = command(engine, hosts, *words, *training(tmp_path, RANKS_PER_HOST * len(HOSTS)))
    with bed.typed(LaunchMode(engine, LAUNCHED).host, *typed, directory=tmp_path, env=engine.env()) as job:
        job.wait_for_event("CheckpointSaved")  # that a snapshot is whole
        time.sleep(loss.after)
        bed.run("off", loss.host)
        bring_back(bed, job)
        result = job.result()
        job.gone()
    assert "from memory" in result.out, (loss, result)
    assert result.verdict()["outcome"] == "ok"
    if loss.has_spare:
        assert parameters(result) == undisturbed[0] and f"{SPARE} takes the place of {loss.host}" in result.err, loss
    else:
        check_grown(result, loss.host)
        check_rounding(tmp_path / "checkpoints", undisturbed[1])


def check_grown(result: Result, host: str) -> None:
    assert result.code == 0, result
    verdict = result.verdict()
    outcomes = [earlier["outcome"] for earlier in verdict["earlier"]]  # type: ignore[attr-defined]
    # Where Slurm ends the step as the daemon of a lost host begins anew, a further attempt is lost meanwhile.
    assert outcomes[0] == "lost" and outcomes[-1] == "grown" and set(outcomes) == {"lost", "grown"}, outcomes
    assert set(verdict["hosts"].values()) == set(HOSTS) and verdict["left_out"] == []  # type: ignore[attr-defined]
    assert f"{host} is back: asked ranks" in result.err and "size: 3 hosts" in result.err


@pytest.mark.usefixtures("mended")
def test_a_host_whose_command_is_typed_again_is_taken_back(
    bed: Bed, tmp_path: Path, undisturbed: tuple[str, Path]
) -> None:
    def command(number: int) -> list[str]:
        place = ["--hosts", "3", "--host-rank", str(number), "-n", "3", "--head", "h1:7788"]
        words = [*place, "--rendezvous", str(tmp_path), "--run-dir", str(tmp_path / "run"), *GROWS]
        return [PYTHON, "-m", "jaxrun", *words, "--max-restarts", "3", "--platform", "cpu", *training(tmp_path, 3)]

    quiet = {"cwd": tmp_path, "stdout": -3, "stderr": -3}
    with bed.typed("h1", *command(0), directory=tmp_path) as job:
        others = [bed.start("exec", f"h{number + 1}", "--", *command(number), **quiet) for number in (1, 2)]
        job.wait_for_event("CheckpointSaved")
        bed.run("off", "h2")
        bring_back(bed, job)
        others.append(bed.start("exec", "h2", "--", *command(1), **quiet))
        result = job.result()
        assert [other.wait() for other in others[1:]] == [0, 0]
        others[0].wait()
        job.gone()
    check_grown(result, "h2")
    check_rounding(tmp_path / "checkpoints", undisturbed[1])
