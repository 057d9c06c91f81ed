"""--keep-survivors over hosts: a job goes on when one of its hosts loses its power, and takes a lost rank back."""

from __future__ import annotations

from pathlib import Path

import pytest
from cluster_fixture import HOSTS, Bed
from harness import extended
from launch_modes import (
    INTEL,
    LAUNCHED,
    MPICH,
    OPEN_MPI_4,
    OPEN_MPI_5,
    OPENSSH,
    PYTHON,
    SLURM,
    Engine,
    LaunchMode,
    ssh_env,
)

pytestmark = pytest.mark.extended

# One step of a program: the sum of a one for each device that lives.
SUM = """\
    try:
        with live_devices(jax.devices()) as devices:
            split = NamedSharding(Mesh(np.array(devices), "x"), P("x"))
            ones = jax.make_array_from_callback((len(devices),), split, lambda at: np.ones(1, np.float32))
            total = float(jax.jit(jnp.sum)(ones))
    except Exception as error:
        print("lost", type(error).__name__, flush=True)
        continue
    assert total == len(devices)
"""
# Steps until there have been 30 without the lost rank.
STEPS = """
import jax, jax.numpy as jnp, numpy as np
from jax.experimental.multihost_utils import live_devices
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

with_all = without = 0
while without < 30:
"""
STEPS += (
    SUM
    + """\
    with_all, without = with_all + (total == 3), without + (total == 2)
    if with_all == 20:
        print("ready", flush=True)
print("went on", flush=True)
"""
)


@pytest.mark.usefixtures("mended")
@pytest.mark.parametrize(
    "engine", [OPEN_MPI_5, extended(OPENSSH), extended(SLURM)], ids=lambda engine: getattr(engine, "label", "")
)
def test_the_ranks_on_the_other_hosts_go_on_when_a_host_loses_its_power(
    bed: Bed, tmp_path: Path, engine: Engine
) -> None:
    if reason := engine.missing():
        pytest.skip(reason)
    (tmp_path / "steps.py").write_text(STEPS)
    words = ("--run-dir", str(tmp_path / "run"), "--keep-survivors", "steps.py")
    command = LaunchMode(engine, LAUNCHED).command(HOSTS, *words)
    if engine is SLURM:  # an allocation that outlives the loss of a node
        nodes = ["--no-kill", "-N", str(len(HOSTS)), "--ntasks-per-node", "1", "--nodelist", ",".join(HOSTS)]
        command = ["salloc", "--quiet", *nodes, PYTHON, "-m", "jaxrun", "--backend", "slurm", *words]
    host = LaunchMode(engine, LAUNCHED).host
    with bed.typed(host, *command, directory=tmp_path, env=ssh_env(engine)) as job:
        job.wait_for_output("ready")
        bed.run("off", HOSTS[2])
        result = job.result()
        job.gone()
    assert result.code == 0, result
    assert "rank 2 of 3 on h3 was lost" in result.err and "ranks 0-1 go on" in result.err
    assert result.out.count("went on") == 2 and "lost ProcessFailureError" in result.out


# Rank 2 dies at its step 20; then there are 30 steps with the process in its place, on all ranks.
RETURNS = """
import os
import jax, jax.numpy as jnp, numpy as np
from jax.experimental.multihost_utils import live_devices
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

steps = again = 0
while again < 30:
    if jax.process_index() == 2 and steps == 20 and not os.path.exists("killed"):
        open("killed", "w").close()
        os.kill(os.getpid(), 9)
"""
RETURNS += (
    SUM
    + """\
    steps, again = steps + 1, again + (devices[0].process_index != 0)
print("whole again", flush=True)
"""
)


@pytest.mark.usefixtures("mended")
@pytest.mark.parametrize(
    "engine",
    [OPENSSH, *map(extended, (OPEN_MPI_5, OPEN_MPI_4, MPICH, INTEL, SLURM))],
    ids=lambda engine: getattr(engine, "label", ""),
)
def test_a_lost_rank_comes_back_on_its_host(bed: Bed, tmp_path: Path, engine: Engine) -> None:
    if reason := engine.missing():
        pytest.skip(reason)
    (tmp_path / "returns.py").write_text(RETURNS)
    words = ("--run-dir", str(tmp_path / "run"), "--keep-survivors", "--max-restarts", "2", "returns.py")
    mode = LaunchMode(engine, LAUNCHED)
    with bed.typed(mode.host, *mode.command(HOSTS, *words), directory=tmp_path, env=ssh_env(engine)) as job:
        result = job.result()
        job.gone()
    assert result.code == 0 and result.out.count("whole again") == 3, result
    assert "and it is started again (1 of 2)" in result.err and "rank 2 (h3) is back" in result.err, result
    assert "attempt 1" not in result.err


# Steps until there have been 30 of all ranks after the return of one.
SPARED = """
import jax, jax.numpy as jnp, numpy as np
import jaxrun_runtime as jr
from jax.experimental.multihost_utils import live_devices
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

steps = again = 0
while again < 30:
"""
SPARED += (
    SUM
    + """\
    steps, again = steps + 1, again + (devices[0].process_index != 0)
    if steps == 20:
        print("ready", flush=True)
print(f"rank {jr.rank} ends on {jr.host}, attempt {jr.attempt().number}", flush=True)
"""
)


@pytest.mark.usefixtures("mended")
@pytest.mark.parametrize(
    ("engine", "each"),
    [(OPENSSH, 1), extended(OPENSSH, 2), extended(OPEN_MPI_5, 2), extended(SLURM, 1)],
    ids=lambda value: getattr(value, "label", str(value)),
)
def test_a_spare_host_takes_the_place_of_a_lost_one_while_the_others_go_on(
    bed: Bed, tmp_path: Path, engine: Engine, each: int
) -> None:
    if reason := engine.missing():
        pytest.skip(reason)
    (tmp_path / "spared.py").write_text(SPARED)
    words = ("--run-dir", str(tmp_path / "run"), "--keep-survivors", "--max-restarts", "2", "--spares", "1")
    mode = LaunchMode(engine, LAUNCHED)
    command = mode.command(tuple(host for host in HOSTS for _ in range(each)), *words, "spared.py")
    if engine is SLURM:  # an allocation that outlives the loss of a node
        command[1:1] = ["--no-kill"]
    with bed.typed(mode.host, *command, directory=tmp_path, env=ssh_env(engine)) as job:
        job.wait_for_output("ready", count=2 * each)
        job.wait_for_event("SpareReported")
        bed.run("off", HOSTS[1])
        result = job.result()
        job.gone()
    assert result.code == 0 and "attempt 1 of" not in result.err, result
    for rank in range(2 * each):
        assert f"rank {rank} ends on {HOSTS[0] if rank < each else HOSTS[2]}, attempt 1" in result.out, result
    lost, was, it = ("rank 1 of 2", "was", "it is") if each == 1 else ("ranks 2-3 of 4", "were", "they are")
    assert f"{it} started again on the spare host h3" in result.err and " (h3) " in result.err
    assert f"{lost} on h2 {was} lost: nothing was heard" in result.err and f"and {was} back on h3 after" in result.err
