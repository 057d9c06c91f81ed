"""Runs one test on the gang that it asks for, and makes pytest's reports of it."""

from __future__ import annotations

import os
import re
import shlex
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from jaxrun.errors import JaxrunError
from jaxrun.protocol.pytest_messages import RunTest
from jaxrun.pytest_plugin import collected, reports, time_limit
from jaxrun.pytest_plugin.debugger import DebuggerTerminal
from jaxrun.pytest_plugin.mark import MarkSpec
from jaxrun.pytest_plugin.options import PluginOptions
from jaxrun.pytest_plugin.pool import MPI_SESSION_KEY, GangPool
from jaxrun.pytest_plugin.reports import ItemInfo, Report
from jaxrun.pytest_plugin.run_loop import RunLoop, RunResult
from jaxrun.pytest_plugin.session import GangSession
from jaxrun.pytest_plugin.summary import ReportContext
from jaxrun.pytest_plugin.warning_records import warning_recorder

_NAME = 30  # characters of a test's name in that of a directory


class Runner:
    """`started_by`: what starts the processes; `command`: its words, where it has started this one, too."""

    def __init__(
        self, config: pytest.Config, options: PluginOptions, pool: GangPool, started_by: str, command: Sequence[str]
    ) -> None:
        self._config = config
        self._options = options
        self._pool = pool
        self._started_by = started_by
        self._command = command
        self._terminal = DebuggerTerminal(config)

    def run(self, item: pytest.Item, wish: MarkSpec | str) -> list[Report]:
        """The reports of its phases. `wish`: what it asks for, or what is wrong with that."""
        test = ItemInfo(item.nodeid, item.location, tuple(item.keywords), self._options.show_all)
        if isinstance(wish, str):
            return _not_run(reports.failed_report(test, wish, time.time()), test)
        most, processes = self._options.max_processes, wish.gang.processes
        if most is not None and processes > most:
            reason = f"Skipped: needs {processes} processes, and --gang-max is {most}"
            return _not_run(reports.skipped_report(test, reason, time.time()), test)
        time_limit.cancel_pytest_timeout(item)
        key = self._pool.key(item, wish)
        try:
            session = self._pool.get_session(item, wish, key)
        except JaxrunError as error:
            return _not_run(reports.failed_report(test, str(error), time.time()), test)
        following = self._pool.next_test(item, key)
        began = time.time()
        ended = self._conduct(item, wish, session, following, key)
        scene = self._scene(item, wish, session, ended)
        if not ended.reusable:
            self._pool.discard_session(key)
        if following is None:
            self._pool.release(key)
        return reports.build_reports(test, ended.results, wish.dies, scene, (began, time.time()))

    def start(self, wish: MarkSpec) -> None:
        """Start the gang of the processes that are there, before a test needs it. JaxrunError."""
        self._pool.start_gang(wish, MPI_SESSION_KEY)

    def close(self) -> None:
        self._pool.close()

    def _conduct(
        self, item: pytest.Item, wish: MarkSpec, session: GangSession, following: pytest.Item | None, key: str
    ) -> RunResult:
        then = collected.rank_nodeid(following) if following is not None else ""
        order = RunTest(collected.rank_nodeid(item), then, self._shared(item))
        conduct = RunLoop(session, self._terminal, warning_recorder(item), self._options.debug)
        try:
            return conduct.run(order, time_limit.timeout_of(item, wish, self._options.timeout), self._options.grace)
        except BaseException:  # a Ctrl-C, above all
            self._pool.discard_gang(key)
            raise

    def _shared(self, item: pytest.Item) -> str:
        if "shared_tmp_path" not in getattr(item, "fixturenames", ()):
            return ""
        name = re.sub(r"\W", "_", item.name)[:_NAME]
        factory: Any = self._config._tmp_path_factory  # type: ignore[attr-defined]
        return str(factory.mktemp(f"shared-{name}", numbered=True))

    def _scene(self, item: pytest.Item, wish: MarkSpec, session: GangSession, ended: RunResult) -> ReportContext:
        shape = replace(wish.gang, devices=session.gang.devices)
        words = [*self._command, "pytest", *self._options.rerun_args(), self._from_here(collected.rank_nodeid(item))]
        heading = f"{shape}, {self._started_by}"
        return ReportContext(
            heading, session.hosts, ended.divergence, tuple(ended.notes), shlex.join(words), ended.timeout
        )

    def _from_here(self, nodeid: str) -> str:
        """The node id relative to where pytest was started, as its command line takes it."""
        file, colons, rest = nodeid.partition("::")
        return os.path.relpath(self._config.rootpath / file, self._config.invocation_params.dir) + colons + rest


def _not_run(report: Report, test: ItemInfo) -> list[Report]:
    return [report, reports.passed_report(test, "teardown", report["stop"])]
