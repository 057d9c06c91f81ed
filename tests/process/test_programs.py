"""Programs across real processes: those that jaxrun ships, pytest, and one that runs ahead of its results."""

from __future__ import annotations

import random
import re
import signal
from pathlib import Path

import pytest
from harness import Result, jaxrun, started

PROGRAMS = "jaxrun_runtime.programs"


def besides(err: str) -> list[str]:
    """The lines of jaxrun other than that the job starts and ends."""
    ours = (line for line in err.splitlines() if not line.startswith("["))
    return [line for line in ours if not re.match(r"jaxrun: (\d process|run dir|starting:|joining:|done in)", line)]


@pytest.mark.jax_version
def test_a_loop_of_collectives_may_run_ahead_of_its_results_and_is_in_step(tmp_path: Path) -> None:
    # With fewer threads than XLA needs for its simulated devices, JAX 0.8 and 0.10 hang here for ever.
    program = tmp_path / "ahead.py"
    program.write_text(
        "import jax\nimport numpy as np\n"
        "from jax.sharding import Mesh, NamedSharding, PartitionSpec as P\n"
        "devices = np.array(jax.devices())\n"
        "mesh = Mesh(devices, ('i',))\n"
        "ones = lambda index: np.ones(devices.size)[index]\n"
        "x = jax.make_array_from_callback(devices.shape, NamedSharding(mesh, P('i')), ones)\n"
        "mean = lambda x: jax.lax.psum(x, 'i') / devices.size\n"
        "step = jax.jit(jax.shard_map(mean, mesh=mesh, in_specs=P('i'), out_specs=P('i')))\n"
        "for _ in range(400):\n    x = step(x)\n"
        "print('means', [float(shard.data[0]) for shard in x.addressable_shards])\n"
    )
    result = jaxrun(tmp_path, "-n", "2", "-d", "2", "--timeout", "200", str(program))
    assert (result.code, result.verdict()["divergence"], besides(result.err)) == (0, "", []), result
    assert result.out.count("means [1.0, 1.0]") == 2


def test_pytest_is_a_program_where_warnings_are_errors_with_strict_lockstep(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")
    (tmp_path / "test_it.py").write_text(
        "def test_it():\n"
        "    from jax.experimental.multihost_utils import sync_global_devices\n"
        "    sync_global_devices('here')\n"
    )
    environ = {"PYTEST_ADDOPTS": "-p no:hypothesispytest"}  # a second less
    result = jaxrun(tmp_path, "-n", "2", "--lockstep", "strict", "-m", "pytest", "-q", env=environ)
    assert (result.code, result.verdict()["divergence"]) == (0, ""), result
    assert result.out.count("1 passed") == 2, result
    assert not besides(result.err)


@pytest.mark.extended
def test_training_ends_with_the_same_bits_after_sigterm_a_killed_rank_and_a_restart(tmp_path: Path) -> None:
    pytest.importorskip("optax")
    pytest.importorskip("orbax.checkpoint")
    train = ("-n", "2", "-m", f"{PROGRAMS}.train")
    length = ("--steps", "120", "--save-every", "30")

    def folder(name: str) -> Path:
        (tmp_path / name).mkdir()
        return tmp_path / name

    def parameters(result: Result) -> str:
        found = re.search(r"parameters (\w{16}) after 120 steps", result.out)
        assert result.code == 0 and found is not None, result
        return found[1]

    undisturbed = parameters(jaxrun(folder("undisturbed"), *train, "state", *length))
    state = str(tmp_path / "state")
    with started(folder("stopped"), *train, state, *length, "--step-time", "0.5") as job:
        job.wait_for_event("StopPolled", 2)
        job.process.send_signal(signal.SIGTERM)
        stopped = job.result()
    assert stopped.code == 75, stopped
    found = re.search(r"stopped after step (\d+), and saved it", stopped.out)
    assert found is not None and f"may be resumed from step {found[1]}." in str(stopped.verdict()["headline"])
    assert stopped.events("CheckpointSaved")[-1]["step"] == int(found[1])

    faults = ("--max-restarts", "2", "--chaos", f"kill:{random.randrange(2)}@{random.uniform(0.2, 1.5):.1f}s")
    resumed = jaxrun(folder("resumed"), *faults, *train, state, *length, "--step-time", "0.05")
    assert f"goes on after step {found[1]}, bit for bit" in resumed.out
    assert "killed by SIGKILL (9), as --chaos asked" in resumed.err
    assert parameters(resumed) == undisturbed
