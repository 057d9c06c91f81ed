"""A running job on terminals: `jaxrun top` and `jaxrun --live`, and debuggers of ranks."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from harness import MISBEHAVE, jaxrun, started
from terminals import TerminalSession

WAITS = """
import os, time, jax
print("ready", flush=True)
while not os.path.exists("go"):
    time.sleep(0.01)
if jax.process_index() == 1:
    raise ValueError("bad record")
print("finished", flush=True)
"""
SCREEN = {"size": (80, 24), "env": {"TERM": "xterm", "NO_COLOR": "1"}}


def top(*arguments, status=0):
    command = [sys.executable, "-m", "jaxrun", "top", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == status, done
    return done.stdout + done.stderr


def rows(text):
    """The rows of ranks: what follows their titles, by rank."""
    found = re.findall(r"^([! ]) (\d+)  +(.*?) *$", text, re.MULTILINE)
    return {int(rank): (mark, rest) for mark, rank, rest in found}


def test_it_shows_who_is_late_once_or_until_the_end_of_the_job(tmp_path):
    # Rank 1 hangs, and rank 0 waits for it.
    with started(tmp_path, "-n", "2", MISBEHAVE, "--rank", "1", "--hang") as job:
        job.wait_for_output("ready", 2)
        text = top(job.run_dir)  # without a terminal it is printed once
        while not rows(text)[1][0].strip():  # it is late after a second
            text = top("--once", job.run_dir)
        assert "\x1b" not in text and rows(text).keys() == {0, 1}
        assert rows(text)[1][1].startswith("sleeps") and rows(text)[1][1].endswith("ready")
        assert re.search(r" \d+%  +\d+M  ready$", rows(text)[0][1]), text

        with TerminalSession(tmp_path, "top", str(job.run_dir), **SCREEN) as screen:
            screen.wait_for("jaxrun top  run  attempt 1, running")
            screen.wait_for("! 1     sleeps")
            screen.wait_for("s for rank 1 ")
            screen.type("s")
            screen.wait_for("2 ranks, 2 groups")
            screen.type("x")
            screen.wait_for("s stacks   q quit")
            screen.type("q")
            assert screen.end() == 0 and job.process.poll() is None

        with TerminalSession(tmp_path, "top", str(job.run_dir), **SCREEN) as screen:
            screen.wait_for("! 1     sleeps")
            pid = next(event["pid"] for event in job.events("WorkerSpawned") if event["rank"] == 0)
            os.kill(pid, signal.SIGSTOP)
            screen.wait_for("! 0     stopped by a signal")
            os.kill(pid, signal.SIGCONT)
            job.process.send_signal(signal.SIGTERM)
            screen.wait_for("jaxrun: ")
            screen.wait_for("SIGTERM")
            assert screen.end() == 0
            last = screen.text.rpartition("\x1b[?1049l")[2]
            assert rows(last)[1] and "q quit" not in last, last
        assert not [
            event for event in job.events() if event["type"].endswith("Request") and event["type"] != "StacksRequest"
        ]
        assert "is over; how it went: jaxrun explain" in top(job.run_dir, status=2)


@pytest.mark.extended
def test_live_has_the_terminal_until_the_job_is_over_and_then_the_verdict_is_printed(tmp_path):
    (tmp_path / "waits.py").write_text(WAITS)
    with TerminalSession(tmp_path, "--live", "--run-dir", "run", "-n", "2", "waits.py", **SCREEN) as screen:
        screen.wait_for("jaxrun top  run  attempt 1, ")
        screen.wait_for("ready")
        (tmp_path / "go").touch()
        assert screen.end() == 1
    shown, _, after = screen.text.rpartition("\x1b[?1049l")
    assert "[0] ready" not in screen.text and "s stacks " in shown and "s stacks " not in after
    assert "attempt 1, over after" in after and "jaxrun: 2 processes x 1 device" in after
    assert "ValueError: bad record" in after and "rank 1 of 2 raised ValueError" in after and "exit 1" in after


@pytest.mark.extended
def test_leaving_the_live_screen_shows_the_output_and_unprintable_letters_are_replaced(tmp_path):
    (tmp_path / "waits.py").write_text(
        WAITS.replace('print("ready", flush=True)', 'os.write(1, "gr\xfc\xdfe\\n".encode())')
    )
    ascii_only = {**SCREEN, "env": {**SCREEN["env"], "PYTHONIOENCODING": "ascii"}}
    with TerminalSession(tmp_path, "--live", "--run-dir", "run", "-n", "1", "waits.py", **ascii_only) as screen:
        screen.wait_for("jaxrun top  run  attempt 1, running")
        screen.wait_for("gr??e")
        screen.type("q")
        screen.wait_for("jaxrun: 1 process x 1 device")
        (tmp_path / "go").touch()
        screen.wait_for("[0] finished")
        screen.wait_for("jaxrun: done in")
        assert screen.end() == 0


# ---- breakpoint(), pdb.set_trace() and --pdb

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
# jaxrun, but the terminal stays with a rank that takes more than a second to execute a line.
PATIENT = """
from jaxrun.__main__ import entry
from jaxrun.controller.head import debugger_turns
debugger_turns.HANDOVER_S = 60.0
entry()
"""


@pytest.mark.jax_version
def test_ranks_at_breakpoints_have_the_terminal_in_turn_and_the_culprit_with_pdb(tmp_path: Path, script) -> None:
    words = ("--no-run-dir", "--timeout", "200", "-n", "2", "--pdb", str(script(BREAKPOINTS)))
    with TerminalSession(tmp_path, *words, command=(sys.executable, "-c", PATIENT)) as terminal:
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


@pytest.mark.extended
@pytest.mark.jax_version
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


@pytest.mark.extended
@pytest.mark.jax_version
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
import jax
jax.debug.breakpoint()
breakpoint()
"""
IN_JIT = """
import jax

@jax.jit
def double(x):
    y = 2 * x
    jax.debug.breakpoint()
    return y

double(jax.numpy.float32(jax.process_index())).block_until_ready()
"""


