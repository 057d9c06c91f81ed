"""A training that is interrupted at random moments ends with the bits of one that nothing has disturbed.

Faults interrupt it, and Slurm, which preempts it or ends its time. JAXRUN_SOAK_RUNS is how many runs there are with
each engine, and for each of Slurm's reasons; what befalls a run follows from its number.
"""

from __future__ import annotations

import os
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from cluster_fixture import HOSTS, Bed, Job
from harness import Result
from launch_modes import LAUNCHED, MPICH, OPEN_MPI_5, PYTHON, SLURM, Engine, LaunchMode

RUNS = int(os.environ.get("JAXRUN_SOAK_RUNS", "1"))
ENGINES = (None, OPEN_MPI_5, MPICH, SLURM)  # None: local processes
TRAINING = ("--steps", "60", "--save-every", "10", "--step-time", "0.02")
LAST_FAULT_S = 2.5  # after the program's start; the training takes longer

pytestmark = pytest.mark.extended


@dataclass(frozen=True)
class Faults:
    """What befalls one run.

    chaos:      for --chaos; ranks: those that it is done to
    host:       what the testbed does to h2, "off" or "cut", so many seconds `after` the program began; or empty
    """

    chaos: str = ""
    ranks: frozenset[int] = frozenset()
    host: str = ""
    after: float = 0.0


def draw_faults(number: int, engine: Engine | None) -> Faults:
    """Of every five runs over hosts one loses a host; the others lose ranks, or their connections, once or twice."""
    draw = random.Random(f"{number} {engine}")
    if engine is not None and number % 5 == (engine is not SLURM):
        return Faults(host=draw.choice(["off", "cut"]), after=draw.uniform(0, LAST_FAULT_S))
    kinds = draw.sample(["kill", "cut"], draw.choice([1, 2]))  # two that are alike could be a bug of the program's
    ranks = [draw.randrange(3) for _ in kinds]
    at = [draw.uniform(0, LAST_FAULT_S) for _ in kinds]
    chaos = ",".join(f"{kind}:{rank}@{after * 1000:.0f}ms" for kind, rank, after in zip(kinds, ranks, at, strict=True))
    return Faults(chaos, frozenset(ranks))


def train(directory: Path, *options: str) -> list[str]:
    return ["-m", "jaxrun_runtime.programs.train", str(directory / "checkpoints"), *TRAINING, *options]


def parameters(result: Result) -> str:
    """The hash of the trained parameters."""
    found = re.search(r"parameters (\w+) after 60 steps", result.out)
    assert result.code == 0 and found, result
    return found[1]


@pytest.fixture(scope="session")
def undisturbed(bed: Bed, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], str]:
    """The hash of the parameters that so many ranks train undisturbed."""
    known: dict[int, str] = {}

    def run(ranks: int) -> str:
        if ranks not in known:
            directory = tmp_path_factory.mktemp(f"undisturbed{ranks}")
            words = [PYTHON, "-m", "jaxrun", "-n", str(ranks), "--platform", "cpu", *train(directory)]
            with bed.typed("h1", *words, directory=directory) as job:
                known[ranks] = parameters(job.result())
        return known[ranks]

    return run


def command(engine: Engine | None, *words: str) -> tuple[str, list[str]]:
    """The host, and the command typed there."""
    if engine is None:
        return "h1", [PYTHON, "-m", "jaxrun", "-n", "3", *words]
    if engine is SLURM:  # an allocation that outlives the loss of a node
        nodes = ["--no-kill", "-N", str(len(HOSTS)), "--ntasks-per-node", "1", "--nodelist", ",".join(HOSTS)]
        return "ctl", ["salloc", "--quiet", *nodes, PYTHON, "-m", "jaxrun", "--backend", "slurm", *words]
    mode = LaunchMode(engine, LAUNCHED)
    return mode.host, mode.command(HOSTS, *words)


