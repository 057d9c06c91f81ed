"""The pytest plugin with ranks on several hosts: it starts them, or mpirun and srun have started all of pytest."""

from __future__ import annotations

import os
import re
import shutil
import signal
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from cluster_fixture import HOSTS, Bed, Job
from harness import Result
from launch_modes import MPICH, OPEN_MPI_5, PYTHON, SLURM, Engine

pytestmark = pytest.mark.extended

TESTS = Path(__file__).with_name("remote_tests.py")
PYTEST = (PYTHON, "-m", "pytest", "-p", "no:cacheprovider", "--color=no", "-rA", "--gang-grace=0.5", TESTS.name)
OF_TWO = {
    "test_hosts_differ": "PASSED",
    "test_fails": "FAILED",
    "test_dies": "FAILED",
    "test_has_no_mark": "PASSED",
    "test_shares_files": "PASSED",
}
MORE = {"test_hosts_are_counted": "PASSED", "test_gangs": "PASSED"}


def starting(engine: Engine, *words: str) -> list[str]:
    """A pytest that starts its ranks on all hosts."""
    if engine is SLURM:
        return ["salloc", "--quiet", "-N", "3", "-n", "3", *PYTEST, "--gang-backend=slurm", *words]
    slots = ",".join(f"{host}:1" for host in HOSTS)
    options = f"--gang-options=--mpirun {engine.mpirun}", f"--gang-options=-H {slots}"
    return [*PYTEST, "--gang-backend=mpirun", *options, *words]


def started(engine: Engine, *words: str) -> list[str]:
    """A pytest on each of two hosts."""
    if engine is SLURM:
        return ["salloc", "--quiet", "-N", "2", "-n", "2", "srun", *PYTEST, *words]
    hosts = ["--allow-run-as-root", "--host", "h1:1,h2:1"] if engine is OPEN_MPI_5 else ["-hosts", "h1,h2", "-ppn", "1"]
    return [engine.mpirun, *hosts, "-n", "2", *PYTEST, *words]


def typed(bed: Bed, engine: Engine, command: list[str], directory: Path) -> AbstractContextManager[Job]:
    if reason := engine.missing():
        pytest.skip(reason)
    shutil.copy(TESTS, directory)
    (directory / "pytest.ini").touch()
    return bed.typed("h1" if engine.name else "ctl", *command, directory=directory, env=engine.env())


def result(bed: Bed, engine: Engine, command: list[str], directory: Path) -> Result:
    """Of a pytest that has left nothing on any host."""
    with typed(bed, engine, command, directory) as job:
        result = job.result()
        job.gone()
    return result


def outcomes(done: Result) -> dict[str, str]:
    return {name: word for word, name in re.findall(r"^(PASSED|FAILED|ERROR|SKIPPED) \S+::(\w+)", done.out, re.M)}


@pytest.mark.parametrize("engine", [OPEN_MPI_5, SLURM], ids=lambda engine: engine.label)
def test_the_ranks_of_a_test_are_on_several_hosts(bed: Bed, tmp_path: Path, engine: Engine) -> None:
    done = result(bed, engine, starting(engine, "-k", "not lasts and not three"), tmp_path)
    assert (done.code, outcomes(done)) == (1, {**OF_TWO, **MORE}), done
    assert re.search(r"rank 1 \(h2\):  FAILED  assert 1 == 0 .*\nrank 0 \(h1\):  STUCK .*process_allgather", done.out)
    assert "rank 1 (h2):  DIED     with exit status 3" in done.out and "printed before the exit" in done.out
    backend = "slurm" if engine is SLURM else f"mpirun '--gang-options=--mpirun {engine.mpirun} -H h1:1,h2:1,h3:1'"
    assert f"rerun: pytest --gang-backend={backend} {TESTS.name}::test_fails" in done.out


@pytest.mark.parametrize("engine", [OPEN_MPI_5, MPICH, SLURM], ids=lambda engine: engine.label)
def test_processes_on_several_hosts_become_the_ranks(bed: Bed, tmp_path: Path, engine: Engine) -> None:
    done = result(bed, engine, started(engine, "-k", "not lasts and not gangs"), tmp_path)
    assert (done.code, outcomes(done)) == (1, OF_TWO), done
    assert done.out.count("test session starts") == 1
    assert "jaxrun: 2 deselected: they want other processes than the 2 processes of" in done.out
    assert f"rerun: {'srun' if engine is SLURM else 'mpirun'} -n 2 pytest {TESTS.name}::test_fails" in done.out


def test_a_directory_that_a_host_does_not_really_share_is_reported(bed: Bed, tmp_path: Path) -> None:
    name = "/dev/shm/base"  # of each host its own
    bed.inside("h2", "mkdir", "-p", f"{name}/shared-test_shares_files0")
    done = result(bed, OPEN_MPI_5, starting(OPEN_MPI_5, "-k", "shares or differ", f"--basetemp={name}"), tmp_path)
    assert outcomes(done) == {"test_hosts_differ": "PASSED", "test_shares_files": "ERROR"}, done
    assert f"rank 1 on h2 cannot see {name}/shared-test_shares_files0; name a directory that all hosts" in done.out
    assert bed.inside("h2", "find", name, "-type", "f") == ""


def test_an_interrupt_ends_all_processes_that_were_there(bed: Bed, tmp_path: Path) -> None:
    with typed(bed, MPICH, started(MPICH, "-k", "lasts"), tmp_path) as job:
        job.wait_until(lambda: len(list(tmp_path.glob("running-*"))) == 2, "running test")
        os.kill(next(process.pid for process in bed.job_processes() if process.argv[0] == MPICH.mpirun), signal.SIGINT)
        result = job.result()
        job.gone()
    assert result.code == 2 and "KeyboardInterrupt" in result.out, result
    assert "Traceback" not in result.err and "INTERNALERROR" not in result.out, result
