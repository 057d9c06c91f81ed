"""Which ranks read jaxrun's standard input, and what input() says on the others."""

from __future__ import annotations

from pathlib import Path

from harness import jaxrun

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


def test_an_input_that_nobody_has_ends_the_program_with_a_sentence(tmp_path: Path, script) -> None:
    result = jaxrun(tmp_path, "-n", "1", "--stdin", "none", str(script("input()\n")))
    assert result.code == 1
    assert "EOFError: rank 0 has no standard input: no rank has jaxrun's" in result.err
    assert "standard_input.py" not in result.err
