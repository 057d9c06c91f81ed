"""The programs that jaxrun ships, across real processes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from harness import jaxrun

PROGRAMS = "jaxrun_runtime.programs"


def test_a_program_passes_its_checks_without_further_output(tmp_path: Path) -> None:
    result = jaxrun(tmp_path, "-n", "2", "-d", "2", "-m", f"{PROGRAMS}.parallel_eval")
    assert (result.code, result.verdict()["divergence"]) == (0, ""), result.err
    assert _besides(result.err) == []


def test_the_end_reports_the_cost_of_strict_lockstep(tmp_path: Path) -> None:
    result = jaxrun(tmp_path, "-n", "2", "--lockstep", "strict", "-m", f"{PROGRAMS}.selfcheck")
    assert (result.code, result.verdict()["divergence"]) == (0, ""), result.err
    (cost,) = _besides(result.err)
    assert re.match(r"--lockstep strict: \d+ calls agreed on first", cost)


def _besides(err: str) -> list[str]:
    """The lines of jaxrun other than that the job starts and ends."""
    ours = (line for line in err.splitlines() if not line.startswith("["))
    return [line for line in ours if not re.match(r"jaxrun: (\d process|run dir|starting:|joining:|done in)", line)]


@pytest.mark.extended
def test_the_regression_finds_the_line_and_plots_it(tmp_path: Path) -> None:
    result = jaxrun(tmp_path, "-n", "4", "-d", "2", "-m", f"{PROGRAMS}.regression")
    assert result.code == 0, result.err
    assert "step   0" in result.out and "truth: 2 x - 1" in result.out
    assert (result.run_dir / "regression.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.extended
def test_the_digits_are_learned_alike_on_every_layout(tmp_path: Path) -> None:
    curves, accuracy = [], []
    for processes, devices in ((1, 1), (2, 2)):
        folder = tmp_path / f"{processes}x{devices}"
        folder.mkdir()
        losses = folder / "losses.txt"
        shape = ("-n", str(processes), "-d", str(devices))
        result = jaxrun(folder, *shape, "-m", f"{PROGRAMS}.digits", "--losses", str(losses))
        assert result.code == 0, result.err
        curves.append([float(line) for line in losses.read_text().split()])
        accuracy.append(float(re.search(r"test accuracy (\S+)%", result.out)[1]))  # type: ignore[index]
    assert len(curves[0]) == 120 and curves[0][-1] < curves[0][0] / 4 and min(accuracy) > 93
    assert curves[1] == pytest.approx(curves[0], rel=1e-3, abs=1e-4)


def test_pytest_is_a_program_even_where_warnings_are_errors(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")
    (tmp_path / "test_it.py").write_text("def test_it():\n    import jax\n    assert jax.process_count() == 2\n")
    environ = {"PYTEST_ADDOPTS": "-p no:hypothesispytest"}  # a second less
    result = jaxrun(tmp_path, "-n", "2", "-m", "pytest", "-q", env=environ)
    assert result.code == 0 and result.out.count("1 passed") == 2, result


def test_a_loop_of_collectives_may_run_ahead_of_its_results(tmp_path: Path) -> None:
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
    result = jaxrun(tmp_path, "-n", "2", "-d", "2", "--timeout", "60", str(program))
    assert result.code == 0, result.err
    assert result.out.count("means [1.0, 1.0]") == 2
