"""Runs one marked test on a gang, and makes pytest's reports of it."""

from __future__ import annotations

import builtins
import contextlib
import os
import re
import shlex
import sys
import warnings
from typing import Any

import pytest
from msgspec.structs import replace

from jaxrun.errors import JaxrunError
from jaxrun.frontends.pytest_plugin import reports
from jaxrun.frontends.pytest_plugin.mark import MARK_NAME, MarkSpec, rank_nodeid
from jaxrun.frontends.pytest_plugin.rank_results import RunResult
from jaxrun.frontends.pytest_plugin.rank_sessions import RankSessions
from jaxrun.frontends.pytest_plugin.reports import ItemInfo, Report
from jaxrun.frontends.pytest_plugin.run_loop import RunLoop
from jaxrun.frontends.pytest_plugin.warm_gangs import WarmGangs
from jaxrun.protocol.pytest_messages import RecordedWarning, RunTest
from jaxrun.protocol.rank_or_child import is_rank
from jaxrun.spec.backends import LOCAL

_DIRECTORY_NAME_LENGTH = 30  # characters of a test's name in the name of its shared directory
_IN_A_JOB = (
    f"pytest runs as the program of a jaxrun job here, where each rank runs all tests; those marked {MARK_NAME} start "
    f"ranks of their own: run them with plain `pytest`, and leave them out here with -m 'not {MARK_NAME}'"
)


class Runner:
    """Runs the marked tests of a pytest session. `timeout`: seconds for a test that has none of its own."""

    def __init__(self, config: pytest.Config, tests: list[pytest.Item], timeout: float) -> None:
        self._config = config
        self._given: Any = config.option
        self._timeout = timeout
        self._gangs = WarmGangs(config, tests)

    def run(self, item: pytest.Item, spec: MarkSpec | str) -> list[Report]:
        """Run a test; returns the reports of its phases. `spec`: the parsed mark, or what is wrong with the mark."""
        info = ItemInfo(item.nodeid, item.location, tuple(item.keywords))
        if isinstance(spec, str):
            return reports.not_run_reports(info, spec)
        if is_rank(os.environ):
            return reports.not_run_reports(info, _IN_A_JOB)
        _cancel_pytest_timeout(item)
        key = self._gangs.key(item, spec)
        try:
            sessions = self._gangs.get_sessions(item, spec, key)
        except JaxrunError as error:
            return reports.not_run_reports(info, str(error))
        gang = f"{replace(spec.gang, devices=sessions.gang.devices)}, {self._given.gang_backend}"
        next_item = self._gangs.next_test(item, key)
        result = self._run_on(sessions, item, spec, next_item, key)
        if not result.reusable:
            self._gangs.discard_sessions(key)
        if next_item is None:
            self._gangs.release(key)
        return reports.build_reports(replace(info, dies=spec.dies, gang=gang, rerun=self._rerun(item)), result)

    def close(self) -> None:
        self._gangs.close()

    def _run_on(
        self, sessions: RankSessions, item: pytest.Item, spec: MarkSpec, next_item: pytest.Item | None, key: str
    ) -> RunResult:
        next_nodeid = rank_nodeid(next_item) if next_item is not None else ""
        order = RunTest(rank_nodeid(item), next_nodeid, self._shared_directory(item))
        timeout = spec.timeout or _pytest_timeout(item) or self._timeout
        terminal = DebuggerTerminal(self._config)
        run_loop = RunLoop(sessions, terminal, lambda warning: _record(item, warning), debug=bool(self._given.usepdb))
        try:
            return run_loop.run(order, timeout, self._given.gang_grace)
        except BaseException:  # above all KeyboardInterrupt
            self._gangs.discard_gang(key)
            raise

    def _shared_directory(self, item: pytest.Item) -> str:
        """A new directory for shared_tmp_path; empty if the test does not use that fixture."""
        if "shared_tmp_path" not in getattr(item, "fixturenames", ()):
            return ""
        name = re.sub(r"\W", "_", item.name)[:_DIRECTORY_NAME_LENGTH]
        factory: Any = self._config._tmp_path_factory  # type: ignore[attr-defined]
        return str(factory.mktemp(f"shared-{name}", numbered=True))

    def _rerun(self, item: pytest.Item) -> str:
        file, colons, rest = rank_nodeid(item).partition("::")
        # Relative to where pytest was started, as its command line takes it.
        nodeid = os.path.relpath(self._config.rootpath / file, self._config.invocation_params.dir) + colons + rest
        given = self._given
        backend = [f"--gang-backend={given.gang_backend}"] if given.gang_backend != LOCAL else []
        options = [f"--gang-options={shlex.join(given.gang_options)}"] if given.gang_options else []
        return shlex.join(["pytest", *backend, *options, nodeid])


class DebuggerTerminal:
    """The parent's terminal, for the debugger of one rank at a time, in one test.

    Once it is used, pytest captures nothing until the next test.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._capture: Any = config.pluginmanager.get_plugin("capturemanager")
        self._rank: int | None = None

    def show(self, rank: int, text: str) -> None:
        self._switch_to(rank)
        print(text, end="", flush=True)

    def read(self, rank: int) -> str:
        """A line that the user types; empty at the end of the input."""
        self._switch_to(rank)
        return sys.stdin.readline()

    def _switch_to(self, rank: int) -> None:
        if self._capture is not None:
            self._capture.suspend_global_capture(in_=True)
        if rank != self._rank:
            self._rank = rank
            print(f"\n>>> rank {rank} is in its debugger, and others may wait for it; c continues", flush=True)


def _record(item: pytest.Item, warning: RecordedWarning) -> None:
    """Hand a rank's warning to pytest's summary."""
    category, text = getattr(builtins, warning.category, None), warning.text
    if not (isinstance(category, type) and issubclass(category, Warning)):
        # A class of the user's may not be importable here, nor where the summary is made.
        category, text = UserWarning, f"{warning.category}: {text}"
    message = warnings.WarningMessage(category(text), category, warning.file, warning.line)
    where = {"when": warning.when, "nodeid": warning.test, "location": warning.location}
    item.ihook.pytest_warning_recorded.call_historic(kwargs={"warning_message": message, **where})


# ---- pytest-timeout


def _cancel_pytest_timeout(item: pytest.Item) -> None:
    """Stop pytest-timeout's clock for this test: it would interrupt the parent, or end it."""
    cancel: Any = getattr(item.config.hook, "pytest_timeout_cancel_timer", None)
    if cancel is not None:
        cancel(item=item)


def _pytest_timeout(item: pytest.Item) -> float | None:
    """Seconds for this test by pytest-timeout's mark or options."""
    if not item.config.pluginmanager.has_plugin("timeout"):
        return None
    mark = item.get_closest_marker("timeout")
    of_mark = (mark.args[0] if mark.args else mark.kwargs.get("timeout")) if mark is not None else None
    for value in (of_mark, item.config.getoption("timeout", None), item.config.getini("timeout")):
        with contextlib.suppress(TypeError, ValueError):
            return float(value or "none")
    return None
