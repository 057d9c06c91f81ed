"""scripts/matrix: from a report of the tests to the table in the README."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "matrix"

REPORT = """\
<?xml version="1.0" encoding="utf-8"?>
<testsuites><testsuite name="pytest" tests="7">
<testcase classname="t" name="d"><properties>
  <property name="matrix" value="Slurm 22.05.8 | launched | Ctrl-C"/>
  <property name="order" value="test_x.py:0007"/></properties><skipped message="none"/></testcase>
<testcase classname="t" name="e"><properties>
  <property name="matrix" value="Slurm 22.05.8 | attached | Ctrl-C"/>
  <property name="order" value="test_x.py:0007"/></properties><error message="no"/></testcase>
<testcase classname="t" name="a"><properties>
  <property name="matrix" value="Open MPI 5.0.11 | launched | an exception"/>
  <property name="with" value="JAX 0.10.2 on Python 3.11.7"/></properties></testcase>
<testcase classname="t" name="b"><properties>
  <property name="matrix" value="Open MPI 5.0.11 | attached | an exception"/>
  <property name="with" value="JAX 0.10.2 on Python 3.11.7"/></properties><failure message="no"/></testcase>
<testcase classname="t" name="c"><properties>
  <property name="matrix" value="Slurm 22.05.8 | launched | an exception"/></properties></testcase>
<testcase classname="t" name="f"><properties><property name="seconds" value="1"/></properties></testcase>
<testcase classname="t" name="g"/>
</testsuite></testsuites>
"""
TABLE = """\
| event | Open MPI 5.0.11 | Slurm 22.05.8 |
| --- | --- | --- |
| an exception | ✓ / ✗ | ✓ /   |
| Ctrl-C |  | ? / ✗ |

Tried on three hosts, with JAX 0.10.2 on Python 3.11.7."""


@pytest.fixture(scope="module")
def matrix() -> ModuleType:
    loader = importlib.machinery.SourceFileLoader("matrix_script", str(SCRIPT))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[loader.name] = module  # dataclasses look it up
    writes, sys.dont_write_bytecode = sys.dont_write_bytecode, True  # or it would lie beside the script
    loader.exec_module(module)
    sys.dont_write_bytecode = writes
    return module


def test_events_are_rows_as_in_the_source_engines_columns_and_both_directions_share_a_cell(matrix: ModuleType) -> None:
    assert matrix.table(matrix.read(REPORT)).startswith(TABLE)


def test_of_several_tests_of_one_cell_the_worst_counts(matrix: ModuleType) -> None:
    trials = [matrix.Trial("E 1", "launched", "x", outcome) for outcome in (matrix.PASSED, matrix.FAILED)]
    assert "| x | ✗ /   |" in matrix.table(trials)
    assert "| x | ? /   |" in matrix.table([trials[0], matrix.Trial("E 1", "launched", "x", matrix.SKIPPED)])


def test_of_what_was_tried_again_the_later_report_counts(matrix: ModuleType) -> None:
    first = [matrix.Trial("E 1", "launched", row, matrix.FAILED) for row in ("x", "y")]
    again = [matrix.Trial("E 1", "launched", "x", matrix.PASSED)]
    assert "| x | ✓ /   |" in (made := matrix.table(matrix.latest(first, again))) and "| y | ✗ /   |" in made


@pytest.mark.parametrize(("report", "why"), [("<testsuites/>", "no test in it"), ("no XML", "no report of pytest's")])
def test_a_report_without_trials_is_refused(matrix: ModuleType, report: str, why: str) -> None:
    with pytest.raises(matrix.Unusable, match=why):
        matrix.read(report)


def test_the_table_takes_the_place_of_the_old_one(matrix: ModuleType) -> None:
    text = f"before\n{matrix.BEGIN}\nold\n{matrix.END}\nafter\n"
    once = matrix.insert(text, "new")
    assert once == f"before\n{matrix.BEGIN}\nnew\n{matrix.END}\nafter\n"
    assert matrix.insert(once, "new") == once


@pytest.mark.parametrize("text", ["", "<!-- matrix -->", "<!-- end of matrix --> <!-- matrix -->"])
def test_a_file_without_the_marks_is_left_as_it_is(matrix: ModuleType, text: str) -> None:
    with pytest.raises(matrix.Unusable, match="no line"):
        matrix.insert(text, "new")


def test_the_command_prints_writes_and_says_what_is_wrong(tmp_path: Path) -> None:
    report, readme = tmp_path / "report.xml", tmp_path / "README.md"
    report.write_text(REPORT)
    readme.write_text("<!-- matrix -->\n<!-- end of matrix -->\n")

    def run(*words: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, SCRIPT, *words], capture_output=True, text=True)

    assert run(report).stdout.startswith(TABLE)
    assert run(report, "--write", readme).returncode == 0 and TABLE in readme.read_text()
    none = tmp_path / "none.xml"
    missing = run(none)
    assert (missing.returncode, missing.stderr) == (
        1,
        f"scripts/matrix: {none}: No such file or directory\n",
    )
