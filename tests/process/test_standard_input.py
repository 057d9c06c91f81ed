"""Which ranks read jaxrun's standard input, and what input() says on the others."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

from harness import jaxrun
from terminals import TerminalSession

ASKS = """
import jax
try:
    print("read", input("name? "))
except EOFError as error:
    print(error)
"""


def test_input_on_a_rank_without_standard_input_says_who_has_it(tmp_path: Path, script) -> None:
    (tmp_path / "answers").write_text("Ada\n")
    with (tmp_path / "answers").open() as stdin:
        result = jaxrun(tmp_path, "-n", "2", "--stdin", "1", str(script(ASKS)), stdin=stdin)
    assert result.code == 0, result
    assert "[1] name? read Ada\n" in result.out
    assert "rank 0 has no standard input: rank 1 has jaxrun's (--stdin RANK|all|none)\n" in result.out


def test_all_ranks_read_a_file_each_from_its_beginning(tmp_path: Path, script) -> None:
    (tmp_path / "answers").write_text("Ada\n")
    with (tmp_path / "answers").open() as stdin:
        result = jaxrun(tmp_path, "-n", "2", "--stdin", "all", str(script(ASKS)), stdin=stdin)
    assert result.out.count("name? read Ada\n") == 2, result


SUMS = """
import hashlib, sys
import jax
if jax.process_index() != 1:
    data = sys.stdin.buffer.read()
    print("read", len(data), hashlib.md5(data).hexdigest())
"""


def test_all_ranks_read_all_of_a_pipe_and_one_that_has_finished_stops_nobody(tmp_path: Path, script) -> None:
    data = b"".join(b"%d\n" % number for number in range(500_000))
    (tmp_path / "data").write_bytes(data)
    with subprocess.Popen(["cat", tmp_path / "data"], stdout=subprocess.PIPE) as pipe:
        result = jaxrun(tmp_path, "-n", "3", "--stdin", "all", str(script(SUMS)), stdin=pipe.stdout)
    assert result.code == 0, result
    assert result.out.count(f"read {len(data)} {hashlib.md5(data).hexdigest()}\n") == 2, result


def test_all_ranks_read_what_is_typed_and_Ctrl_C_still_interrupts(tmp_path: Path, script) -> None:
    program = str(script('import jax\nprint("read", input())\nprint("at its end")\ninput()\n'))
    with TerminalSession(tmp_path, "-n", "2", "--no-run-dir", "--stdin", "all", program) as terminal:
        terminal.type("Ada\n")
        for _ in range(2):
            terminal.wait_for("at its end")
        terminal.type("\x03")
        assert terminal.end() == 130, terminal.text
    assert terminal.text.count("read Ada\n") == 2


def test_an_input_that_nobody_has_ends_the_program_with_a_sentence(tmp_path: Path, script) -> None:
    result = jaxrun(tmp_path, "-n", "1", "--stdin", "none", str(script("input()\n")))
    assert result.code == 1
    assert "EOFError: rank 0 has no standard input: no rank has jaxrun's" in result.err
    assert "standard_input.py" not in result.err
