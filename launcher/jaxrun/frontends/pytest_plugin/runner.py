"""Runs one marked test on a gang, and makes pytest's reports of it."""

from __future__ import annotations

import builtins
import contextlib
import os
import re
import shlex
import time
import warnings
from dataclasses import replace
from typing import Any

import pytest

from jaxrun.errors import JaxrunError
from jaxrun.frontends.pytest_plugin import reports
from jaxrun.frontends.pytest_plugin.mark import MARK_NAME, MarkSpec, rank_nodeid
from jaxrun.frontends.pytest_plugin.options import OPTIONS
from jaxrun.frontends.pytest_plugin.outcome import ReportContext
from jaxrun.frontends.pytest_plugin.pool import GangPool
from jaxrun.frontends.pytest_plugin.reports import ItemInfo, Report
from jaxrun.frontends.pytest_plugin.run_loop import DebuggerTerminal, RunLoop, RunResult
from jaxrun.frontends.pytest_plugin.session import GangSession
from jaxrun.protocol.names import RANK
from jaxrun.protocol.pytest_messages import RecordedWarning, RunTest

_DIRECTORY_NAME_LENGTH = 30  # characters of a test's name in the name of its shared directory
_IN_A_JOB = (
    f"pytest runs as the program of a jaxrun job here, where each rank runs all tests; those marked {MARK_NAME} start "
    f"ranks of their own: run them with plain `pytest`, and leave them out here with -m 'not {MARK_NAME}'"
)


class Runner:
    """Runs the marked tests of a pytest session."""

    def __init__(self, config: pytest.Config, tests: list[pytest.Item]) -> None:
        self._config = config
        self._options = config.stash[OPTIONS]
        self._pool = GangPool(config, tests)
        self._terminal = DebuggerTerminal(config)

    def run(self, item: pytest.Item, spec: MarkSpec | str) -> list[Report]:
        """Run a test; returns the reports of its phases. `spec`: the parsed mark, or what is wrong with the mark."""
        info = ItemInfo(item.nodeid, item.location, tuple(item.keywords), self._options.show_all)
        if isinstance(spec, str):
            return reports.not_run_reports(info, spec)
        if RANK in os.environ:
            return reports.not_run_reports(info, _IN_A_JOB)
        _cancel_pytest_timeout(item)
        key = self._pool.key(item, spec)
        try:
            session = self._pool.get_session(item, spec, key)
        except JaxrunError as error:
            return reports.not_run_reports(info, str(error))
        next_item = self._pool.next_test(item, key)
        began = time.time()
        result = self._run_on(session, item, spec, next_item, key)
        context = self._report_context(item, spec, session, result)
        if not result.reusable:
            self._pool.discard_session(key)
        if next_item is None:
            self._pool.release(key)
        return reports.build_reports(info, result.ranks, spec.dies, context, (began, time.time()))

    def close(self) -> None:
        self._pool.close()

    def _run_on(
        self, session: GangSession, item: pytest.Item, spec: MarkSpec, next_item: pytest.Item | None, key: str
    ) -> RunResult:
        next_nodeid = rank_nodeid(next_item) if next_item is not None else ""
        order = RunTest(rank_nodeid(item), next_nodeid, self._shared_directory(item))
        timeout = spec.timeout or _pytest_timeout(item) or self._options.timeout
        run_loop = RunLoop(session, self._terminal, lambda warning: _record(item, warning), self._options.debug)
        try:
            return run_loop.run(order, timeout, self._options.grace)
        except BaseException:  # above all KeyboardInterrupt
            self._pool.discard_gang(key)
            raise

    def _shared_directory(self, item: pytest.Item) -> str:
        """A new directory for shared_tmp_path; empty if the test does not use that fixture."""
        if "shared_tmp_path" not in getattr(item, "fixturenames", ()):
            return ""
        name = re.sub(r"\W", "_", item.name)[:_DIRECTORY_NAME_LENGTH]
        factory: Any = self._config._tmp_path_factory  # type: ignore[attr-defined]
        return str(factory.mktemp(f"shared-{name}", numbered=True))

    def _report_context(
        self, item: pytest.Item, spec: MarkSpec, session: GangSession, result: RunResult
    ) -> ReportContext:
        gang = replace(spec.gang, devices=session.gang.devices)
        file, colons, rest = rank_nodeid(item).partition("::")
        # Relative to where pytest was started, as its command line takes it.
        nodeid = os.path.relpath(self._config.rootpath / file, self._config.invocation_params.dir) + colons + rest
        rerun = shlex.join(["pytest", *self._options.rerun_args(), nodeid])
        heading = f"{gang}, {self._options.backend}"
        return ReportContext(heading, session.hosts, result.divergence, tuple(result.notes), rerun, result.timeout)


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
