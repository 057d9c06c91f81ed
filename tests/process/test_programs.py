"""The shipped programs in one process with four simulated devices."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec

import pytest
from harness import extended


def run(program, *arguments, devices=4, env=None, before="", cwd=None):
    """Run a program as `python -m` does; `before` is Python that comes first, to break something."""
    module = f"jaxrun_runtime.programs.{program}"
    code = f"{before}\nimport runpy; runpy.run_module('{module}', run_name='__main__', alter_sys=True)"
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=cwd,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": str(devices),
            **(env or {}),
        },
    )


def succeed(*arguments, **options):
    process = run(*arguments, **options)
    assert (process.returncode, process.stderr) == (0, "")
    return process.stdout


def fail(*arguments, **options):
    process = run(*arguments, **options)
    assert process.returncode == 1
    assert "Traceback" not in process.stderr
    return process.stderr


@pytest.mark.jax_version
def test_selfcheck_lists_the_devices_and_passes():
    table, _, verdict = succeed("selfcheck").strip().rpartition("\n")
    assert [line.split() for line in table.splitlines()] == [
        ["rank", "devices", "platform", "kind"],
        ["0", "4", "cpu", "cpu"],
    ]
    assert verdict == "psum, all_gather and ppermute are right on 4 device(s) in 1 process(es)"


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("jax.lax.psum = lambda x, name: 3 * x", "psum of ones gave [3.0] instead of [4] on"),
        extended("jax.lax.all_gather = lambda x, name: 0 * jax.numpy.arange(4) + x", "all_gather gave [[0, 0, 0, 0]]"),
        extended("jax.lax.ppermute = lambda x, name, pairs: x", "ppermute ring gave [0] instead of [3] on"),
    ],
)
def test_selfcheck_ends_with_a_sentence_when_a_collective_is_wrong(broken, message):
    error = fail("selfcheck", before=f"import jax; {broken}")
    assert message in error
    assert "rank 0" in error


@pytest.mark.extended
def test_parallel_eval_equals_vmap_on_one_device():
    lines = succeed("parallel_eval").splitlines()
    assert [line.split("(")[0].strip() for line in lines[:-1]] == [
        "convolution",
        "convolution of the sharded output",
        "one window for all rows",
        "normalised convolution",
        "vmap of 2 rows in each device",
    ]
    assert all(line.endswith("equals vmap") for line in lines[:-1])
    assert lines[-1] == "all equal to vmap on one device: 4 device(s) in 1 process(es)"


@pytest.mark.extended
def test_parallel_eval_ends_with_a_sentence_when_a_result_is_wrong():
    broken = "real = jax.shard_map; jax.shard_map = lambda f, **options: real(lambda *a: 2 * f(*a), **options)"
    error = fail("parallel_eval", before=f"import jax; {broken}")
    assert "convolution gave [[22.0, 40.0, 58.0]]" in error
    assert "of rank 0, but vmap on one device gives [[11.0, 20.0, 29.0]]" in error


@pytest.mark.jax_version
def test_regression_finds_the_line_and_draws_it(tmp_path):
    output = succeed("regression", env={"JAXRUN_RUN_DIR": str(tmp_path)})
    found = re.search(r"^y = (\S+) x ([+-]) (\S+)  \(truth: 2 x - 1\)$", output, re.M)
    assert float(found[1]) == pytest.approx(2, abs=0.06)
    assert float(found[2] + found[3]) == pytest.approx(-1, abs=0.06)
    assert re.findall(r"^step +(\d+)  loss", output, re.M) == ["0", "100"]
    if find_spec("matplotlib"):
        assert (tmp_path / "regression.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.extended
def test_regression_computes_the_same_on_one_device_and_on_four():
    # A gradient that is summed twice would still find the line, by other steps.
    alone, together = (succeed("regression", "--no-plot", devices=devices) for devices in (1, 4))
    assert alone == together


@pytest.mark.extended
def test_regression_without_matplotlib_says_what_to_install(tmp_path):
    hidden = "import sys; sys.modules['matplotlib'] = None"
    output = succeed("regression", "--steps", "1", before=hidden, cwd=tmp_path, env={"JAXRUN_RUN_DIR": ""})
    assert output.splitlines()[-1] == "plot left out: matplotlib is not installed; pip install matplotlib"
    assert not list(tmp_path.iterdir())


def test_digits_without_optax_says_what_to_install():
    assert fail("digits", before="import sys; sys.modules['optax'] = None") == (
        "digits needs optax, which is not installed; pip install optax scikit-learn\n"
    )
