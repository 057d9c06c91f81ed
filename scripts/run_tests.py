"""What `scripts/test` runs: the checks, then the tests in each environment, then a summary of all.

The main environment is `.venv`; the further ones hold the oldest and the newest JAX that jaxrun supports,
and run the tests that depend on JAX. Nothing passes silently: the summary names an environment that this
machine cannot have, and a pytest that fails without a failed test (none found, an internal error) counts as
one failure.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
CHECKS = 5  # that scripts/check makes
JAX_TESTS = ("tests/unit", "tests/ranks", "tests/process")
CORPUS = "tests/ranks/test_lockstep.py"
OF_OTHERS = (  # what hardly depends on JAX, but on IPython or pytest
    "tests/process/test_notebook.py",
    "tests/process/test_notebook_kernel.py",
    "tests/process/test_pytest_plugin.py",
)
NOTES_SHOWN = 10  # per environment, so that the whole summary stays on one screen
NO_SUCH_PYTHON = 69  # how scripts/install ends then


@dataclass(frozen=True)
class Environment:
    """A virtual environment besides the main one; `jax` None means the newest that pip finds.

    tests:    which, as they depend on JAX
    without:  some of them that take long, and that others run
    """

    venv: str
    pythons: tuple[str, ...]
    jax: str | None
    tests: tuple[str, ...] = JAX_TESTS
    without: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"JAX {self.jax}" if self.jax else "newest JAX"

    @property
    def install(self) -> list[str]:
        """The command that makes it, or finds that there is nothing to do."""
        pins = [f"jax=={self.jax}", f"jaxlib=={self.jax}"] if self.jax else []
        return ["scripts/install", self.venv, "programs,test", " ".join(self.pythons), *pins]

    def is_like(self, python: str, jax: str) -> bool:
        """Whether an environment with this Python ("3.11") and this JAX makes it superfluous."""
        return python in self.pythons and self.jax in (None, jax)


@dataclass(frozen=True)
class Result:
    """The counts of one run; `notes` are what a reader needs besides, one line each."""

    name: str
    passed: int
    failed: int
    skipped: int = 0
    seconds: float = 0
    notes: tuple[str, ...] = ()


FURTHER = (
    Environment(".venv-jax08", ("3.11",), "0.8.0", without=(CORPUS, *OF_OTHERS)),
    Environment(".venv-jax010", ("3.11",), "0.10.2", tests=JAX_TESTS[:2], without=(CORPUS,)),
    Environment(".venv-jax-newest", ("3.13", "3.12", "3.14"), None),
)


def read_results(name: str, junit_xml: str, status: int, seconds: float) -> Result:
    """What pytest's report says ("" where it left none), and its exit status."""
    suites = list(ElementTree.fromstring(junit_xml).iter("testsuite")) if junit_xml else []
    tests, errors, failures, skipped = (
        sum(int(suite.attrib[key]) for suite in suites) for key in ("tests", "errors", "failures", "skipped")
    )
    notes = [
        " ".join(["failed:", *case.get("classname", "").split(), case.get("name", "")])
        for suite in suites
        for case in suite.iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    ]
    failed = errors + failures
    passed = max(0, tests - failed - skipped)
    if status and not failed:
        failed = 1
        notes.append("no tests were found" if status == 5 else f"pytest ended with status {status}")
    more = len(notes) - NOTES_SHOWN
    shown = (*notes[:NOTES_SHOWN], *([f"and {more} more, named above"] if more > 0 else []))
    return Result(name, passed, failed, skipped, seconds, shown)


def summarize(results: Sequence[Result], not_run: Sequence[str]) -> str:
    """The last lines: one per environment, what was not run, and the sum of all."""
    lines = ["", "-- summary"]
    width = max(len(result.name) for result in results)
    for r in results:
        counts = f"{r.passed:5} passed {r.failed:5} failed {r.skipped:5} skipped"
        lines += [f"{r.name:{width}}  {counts}  {r.seconds:5.0f} s", *(f"    {note}" for note in r.notes)]
    skipped = sum(r.skipped for r in results)
    total = f"{sum(r.passed for r in results)} passed, {sum(r.failed for r in results)} failed"
    return "\n".join([*lines, *not_run, total + (f", {skipped} skipped" if skipped else "")])


