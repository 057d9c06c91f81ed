"""Ranks on several hosts: each in a container without privileges (--wrap), or on cores of its own (--bind)."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from cluster_fixture import HOSTS, READY, RUNS, JobRunner
from launch_modes import ALL, ATTACHED, BASIC, LAUNCHED, OPEN_MPI_5, SLURM, LaunchMode

SANDBOX = ("--wrap", "bwrap --dev-bind / / --unshare-pid --proc /proc --new-session")
MODES = [
    pytest.param(mode, id=str(mode), marks=() if mode in BASIC else pytest.mark.extended)
    for mode in ALL
    if mode.engine in (OPEN_MPI_5, SLURM)
]


@pytest.fixture
def runner(request, make_runner) -> JobRunner:
    return make_runner(request.param)


@pytest.mark.parametrize("runner", MODES[:1], indirect=True)
def test_a_rank_that_is_killed_is_named_and_nothing_is_left(runner: JobRunner) -> None:
    with runner.by_hand(*SANDBOX, code=RUNS + READY, rank_1="run(); os.kill(os.getpid(), signal.SIGKILL)") as job:
        result = job.result()
        job.gone()
    assert "rank 1 of 3 on h2 was killed by SIGKILL (9)" in result.err, result
    if runner.mode.direction == LAUNCHED:
        assert result.code == 137


@pytest.mark.extended
@pytest.mark.parametrize("runner", MODES, indirect=True)
def test_stacks_come_and_nothing_is_left_after_ctrl_c_or_kill_9(runner: JobRunner) -> None:
    with runner.by_hand(*SANDBOX, "--grace", "0.5") as job:
        job.wait_for_output("ready")
        hosts = sorted(event["host"] for event in job.events("Hello"))
        assert hosts == list(HOSTS)
        for event in job.events("Hello"):  # the number inside is 2
            assert b"jaxrun_runtime" in Path(f"/proc/{event['pid']}/cmdline").read_bytes()
        head = runner.mode.host if runner.mode.direction == LAUNCHED else HOSTS[0]
        shown = runner.bed.inside(head, sys.executable, "-m", "jaxrun", "stacks", str(job.run_dir))
        assert "3 ranks  0-2" in shown and "worker_by_hand.py" in shown, shown
        os.kill(job.launcher(), signal.SIGKILL if runner.mode.direction == ATTACHED else signal.SIGINT)
        result = job.result()
        job.gone()
    assert result.code != 0
    if runner.mode.direction == LAUNCHED:
        assert result.code == 130 and "interrupted by Ctrl-C (SIGINT)" in result.err, result


@pytest.mark.extended
@pytest.mark.parametrize(
    "runner", [LaunchMode(OPEN_MPI_5, LAUNCHED), LaunchMode(SLURM, LAUNCHED)], ids=str, indirect=True
)
def test_jax_joins_from_inside(runner: JobRunner) -> None:
    (runner.directory / "hello.py").write_text(
        "import os, jax\nfrom jax.experimental import multihost_utils\n"
        "print(multihost_utils.process_allgather(jax.numpy.ones(1)).sum(), os.getpid())\n"
    )
    result = runner.jaxrun(*SANDBOX, "hello.py")
    assert result.code == 0 and result.out.count("3.0 2") == 3, result


# ---- the cores that ranks stay on: jaxrun chooses those of each host, unless mpirun has bound them

CORES = sorted(os.sched_getaffinity(0))
PROGRAM = "import os\nprint(os.environ['JAXRUN_LOCAL_RANK'], *sorted(os.sched_getaffinity(0)))\n"
BOUND = ("--mpi-args", "--bind-to core")


@pytest.mark.extended
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
