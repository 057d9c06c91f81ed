"""A gang, and tests under the pytest plugin, whose ranks are on three hosts: with mpirun and with srun."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from cluster_fixture import HOSTS, Bed
from harness import Result
from launch_modes import OPEN_MPI_5, PYTHON, SLURM, Engine

pytestmark = pytest.mark.extended

TESTS = Path(__file__).with_name("remote_tests.py")
PYTEST = (PYTHON, "-m", "pytest", "-p", "no:cacheprovider", "--color=no", "-rA", "--gang-grace=2", TESTS.name)
OUTCOMES = {
    "test_hosts_differ": "PASSED",
    "test_fails": "FAILED",
    "test_dies": "FAILED",
    "test_has_no_mark": "PASSED",
    "test_shares_files": "PASSED",
    "test_hosts_are_counted": "PASSED",
    "test_gangs": "PASSED",
}


SESSION = Path(__file__).with_name("gang_session.py")
BOTH = pytest.mark.parametrize("engine", [OPEN_MPI_5, SLURM], ids=lambda engine: engine.label)
SLOTS = ",".join(f"{host}:1" for host in HOSTS)
ALLOCATED = ("salloc", "--quiet", "-N", "3", "-n", "3", "--nodelist", ",".join(HOSTS))


def result(bed: Bed, engine: Engine, command: Sequence[str], directory: Path) -> Result:
    """Of a command that has left nothing on any host."""
    if reason := engine.missing():
        pytest.skip(reason)
    host = "h1" if engine.name else "ctl"
    with bed.typed(host, *command, directory=directory, env=engine.env()) as job:
        result = job.result()
        job.gone()
    return result


# ---- a gang


@BOTH
def test_a_gang_lives_on_several_hosts(bed: Bed, tmp_path: Path, engine: Engine) -> None:
    by_slurm = [*ALLOCATED, PYTHON, str(SESSION), "slurm"]
    by_mpirun = [PYTHON, str(SESSION), "mpirun", "--mpirun", engine.mpirun, "-H", SLOTS]
    done = result(bed, engine, by_slurm if engine is SLURM else by_mpirun, tmp_path)
    assert done.code == 0, done
    *lines, last = done.out.splitlines()
    seen = json.loads(last)
    assert seen["hosts"] == list(HOSTS)
    assert seen["gathered"] == [0.0, 2.0, 4.0] and seen["again"] == [0.0, 1.0, 2.0]
    assert seen["sums"] == [2_000_000.0] * 3
    assert seen["mapped"] == sum(range(30_000)) / 2 and seen["items"] == [str(number) for number in range(7)]
    assert seen["died"] == [2, "h3", 3] and seen["killed"] == [0, "h1", 9]
    assert "rank 1 (h2) sleeps at gang_session.py" in seen["late"], seen["late"]
    assert seen["paused"] == "T", seen  # stopped by a signal
    assert not seen["jax"]
    assert sorted(lines) == sorted(
        [f"[{rank}] gathering" for rank in (0, 1, 2)] * 2 + ["[0] gathering", "[2] gathering"]
    )
    assert done.err.count("started again") == 3, done


# ---- the pytest plugin


def result_of_pytest(bed: Bed, engine: Engine, directory: Path, *words: str) -> Result:
    """Of a pytest that starts its ranks on all hosts."""
    shutil.copy(TESTS, directory)
    (directory / "pytest.ini").touch()
    by_slurm = [*ALLOCATED, *PYTEST, "--gang-backend=slurm", *words]
    options = f"--gang-options=--mpirun {engine.mpirun}", f"--gang-options=-H {SLOTS}"
    by_mpirun = [*PYTEST, "--gang-backend=mpirun", *options, *words]
    return result(bed, engine, by_slurm if engine is SLURM else by_mpirun, directory)


def outcomes(done: Result) -> dict[str, str]:
    return {name: word for word, name in re.findall(r"^(PASSED|FAILED|ERROR|SKIPPED) \S+::(\w+)", done.out, re.M)}


@BOTH
def test_the_ranks_of_a_test_are_on_several_hosts(bed: Bed, tmp_path: Path, engine: Engine) -> None:
    done = result_of_pytest(bed, engine, tmp_path)
    assert (done.code, outcomes(done)) == (1, OUTCOMES), done
    assert re.search(r"rank 1 \(h2\):  FAILED  assert 1 == 0 .*\nrank 0 \(h1\):  STUCK .*process_allgather", done.out)
    assert "rank 1 (h2):  DIED     exited with status 3" in done.out and "printed before the exit" in done.out
    backend = "slurm" if engine is SLURM else f"mpirun '--gang-options=--mpirun {engine.mpirun} -H h1:1,h2:1,h3:1'"
    assert f"rerun: pytest --gang-backend={backend} {TESTS.name}::test_fails" in done.out


def test_a_directory_that_a_host_does_not_really_share_is_reported(bed: Bed, tmp_path: Path) -> None:
    name = "/dev/shm/base"  # of each host its own
    bed.inside("h2", "mkdir", "-p", f"{name}/shared-test_shares_files0")
    done = result_of_pytest(bed, OPEN_MPI_5, tmp_path, "-k", "shares or differ", f"--basetemp={name}")
    assert outcomes(done) == {"test_hosts_differ": "PASSED", "test_shares_files": "ERROR"}, done
    assert f"rank 1 on h2 cannot see {name}/shared-test_shares_files0; name a directory that all hosts" in done.out
    assert bed.inside("h2", "find", name, "-type", "f") == ""
