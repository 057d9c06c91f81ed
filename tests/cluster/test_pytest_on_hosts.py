"""The pytest plugin with ranks on several hosts."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from cluster_fixture import HOSTS, Bed
from harness import Result
from launch_modes import OPEN_MPI_5, PYTHON, SLURM, Engine

pytestmark = pytest.mark.extended

TESTS = Path(__file__).with_name("remote_tests.py")
PYTEST = (PYTHON, "-m", "pytest", "-p", "no:cacheprovider", "--color=no", "-rA", "--gang-grace=0.5", TESTS.name)
OUTCOMES = {
    "test_hosts_differ": "PASSED",
    "test_fails": "FAILED",
    "test_dies": "FAILED",
    "test_has_no_mark": "PASSED",
    "test_shares_files": "PASSED",
    "test_hosts_are_counted": "PASSED",
    "test_gangs": "PASSED",
}


def starting(engine: Engine, *words: str) -> list[str]:
    """A pytest that starts its ranks on all hosts."""
    if engine is SLURM:
        return ["salloc", "--quiet", "-N", "3", "-n", "3", *PYTEST, "--gang-backend=slurm", *words]
    slots = ",".join(f"{host}:1" for host in HOSTS)
    options = f"--gang-options=--mpirun {engine.mpirun}", f"--gang-options=-H {slots}"
    return [*PYTEST, "--gang-backend=mpirun", *options, *words]


def result(bed: Bed, engine: Engine, command: list[str], directory: Path) -> Result:
    """Of a pytest that has left nothing on any host."""
    if reason := engine.missing():
        pytest.skip(reason)
    shutil.copy(TESTS, directory)
    (directory / "pytest.ini").touch()
    host = "h1" if engine.name else "ctl"
    with bed.typed(host, *command, directory=directory, env=engine.env()) as job:
        result = job.result()
        job.gone()
    return result


def outcomes(done: Result) -> dict[str, str]:
    return {name: word for word, name in re.findall(r"^(PASSED|FAILED|ERROR|SKIPPED) \S+::(\w+)", done.out, re.M)}


@pytest.mark.parametrize("engine", [OPEN_MPI_5, SLURM], ids=lambda engine: engine.label)
def test_the_ranks_of_a_test_are_on_several_hosts(bed: Bed, tmp_path: Path, engine: Engine) -> None:
    done = result(bed, engine, starting(engine), tmp_path)
    assert (done.code, outcomes(done)) == (1, OUTCOMES), done
    assert re.search(r"rank 1 \(h2\):  FAILED  assert 1 == 0 .*\nrank 0 \(h1\):  STUCK .*process_allgather", done.out)
    assert "rank 1 (h2):  DIED     with exit status 3" in done.out and "printed before the exit" in done.out
    backend = "slurm" if engine is SLURM else f"mpirun '--gang-options=--mpirun {engine.mpirun} -H h1:1,h2:1,h3:1'"
    assert f"rerun: pytest --gang-backend={backend} {TESTS.name}::test_fails" in done.out


def test_a_directory_that_a_host_does_not_really_share_is_reported(bed: Bed, tmp_path: Path) -> None:
    name = "/dev/shm/base"  # of each host its own
    bed.inside("h2", "mkdir", "-p", f"{name}/shared-test_shares_files0")
    done = result(bed, OPEN_MPI_5, starting(OPEN_MPI_5, "-k", "shares or differ", f"--basetemp={name}"), tmp_path)
    assert outcomes(done) == {"test_hosts_differ": "PASSED", "test_shares_files": "ERROR"}, done
    assert f"rank 1 on h2 cannot see {name}/shared-test_shares_files0; name a directory that all hosts" in done.out
    assert bed.inside("h2", "find", name, "-type", "f") == ""