def strike(bed: Bed, job: Job, faults: Faults) -> None:
    """Do to h2 what it is to suffer, once its program runs."""
    job.wait_until(lambda: events(job).count('"event": "proof"') == 2, "program")
    time.sleep(faults.after)
    bed.run(faults.host, "h2")


def events(job: Job) -> str:
    path = job.run_dir / "events.jsonl"
    return path.read_text() if path.exists() else ""


@pytest.mark.usefixtures("mended")
@pytest.mark.parametrize("number", range(RUNS))
@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.label if engine else "local")
def test_the_parameters_are_those_of_an_undisturbed_training(
    bed: Bed, tmp_path: Path, undisturbed: Callable[[int], str], engine: Engine | None, number: int
) -> None:
    if engine is not None and (reason := engine.missing()):
        pytest.skip(reason)
    faults = draw_faults(number, engine)
    words = ["--run-dir", str(tmp_path / "run"), "--max-restarts", "3", "--platform", "cpu"]
    words += ["--spares", "1"] if faults.host else ["--chaos", faults.chaos]
    host, typed = command(engine, *words, *train(tmp_path))
    with bed.typed(host, *typed, directory=tmp_path, env=engine.env() if engine else {}) as job:
        if faults.host:
            strike(bed, job, faults)
        result = job.result(timeout=90)
        job.gone()
    assert parameters(result) == undisturbed(2 if faults.host else 3), (faults, result)
    verdict = result.verdict()
    assert verdict["outcome"] == "ok"
    for earlier in verdict["earlier"]:
        assert set(earlier["culprits"]) <= (faults.ranks or {1}), (faults, earlier)
        assert earlier["outcome"] in ("killed", "failed", "lost", "diverged", "exited"), (faults, earlier)


STOPS = [("preemption", number) for number in range(RUNS)] + [
    ("time limit", number) for number in range((RUNS + 1) // 2)
]


@pytest.mark.parametrize(("reason", "number"), STOPS)
def test_a_training_resumes_from_the_save_that_it_made_when_slurm_warned(
    bed: Bed, tmp_path: Path, undisturbed: Callable[[int], str], reason: str, number: int
) -> None:
    if missing := SLURM.missing():
        pytest.skip(missing)
    draw = random.Random(f"{number} {reason}")
    words = ["--backend", "slurm", "-N", "2", "--platform", "cpu", "--time", "1:00:00", "--requeue"]
    words += ["--max-restarts", "3", "--run-dir", str(tmp_path / "run")]  # a warning does not count for one
    # Slurm looks at the time only every 30 s.
    training = train(tmp_path, "--step-time", "0.15" if reason == "preemption" else "0.8")
    with bed.typed("ctl", *(PYTHON, "-m", "jaxrun", *words, "--submit", *training), directory=tmp_path) as job:
        job.wait_until((tmp_path / "checkpoints" / "10").exists, "checkpoint")
        time.sleep(draw.uniform(0, LAST_FAULT_S))
        (slurm_job,) = bed.inside("ctl", "squeue", "--noheader", "--states=R", "--format=%i").split()
        if reason == "preemption":
            bed.inside(
                "ctl", "sbatch", "--partition=urgent", "-N3", "--exclusive", "--output=/dev/null", "--wrap", "sleep 1"
            )
        else:  # of which Slurm warns 45 s before
            bed.inside("ctl", "scontrol", "update", f"JobId={slurm_job}", "EndTime=now+50")
            job.wait_until(lambda: "starts job" in job.result(timeout=0).out, "restart by Slurm")
            bed.inside("ctl", "scontrol", "update", f"JobId={slurm_job}", "TimeLimit=60")
        result = job.result(timeout=120)
        job.gone()
    (saved,) = re.findall(r"stopped after step (\d+), and saved it", result.out)
    (resumed,) = re.findall(r"goes on after step (\d+), bit for bit", result.out)
    assert saved == resumed and parameters(result) == undisturbed(2), result
    assert (result.verdict()["outcome"], result.verdict()["attempt"]) == ("ok", 2), result
