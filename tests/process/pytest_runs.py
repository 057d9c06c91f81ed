"""Runs of pytest with the plugin, on the tests of pytest_cases/."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from harness import TIME_LIMIT, kill, wait_until

from jaxrun.node.agent.guard import find_marked

PYTEST_CASES = Path(__file__).parent / "pytest_cases"
INSTALLED = bool(entry_points(group="pytest11", name="jaxrun"))
_MARK = "PYTEST_CASES_RUN"


@dataclass(frozen=True)
class Case:
    """One test's result, as the JUnit report has it."""

    outcome: str
    message: str
    text: str
    seconds: float


@dataclass(frozen=True)
class Run:
    """A pytest that has ended."""

    code: int
    out: str
    cases: dict[str, Case]


def prepare(tmp_path: Path) -> None:
    """Put the files of pytest_cases/ there."""
    shutil.copytree(PYTEST_CASES, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "pytest.ini").touch()


@contextmanager
def started(
    tmp_path: Path, *words: str, launcher: Sequence[str] = (), with_hypothesis: bool = False, **popen: object
) -> Iterator[subprocess.Popen[str]]:
    """pytest in `tmp_path`, perhaps as the program of a `launcher`; none of its processes outlives the block."""
    prepare(tmp_path)
    mark = f"{_MARK}={uuid.uuid4().hex}"
    plugin = () if INSTALLED else ("-p", "jaxrun.frontends.pytest_plugin.plugin")
    if not with_hypothesis:
        plugin += ("-p", "no:hypothesispytest")  # in each process, its import takes longer than all the rest
    process = subprocess.Popen(
        [sys.executable, "-m", *launcher, "pytest", *plugin, "-p", "no:cacheprovider", "--junitxml=cases.xml", *words],
        cwd=tmp_path,
        env={**os.environ, _MARK: mark.partition("=")[2]},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        **{"stdin": subprocess.DEVNULL, **popen},  # type: ignore[call-overload]
    )
    try:
        yield process
        wait_until(lambda: not list(find_marked(mark)), "end of all processes")
    finally:
        kill(find_marked(mark))
        process.communicate()


def run(tmp_path: Path, *words: str, stdin: str = "", **more: Any) -> Run:
    with started(tmp_path, "--basetemp=temporary", *words, stdin=subprocess.PIPE, **more) as process:
        out, _ = process.communicate(stdin, timeout=TIME_LIMIT)
        return Run(process.returncode, out, _cases(tmp_path / "cases.xml"))


def _cases(path: Path) -> dict[str, Case]:
    found = {}
    for case in ElementTree.parse(path).iter("testcase"):
        children = {child.tag: child for child in case}
        outcome = next((tag for tag in ("error", "failure", "skipped") if tag in children), "passed")
        child = children.get(outcome)
        message, text = (child.get("message", ""), child.text or "") if child is not None else ("", "")
        found[case.get("name", "")] = Case(outcome, message, text, float(case.get("time", "0")))
    return found
