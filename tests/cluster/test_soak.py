"""Jobs that are interrupted at random moments: by faults, by Slurm, by `kill -9` of jaxrun.

A training ends with the bits of one that nothing has disturbed. JAXRUN_SOAK_RUNS is how many runs there are with each
engine, and for each of Slurm's reasons; what befalls a run follows from its number. Without it there are a few.
"""

from __future__ import annotations

import os
import random
import re
import signal
import sys
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import pytest
from cluster_fixture import HOSTS, READY, RUNS, Bed, Job
from harness import TIME_LIMIT, Result, write_fake_runtime
from launch_modes import LAUNCHED, MPI, MPICH, OPEN_MPI_5, PYTHON, SLURM, Engine, LaunchMode

BENCH = Path(__file__).parents[2] / "scripts/bench.d"
sys.path.insert(0, str(BENCH))  # its files import each other by name
kills = import_module("kills")
sys.path.remove(str(BENCH))

SOAK_RUNS = int(os.environ.get("JAXRUN_SOAK_RUNS", "0"))
ENGINES = (None, OPEN_MPI_5, MPICH, SLURM)  # None: local processes
DISTURBED = [(engine, number) for engine in ENGINES for number in range(SOAK_RUNS)] or [(SLURM, 0)]
STOPS = [("preemption", number) for number in range(max(1, SOAK_RUNS))] + [
    ("time limit", number) for number in range((SOAK_RUNS + 1) // 2)
]
KILLED = [kills.ONE_HOST, *MPI, SLURM] if SOAK_RUNS else [MPICH]
RANKS = 2
TRAINING = ("--steps", "60", "--save-every", "10", "--step-time", "0.02")
LAST_FAULT_S = 2.5  # after the program's start; the training takes longer
# The training, slow until it is told to stop, however long Slurm takes for that, and fast when it goes on.
SLOW_AT_FIRST = """import sys
import jaxrun_runtime as jr
from jaxrun_runtime.programs import train
train.main([*sys.argv[1:], "--step-time", "0.8" if jr.attempt().number == 1 else "0"])
"""
SUBMITTED = (PYTHON, "-m", "jaxrun", "--backend", "slurm", "-N", str(RANKS), "--submit")

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
    """Of every five runs over hosts one loses a host; the others lose a rank."""
    draw = random.Random(f"{number} {engine}")
    if engine is not None and number % 5 == (engine is not SLURM):
        return Faults(host=draw.choice(["off", "cut"]), after=draw.uniform(0, LAST_FAULT_S))
    rank = draw.randrange(RANKS)
    return Faults(f"kill:{rank}@{draw.uniform(0, LAST_FAULT_S) * 1000:.0f}ms", frozenset((rank,)))


def train(
    directory: Path, *options: str, program: tuple[str, ...] = ("-m", "jaxrun_runtime.programs.train")
) -> list[str]:
    return [*program, str(directory / "checkpoints"), *TRAINING, *options]


def parameters(result: Result) -> str:
    """The hash of the trained parameters."""
    found = re.search(r"parameters (\w+) after 60 steps", result.out)
    assert result.code == 0 and found, result
    return found[1]


@pytest.fixture(scope="session")
def undisturbed(bed: Bed, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The hash of the parameters that so many ranks train undisturbed."""
    directory = tmp_path_factory.mktemp("undisturbed")
    words = [PYTHON, "-m", "jaxrun", "-n", str(RANKS), "--platform", "cpu", *train(directory, "--step-time", "0")]
    with bed.typed("h1", *words, directory=directory) as job:
        return parameters(job.result())


def command(engine: Engine | None, hosts: tuple[str, ...], *words: str) -> tuple[str, list[str]]:
    """The host, and the command typed there."""
    if engine is None:
        return "h1", [PYTHON, "-m", "jaxrun", "-n", str(len(hosts)), *words]
    if engine is SLURM:  # an allocation that outlives the loss of a node
        nodes = ["--no-kill", "-N", str(len(hosts)), "--ntasks-per-node", "1", "--nodelist", ",".join(hosts)]
        return "ctl", ["salloc", "--quiet", *nodes, PYTHON, "-m", "jaxrun", "--backend", "slurm", *words]
    mode = LaunchMode(engine, LAUNCHED)
    return mode.host, mode.command(hosts, *words)


def strike(bed: Bed, job: Job, faults: Faults) -> None:
    """Do to h2 what it is to suffer, once its program runs."""
    job.wait_for_event("DeviceReport", RANKS)
    job.wait_for_event("SpareReported")
    time.sleep(faults.after)
    bed.run(faults.host, "h2")


@pytest.mark.usefixtures("mended")
@pytest.mark.parametrize(
    ("engine", "number"), DISTURBED, ids=[f"{engine.label if engine else 'local'} {n}" for engine, n in DISTURBED]
)
def test_the_parameters_are_those_of_an_undisturbed_training(
    bed: Bed, tmp_path: Path, undisturbed: str, engine: Engine | None, number: int
) -> None:
    if engine is not None and (reason := engine.missing()):
        pytest.skip(reason)
    faults = draw_faults(number, engine)
    words = ["--run-dir", str(tmp_path / "run"), "--max-restarts", "3", "--platform", "cpu"]
    words += ["--spares", "1"] if faults.host else ["--chaos", faults.chaos]
    host, typed = command(engine, HOSTS if faults.host else HOSTS[:RANKS], *words, *train(tmp_path))
    with bed.typed(host, *typed, directory=tmp_path, env=engine.env() if engine else {}) as job:
        if faults.host:
            strike(bed, job, faults)
        result = job.result()
        job.gone()
    assert parameters(result) == undisturbed, (faults, result)
    verdict = result.verdict()
    assert verdict["outcome"] == "ok"
    for earlier in verdict["earlier"]:  # type: ignore[attr-defined]
        assert set(earlier["culprits"]) <= (faults.ranks or {1}), (faults, earlier)
        assert earlier["outcome"] in ("killed", "failed", "lost", "diverged", "exited"), (faults, earlier)


@pytest.mark.parametrize(("reason", "number"), STOPS)
def test_a_training_resumes_from_the_save_that_it_made_when_slurm_warned(
    bed: Bed, tmp_path: Path, undisturbed: str, reason: str, number: int
) -> None:
    draw = random.Random(f"{number} {reason}")
    words = ["--platform", "cpu", "--time", "1:00:00", "--requeue"]
    words += ["--max-restarts", "3", "--run-dir", str(tmp_path / "run")]  # a warning does not count for one
    program = tmp_path / "slow_at_first.py"
    program.write_text(SLOW_AT_FIRST)
    training = train(tmp_path, program=(str(program),))
    with bed.typed("ctl", *SUBMITTED, *words, *training, directory=tmp_path) as job:
        job.wait_until((tmp_path / "checkpoints" / "10").exists, "checkpoint")
        time.sleep(draw.uniform(0, LAST_FAULT_S))
        (slurm_job,) = bed.inside("ctl", "squeue", "--noheader", "--states=R", "--format=%i").split()
        if reason == "preemption":
            urgent = ("--partition=urgent", "-N3", "--exclusive", "--output=/dev/null", "--wrap", "sleep 1")
            bed.inside("ctl", "sbatch", *urgent)
        else:  # of which Slurm, which looks at the time only every 30 s, warns 45 s before
            bed.inside("ctl", "scontrol", "update", f"JobId={slurm_job}", "EndTime=now+50")
            job.wait_until(lambda: "starts job" in job.result(timeout=0).out, "restart by Slurm")
            bed.inside("ctl", "scontrol", "update", f"JobId={slurm_job}", "TimeLimit=60")
        result = job.result(timeout=2 * TIME_LIMIT)
        job.gone()
    saved = re.findall(r"stopped after step (\d+), and saved it", result.out)
    resumed = re.findall(r"continues after step (\d+), bit for bit", result.out)
    assert saved == resumed and len(saved) == 1 and parameters(result) == undisturbed, result
    assert (result.verdict()["outcome"], result.verdict()["attempt"]) == ("ok", 2), result


# ---- a job of Slurm's that its user cancels


def submitted(bed: Bed, tmp_path: Path, option: str, code: str) -> AbstractContextManager[Job]:
    words = (*SUBMITTED, option, "by_hand.py", *[code] * RANKS)
    return bed.typed("ctl", *words, directory=tmp_path, env=write_fake_runtime(tmp_path))


def number_of_running(job: Job, text: str) -> str:
    """The number of the job of Slurm's, once rank 0 has written this text."""
    job.wait_until(lambda: f"[0] {text}" in job.result(timeout=0).out, text)
    return job.bed.inside("ctl", "squeue", "--noheader", "--states=R", "--format=%i").strip()


def test_a_job_that_its_user_cancels_is_not_started_again(bed: Bed, tmp_path: Path) -> None:
    with submitted(bed, tmp_path, "--requeue", RUNS + READY) as job:
        bed.inside("ctl", "scancel", number_of_running(job, "ready"))
        result = job.result()
    assert result.code == 128 + signal.SIGTERM and "ended as CANCELLED" in result.err, result
    assert "Slurm itself ends job" in result.out
    assert not bed.inside("ctl", "squeue", "--noheader")


# ---- kill -9 of jaxrun


@pytest.mark.parametrize("engine", KILLED, ids=lambda engine: engine.label)
def test_kill_9_at_a_random_moment_of_the_start_leaves_nothing_10_s_later(bed: Bed, engine: Engine) -> None:
    if engine is not kills.ONE_HOST and (reason := engine.missing()):
        pytest.skip(reason)
    sample = kills.measure(bed, engine, kills.seconds_to_start(bed, engine) * random.random())
    assert not sample.wrong and sample.gone is not None, sample
