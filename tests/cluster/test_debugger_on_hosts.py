"""A breakpoint in a rank on another host, used from the terminal in which jaxrun was typed."""

from __future__ import annotations

from pathlib import Path

import pytest
from cluster_fixture import HOSTS, TESTBED
from launch_modes import LAUNCHED, OPEN_MPI_5, SLURM, LaunchMode
from terminals import TerminalSession

pytestmark = pytest.mark.extended

PROGRAM = """
import jax
from jax.experimental import multihost_utils
secret = 40 + jax.process_index()
if secret == 42:
    breakpoint()
multihost_utils.sync_global_devices("end")
input("name? ")
"""


@pytest.mark.parametrize("engine", [OPEN_MPI_5, SLURM], ids=lambda engine: engine.title)
def test_a_rank_on_another_host_gets_the_terminal(make_runner, tmp_path: Path, engine) -> None:
    runner = make_runner(LaunchMode(engine, LAUNCHED))
    (tmp_path / "stop.py").write_text(PROGRAM)
    words = runner.mode.command(HOSTS, "--no-run-dir", str(tmp_path / "stop.py"))
    command = [str(TESTBED), "exec", runner.mode.host, "--", *words]
    env = {**engine.env(), "JAXRUN_TESTBED_DIR": str(runner.bed.root)}
    with TerminalSession(tmp_path, command=command, env=env) as terminal:
        terminal.wait_for(">>> rank 2 (h3) is in its debugger at stop.py:6")
        for typed, shown in (("p secret", "42\n"), ("p secret * 10", "420\n")):
            terminal.wait_for("(Pdb) ")
            terminal.type(f"{typed}\n")
            terminal.wait_for(shown)
        terminal.wait_for("(Pdb) ")
        terminal.type("c\n")
        assert terminal.end() == 1, terminal.text
    assert "has no standard input: no rank has jaxrun's (--stdin RANK|all|none)" in terminal.text
