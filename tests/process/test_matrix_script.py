"""scripts/matrix: from reports of the tests to the table of what was tried with which engine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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


def test_it_prints_the_table_replaces_the_old_one_and_reports_errors(tmp_path: Path) -> None:
    report, readme = tmp_path / "report.xml", tmp_path / "README.md"
    report.write_text(REPORT)
    readme.write_text("<!-- matrix -->\n<!-- end of matrix -->\n")

    def run(*words: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, SCRIPT, *words], capture_output=True, text=True)

    assert run(report).stdout.startswith(TABLE)
    for _ in range(2):  # the second time over the first
        assert run(report, "--write", readme).returncode == 0 and readme.read_text().count(TABLE) == 1
    # Of what was tried again, the later report counts.
    again = tmp_path / "again.xml"
    again.write_text(REPORT.replace('<failure message="no"/>', ""))
    assert "| an exception | ✓ / ✓ |" in run(report, again).stdout
    assert run(report, "--write", report).returncode == 1  # which has no marks
    none = tmp_path / "none.xml"
    missing = run(none)
    assert (missing.returncode, missing.stderr) == (1, f"scripts/matrix: {none}: No such file or directory\n")
