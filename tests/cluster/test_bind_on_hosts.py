"""The cores of ranks on several hosts: chosen by jaxrun for those of each host, unless mpirun has bound them."""

from __future__ import annotations

import os

import pytest
from cluster_fixture import JobRunner
from launch_modes import LAUNCHED, OPEN_MPI_5, SLURM, LaunchMode

CORES = sorted(os.sched_getaffinity(0))
PROGRAM = "import os\nprint(os.environ['JAXRUN_LOCAL_RANK'], *sorted(os.sched_getaffinity(0)))\n"
BOUND = ("--mpi-args", "--bind-to core")


@pytest.mark.skipif(len(CORES) != 2, reason="needs two cores")
@pytest.mark.parametrize(
    ("mode", "options", "expected"),
    [
        (LaunchMode(OPEN_MPI_5, LAUNCHED), ("--bind", "cores"), [CORES[:1], CORES[1:]]),
        pytest.param(
            LaunchMode(SLURM, LAUNCHED), ("--bind", "cores"), [CORES[:1], CORES[1:]], marks=pytest.mark.extended
        ),
        pytest.param(LaunchMode(OPEN_MPI_5, LAUNCHED), BOUND, [CORES[:1], CORES[1:]], marks=pytest.mark.extended),
        pytest.param(LaunchMode(OPEN_MPI_5, LAUNCHED), (), [CORES, CORES], marks=pytest.mark.extended),
    ],
)
def test_ranks_stay_on_their_cores(make_runner, mode: LaunchMode, options: tuple[str, ...], expected) -> None:
    runner: JobRunner = make_runner(mode)
    (runner.directory / "cores.py").write_text(PROGRAM)
    result = runner.jaxrun(*options, "cores.py", ranks_on=("h1", "h1", "h2", "h2"))
    shown = sorted(path.read_text().split() for path in (runner.directory / "run").glob("rank-*.out"))
    wanted = [[str(local), *map(str, cores)] for local, cores in enumerate(expected) for _ in range(2)]
    assert result.code == 0 and shown == sorted(wanted), result