@pytest.mark.extended
@pytest.mark.jax_version
def test_jaxs_own_breakpoint_gets_the_terminal_on_one_rank_after_another(tmp_path: Path, script) -> None:
    words = ("--no-run-dir", "-n", "2", str(script(IN_JIT)))
    with TerminalSession(tmp_path, *words, command=(sys.executable, "-c", PATIENT)) as terminal:
        for _ in range(2):
            terminal.wait_for("is in its debugger at program0.py:7")
            terminal.wait_for("(jdb) ")
            terminal.type("p y\n")
            terminal.wait_for("Array(")
            terminal.wait_for("(jdb) ")
            terminal.type("c\n")
        assert terminal.end() == 0, terminal.text
    assert "Array(0., dtype=float32)" in terminal.text and "Array(2., dtype=float32)" in terminal.text, terminal.text


@pytest.mark.extended
@pytest.mark.jax_version
def test_without_a_terminal_a_breakpoint_says_why_it_cannot_be_used_and_a_pdb_with_streams_of_its_own_is_left_alone(
    tmp_path: Path, script
) -> None:
    result = jaxrun(tmp_path, "-n", "2", "--pdb", str(script(STREAMS)))
    assert result.code == 1 and "wrote True Pdb\n" in result.out
    assert "jaxrun: --pdb does nothing: jaxrun's standard input is not a terminal\n" in result.err
    said = "nobody can use this breakpoint: jaxrun's standard input is not a terminal; PYTHONBREAKPOINT=0 skips"
    assert result.err.count(said) == 1
    passed = "jaxrun: jax.debug.breakpoint at program0.py:8 is passed: jaxrun's standard input is not a terminal\n"
    assert passed in result.err  # one rank may be stopped before it gets there
    assert "pdb.py" not in result.err