def run_checks() -> Result:
    print("-- checks", flush=True)
    start = time.monotonic()
    failed = min(CHECKS, subprocess.run(["scripts/check"], cwd=ROOT).returncode)
    return Result("ruff, mypy, shellcheck, hadolint", CHECKS - failed, failed, seconds=time.monotonic() - start)


def run_pytest(venv: str, arguments: Sequence[str]) -> Result:
    """Runs the tests with the Python of `venv`."""
    python = f"{venv}/bin/python"
    ask = "import platform, importlib.metadata as m; print(platform.python_version(), m.version('jax'))"
    found = subprocess.run([python, "-c", ask], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    python_version, jax_version = found.stdout.split()
    name = f"JAX {jax_version} on Python {python_version}"
    print(f"\n-- tests with {name} ({venv})", flush=True)
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch, "junit.xml")
        command = [python, "-m", "pytest", f"--junit-xml={report}", *arguments]
        status = subprocess.run(command, cwd=ROOT).returncode
        junit_xml = report.read_text() if report.exists() else ""
    return read_results(name, junit_xml, status, time.monotonic() - start)


def run_further(environment: Environment, arguments: Sequence[str]) -> Result | str:
    """Sets the environment up and runs its tests; without such a Python here, a line that says so."""
    installed = subprocess.run(environment.install, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    if installed.returncode == NO_SUCH_PYTHON:
        reason = installed.stderr.strip().removeprefix("scripts/install: ")
        return f"not run here: {environment.name}: {reason}"
    sys.stderr.write(installed.stderr)
    if installed.returncode:
        note = f"could not be set up: {shlex.join(environment.install)}"
        return Result(environment.name, 0, 1, notes=(note,))
    left_out = [f"--ignore={path}" for path in environment.without]
    return run_pytest(environment.venv, [*arguments, *environment.tests, *left_out])


def run_everything(main_options: Sequence[str], further_options: Sequence[str]) -> tuple[list[Result], list[str]]:
    """All results, and a line for each environment that has none."""
    mine = f"{sys.version_info.major}.{sys.version_info.minor}", version("jax")
    further = [environment for environment in FURTHER if not environment.is_like(*mine)]
    not_run = [f"not run again: {e.name}: that is the main environment" for e in FURTHER if e not in further]
    left_out = {e: [*(set(JAX_TESTS) - set(e.tests)), *e.without] for e in further}
    not_run += [f"not run with {e.name}: {', '.join(paths)}" for e, paths in left_out.items() if paths]
    engines = subprocess.Popen(["scripts/engines"], cwd=ROOT, start_new_session=True)
    ahead = [  # they wait for each other, and are up to date, or tell why not, when run_further asks again
        subprocess.Popen(
            ["nice", "-n", "19", *environment.install],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        for environment in further
    ]
    try:
        results = [run_checks()]
        engines.wait()
        results.append(run_pytest(".venv", main_options))
        for installation in ahead:
            installation.wait()
    finally:
        for installation in (engines, *ahead):
            if installation.poll() is None:
                os.killpg(installation.pid, signal.SIGTERM)
    for environment in further:
        outcome = run_further(environment, further_options)
        if isinstance(outcome, Result):
            results.append(outcome)
        else:
            not_run.append(outcome)
    return results, not_run


def main(arguments: Sequence[str], workers: str | None) -> int:
    """Runs what the arguments ask for (see scripts/test); 0 where nothing failed."""
    everything = not arguments or arguments[0] == "--all"
    options = arguments[1:] if everything else arguments
    main_options = ["--numprocesses", workers or "2", *options]
    if everything:
        results, not_run = run_everything(main_options, ["--numprocesses", workers or "2", *options])
    else:
        results = [run_pytest(".venv", main_options)]
        not_run = ["not run: the checks and the other environments (scripts/test without options runs all)"]
    print(summarize(results, not_run), flush=True)
    return int(any(result.failed for result in results))


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:], os.environ.get("JAXRUN_TEST_WORKERS")))
    except KeyboardInterrupt:
        print("interrupted: there is no summary", file=sys.stderr)
        sys.exit(130)
