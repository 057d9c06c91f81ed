"""A gang whose ranks are on three hosts: what it is to its user, with mpirun and with srun."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cluster_fixture import HOSTS, Bed
from launch_modes import OPEN_MPI_5, PYTHON, SLURM, Engine

pytestmark = pytest.mark.extended

SESSION = str(Path(__file__).with_name("gang_session.py"))


def command(engine: Engine) -> list[str]:
    slots = ",".join(f"{host}:1" for host in HOSTS)
    if engine is SLURM:
        return ["salloc", "--quiet", "-N", "3", "-n", "3", "--nodelist", ",".join(HOSTS), PYTHON, SESSION, "slurm"]
    return [PYTHON, SESSION, "mpirun", "--mpirun", engine.mpirun, "-H", slots]


@pytest.mark.parametrize("engine", [OPEN_MPI_5, SLURM], ids=lambda engine: engine.label)
def test_a_gang_lives_on_several_hosts(bed: Bed, tmp_path: Path, engine: Engine) -> None:
    if reason := engine.missing():
        pytest.skip(reason)
    host = "h1" if engine.name else "ctl"
    with bed.typed(host, *command(engine), directory=tmp_path, env=engine.env()) as job:
        result = job.result()
        job.gone()
    assert result.code == 0, result
    *lines, last = result.out.splitlines()
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
    assert result.err.count("started anew") == 3, result
