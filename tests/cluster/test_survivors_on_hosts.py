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

# Steps until there have been 30 without the lost rank.
STEPS = """
import jax, jax.numpy as jnp, numpy as np
from jax.experimental.multihost_utils import live_devices
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

with_all = without = 0
while without < 30:
    try:
        with live_devices(jax.devices()) as devices:
            split = NamedSharding(Mesh(np.array(devices), "x"), P("x"))
            ones = jax.make_array_from_callback((len(devices),), split, lambda at: np.ones(1, np.float32))
            total = float(jax.jit(jnp.sum)(ones))
    except Exception as error:
        print("lost", type(error).__name__, flush=True)
        continue
    assert total == len(devices)
    with_all, without = with_all + (total == 3), without + (total == 2)
    if with_all == 20:
        print("ready", flush=True)
print("went on", flush=True)
"""


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
    try:
        with live_devices(jax.devices()) as devices:
            split = NamedSharding(Mesh(np.array(devices), "x"), P("x"))
            ones = jax.make_array_from_callback((len(devices),), split, lambda at: np.ones(1, np.float32))
            total = float(jax.jit(jnp.sum)(ones))
    except Exception as error:
        print("lost", type(error).__name__, flush=True)
        continue
    assert total == len(devices)
    steps, again = steps + 1, again + (devices[0].process_index != 0)
print("whole again", flush=True)
"""


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


# Steps of both ranks, without end in the first attempt.
SPARED = """
import jax, jax.numpy as jnp, numpy as np
import jaxrun_runtime as jr
from jax.experimental.multihost_utils import live_devices
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

steps = 0
while steps < 20 or jr.attempt().number == 1:
    with live_devices(jax.devices()) as devices:
        split = NamedSharding(Mesh(np.array(devices), "x"), P("x"))
        ones = jax.make_array_from_callback((len(devices),), split, lambda at: np.ones(1, np.float32))
        assert float(jax.jit(jnp.sum)(ones)) == 2
    steps += 1
    if steps == 20:
        print("ready", flush=True)
print("ends on", jr.host, flush=True)
"""


@pytest.mark.usefixtures("mended")
def test_after_the_loss_of_a_host_all_start_again_where_a_spare_one_takes_its_place(bed: Bed, tmp_path: Path) -> None:
    if reason := OPENSSH.missing():
        pytest.skip(reason)
    (tmp_path / "spared.py").write_text(SPARED)
    words = ("--run-dir", str(tmp_path / "run"), "--keep-survivors", "--max-restarts", "1", "--spares", "1")
    mode = LaunchMode(OPENSSH, LAUNCHED)
    command = mode.command(HOSTS, *words, "spared.py")
    with bed.typed(mode.host, *command, directory=tmp_path, env=ssh_env(OPENSSH)) as job:
        job.wait_for_output("ready", count=2)
        bed.run("off", HOSTS[1])
        result = job.result()
        job.gone()
    assert result.code == 0 and "rank 1 (h2) failed; its host is lost" in result.err, result
    assert "ends on h3" in result.out and "is back" not in result.err
