"""Ranks whose programs differ are told so while the compilers still wait for each other, or before they begin."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from harness import TIME_LIMIT, started
from recording import SETTING

pytestmark = pytest.mark.jax_version

# A compiler that waits for the other ranks, until the file of the first argument is there.
_COMPILES = """
from jax._src import compiler
compile_it = compiler.backend_compile_and_load
def compile_together(backend, module, *args, **more):
    if "step" in str(module.operation.attributes["sym_name"]):
        print("compiling", flush=True)
        while not os.path.exists(sys.argv[1]):
            time.sleep(0.05)
    return compile_it(backend, module, *args, **more)
compiler.backend_compile_and_load = compile_together

@jax.jit
def step(a):
    return a * (3.0 if jr.rank == 2 else 2.0)

if jr.rank == 1:  # ahead of time, to look at it: that is nobody else's business
    jax.jit(lambda a: a.sum()).lower(x).compile()
step(x)
print("called")
"""


def test_a_difference_is_on_the_screen_while_the_compilers_wait(tmp_path: Path, script) -> None:
    go_on, screen = tmp_path / "go-on", tmp_path / "screen"
    program = script(SETTING + _COMPILES)
    with (
        screen.open("w") as err,
        started(tmp_path, "-n", "3", "--timeout", "80", str(program), str(go_on), stderr=err) as job,
    ):
        deadline = time.monotonic() + TIME_LIMIT
        while "pass the value" not in screen.read_text() and time.monotonic() < deadline:
            assert job.process.poll() is None, screen.read_text()
            time.sleep(0.02)
        job.wait_for_output("compiling", 3)
        assert "the processes disagree at cross-process call #1\n" in screen.read_text()
        assert "- %cst = stablehlo.constant dense<2.0" in screen.read_text()
        assert not any("called" in log.read_text() for log in job.run_dir.glob("rank-*.out"))
        go_on.touch()
        assert job.result().code == 0, screen.read_text()
    assert screen.read_text().count("the processes disagree") == 1, screen.read_text()


def test_in_strict_mode_nothing_is_compiled(tmp_path: Path, script) -> None:
    program = script(SETTING + _COMPILES)
    with started(tmp_path, "-n", "3", "--lockstep", "strict", "--timeout", "80", str(program), "no-such-file") as job:
        result = job.result()
    assert result.code == 1, result.err
    assert "jaxrun_runtime.DivergenceError: the processes disagree at cross-process call #1\n" in result.err
    assert "- %cst = stablehlo.constant dense<2.0" in result.err
    assert "compiling" not in result.out
