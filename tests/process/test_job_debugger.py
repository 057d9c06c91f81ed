"""breakpoint(), pdb.set_trace() and --pdb in ranks of a job, used from a pseudo terminal."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from harness import jaxrun
from terminals import TerminalSession

pytestmark = pytest.mark.jax_version

BREAKPOINTS = """
import pdb
import sys
import jax
from jax.experimental import multihost_utils
rank = jax.process_index()
secret = 40 + rank
if "--set-trace" in sys.argv:
    pdb.set_trace()
else:
    breakpoint()
multihost_utils.sync_global_devices("after")
if rank == 1 and secret == 66:
    raise ValueError("bad record")
multihost_utils.sync_global_devices("never")
"""


def test_ranks_at_breakpoints_have_the_terminal_in_turn_and_the_culprit_with_pdb(tmp_path: Path, script) -> None:
    program = str(script(BREAKPOINTS))
    with TerminalSession(tmp_path, "--no-run-dir", "--timeout", "200", "-n", "2", "--pdb", program) as terminal:
        ranks = []
        for _ in range(2):
            terminal.wait_for("is in its debugger at program0.py:")
            terminal.wait_for("(Pdb) ")
            terminal.type("p secret\n")
            terminal.wait_for("(Pdb) ")
            ranks.append(terminal.text.split("p secret\n")[-1].split("\n")[0])
            terminal.type("secret = 66\n")
            terminal.wait_for("(Pdb) ")
            terminal.type("c\n")
        assert sorted(ranks) == ["40", "41"], terminal.text
        terminal.wait_for("rank 1 failed: ValueError: bad record")
        terminal.wait_for("(Pdb) ")
        terminal.type("p rank, secret\n")
        terminal.wait_for("(1, 66)\n")
        terminal.type("q\n")
        assert terminal.end() == 1, terminal.text
    assert "rank 1 of 2 raised ValueError" in terminal.text


def test_the_session_in_the_docs_is_what_somebody_sees(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "debugging.md").read_text()
    (name, program), (command, session) = (
        re.search(pattern, page, re.DOTALL).groups()
        for pattern in (r"```python\n# (average\.py)\n(.*?)```", r"```text\n\$ jaxrun ([^\n]*average\.py)\n(.*?)```")
    )
    (tmp_path / name).write_text(f"# {name}\n{program}")
    with TerminalSession(tmp_path, *command.split()) as terminal:
        for line in session.splitlines():
            prompt, typed = line[: len("(Pdb) ")], line[len("(Pdb) ") :]
            if prompt == "(Pdb) ":
                terminal.wait_for(prompt)
                terminal.type(f"{typed}\n")
            elif line != "…":
                terminal.wait_for(line.rstrip("…"))
        assert terminal.end() == 0, terminal.text


def test_a_step_that_waits_for_another_rank_hands_the_terminal_over_and_ctrl_c_ends_the_job(
    tmp_path: Path, script
) -> None:
    program = str(script(BREAKPOINTS))
    with TerminalSession(tmp_path, "--no-run-dir", "-n", "2", program, "--set-trace") as terminal:
        line = ""  # before Python 3.13, a breakpoint stops at the line after it
        while "sync_global_devices" not in line:
            terminal.wait_for("(Pdb) ")
            line = terminal.text.rpartition("-> ")[2]
            terminal.type("n\n")
        terminal.wait_for("has not come back from that step")
        terminal.wait_for("is in its debugger")
        terminal.wait_for("(Pdb) ")
        terminal.type("c\n")
        terminal.wait_for("is in its debugger")
        terminal.wait_for("(Pdb) ")
        terminal.type("\x03")
        assert terminal.end() == 130, terminal.text
    assert "interrupted by Ctrl-C" in terminal.text


STREAMS = """
import io, pdb
out = io.StringIO()
pdb.Pdb(stdin=io.StringIO("p 40 + 2\\nc\\n"), stdout=out).set_trace()
x = 1
print("wrote", "42" in out.getvalue(), pdb.Pdb.__name__, flush=True)
breakpoint()
"""


def test_without_a_terminal_a_breakpoint_says_why_it_cannot_be_used_and_a_pdb_with_streams_of_its_own_is_left_alone(
    tmp_path: Path, script
) -> None:
    result = jaxrun(tmp_path, "-n", "2", "--pdb", str(script(STREAMS)))
    assert result.code == 1 and "wrote True Pdb\n" in result.out
    assert "jaxrun: --pdb does nothing: jaxrun's standard input is not a terminal\n" in result.err
    said = "nobody can use this breakpoint: jaxrun's standard input is not a terminal; PYTHONBREAKPOINT=0 skips"
    assert result.err.count(said) == 1
    assert "pdb.py" not in result.err
