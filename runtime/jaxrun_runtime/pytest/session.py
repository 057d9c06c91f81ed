"""The pytest session in a rank of a gang: collects like the parent's, then runs the tests that it is told to.

It reports every phase as it ends, and keeps its fixtures between tests as one session does.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import warnings
from collections.abc import Generator, Iterable
from typing import Any

import pytest

from jaxrun.protocol.pytest_messages import (
    PEER_LOST,
    RANK_PLUGIN,
    DebugDecision,
    DebugRequest,
    PhaseReport,
    RecordedWarning,
    RunFinished,
    RunTest,
    SessionReady,
    SessionSettings,
)
from jaxrun_runtime import gang_worker
from jaxrun_runtime.gang_worker import CallEnded, ParentConnection
from jaxrun_runtime.lockstep import call_recorder
from jaxrun_runtime.pytest.capture import redirect_capture
from jaxrun_runtime.pytest.coverage import measure_coverage
from jaxrun_runtime.pytest.debugger import post_mortem
from jaxrun_runtime.pytest.gang import PeerLostError, RankGang

_ERROR_LENGTH = 500  # characters
# What would report to a terminal, or take our handlers of fatal signals.
_REMOVED_PLUGINS = ("terminal", "faulthandler")
# What would run a test again on one rank only, or end a rank that takes too long, which the parent does; their marks
# must be known all the same.
_MARKS_ONLY_PLUGINS = ("rerunfailures", "timeout")


def session(settings: SessionSettings) -> tuple[int, str]:
    """Run tests until the parent ends the conversation; pytest's exit status, and its internal error."""
    talk = gang_worker.current_call()
    sys.path[:] = settings.path
    with measure_coverage(settings.coverage, settings.environ):
        shares_files = os.path.isdir(settings.directory)
        config = _configure(settings, talk, shares_files)
        plugin = RankPlugin(talk, settings, shares_files)
        config.pluginmanager.register(plugin, RANK_PLUGIN)
        status = config.hook.pytest_cmdline_main(config=config)
    return int(status or 0), plugin.internal_error


def _configure(settings: SessionSettings, talk: ParentConnection, shares_files: bool) -> pytest.Config:
    """A session's configuration with the parent's options, less what belongs to the whole run."""
    arguments = [word for plugin in settings.plugins for word in ("-p", plugin)]
    arguments += ["--rootdir", settings.root, *(["-c", settings.ini] if settings.ini else []), *settings.files]
    options: dict[str, Any] = {}
    for name, pickled in settings.options.items():
        with contextlib.suppress(Exception):  # its class may be importable in the parent only
            options[name] = pickle.loads(pickled)
    _keep_from_rewriting("jaxrun", "jaxrun_runtime")
    # Elsewhere pytest finds a place of its own, which it tidies up.
    options["basetemp"] = os.path.join(settings.directory, f"rank-{talk.rank}") if shares_files else None
    config = pytest.Config.fromdictargs(options, arguments)
    _remove_plugins(config, _REMOVED_PLUGINS)
    # By this plugins know, since pytest-xdist, that somebody else reports.
    rank = {"workerid": f"rank{talk.rank}", "workercount": talk.size, "testrunuid": settings.directory}
    config.workerinput = {**rank, "mainargv": ["pytest"]}  # type: ignore[attr-defined]
    config.workeroutput = {}  # type: ignore[attr-defined]
    return config


def _keep_from_rewriting(*packages: str) -> None:
    """pytest rewrites the assertions of what is installed with a plugin, and warns of what was imported before it."""
    for package in packages:
        module = sys.modules[package]
        module.__doc__ = f"{module.__doc__}\nPYTEST_DONT_REWRITE"


def _remove_plugins(config: pytest.Config, plugins: Iterable[str]) -> None:
    for plugin in filter(None, map(config.pluginmanager.get_plugin, plugins)):
        config.pluginmanager.unregister(plugin)


class RankPlugin:
    """What pytest tells us, and we the parent.

    trouble:       an internal error of pytest's, as text
    shares_files:  whether the parent's temporary files are seen here
    """

    def __init__(self, talk: ParentConnection, settings: SessionSettings, shares_files: bool) -> None:
        self.internal_error = ""
        self.shares_files = shares_files
        self.gang = RankGang(talk)
        self.shared = ""
        self._talk = talk
        self._settings = settings
        self._items: dict[str, pytest.Item] = {}
        self._broken: list[str] = []
        self._config: Any = None

    # ---- collection

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        self._config = config
        _remove_plugins(config, _MARKS_ONLY_PLUGINS)

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        self._items.setdefault(item.nodeid, item)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._broken.append(f"{report.nodeid}:\n{report.longreprtext}")

    # ---- tests

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        captured = os.path.join(self._settings.directory, f"captured-{self._talk.rank}")
        self._talk.send(
            SessionReady(redirect_capture(self._config.pluginmanager, captured) if self.shares_files else None)
        )
        with contextlib.suppress(CallEnded):
            while (order := self._talk.receive()) is not None:
                self._run(order)
        return True

    def _run(self, order: RunTest) -> None:
        item = self._items.get(order.test)
        self.shared = order.shared
        if item is None:
            self._report(self._not_collected(order.test))
        else:
            self._config.hook.pytest_runtest_protocol(item=item, nextitem=self._items.get(order.next_test))
        self._talk.send(RunFinished(call_recorder.call_counts(), call_recorder.call_chains()))

    def _not_collected(self, test: str) -> pytest.TestReport:
        file = test.partition("::")[0]
        own = [text for text in self._broken if text.startswith(file)] or self._broken
        text = "\n".join(own) or (
            f"{test} was not collected on rank {self._talk.rank}, but in the process that pytest was started in; "
            "do its parameters depend on devices, time or chance?"
        )
        return pytest.TestReport(test, (file, None, test), {}, "failed", text, "setup")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        # Another test may come than was foretold: with -x, or if another worker of pytest-xdist took that one.
        item.session._setupstate.teardown_exact(item)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        error = call.excinfo.value if call.excinfo else None
        if report.failed and isinstance(error, PeerLostError):
            setattr(report, PEER_LOST, str(error))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._report(report)

    def _report(self, report: pytest.TestReport) -> None:
        self._talk.send(
            PhaseReport(self._config.hook.pytest_report_to_serializable(config=self._config, report=report))
        )

    # ---- trouble

    def pytest_exception_interact(self, call: pytest.CallInfo[Any], report: pytest.TestReport) -> None:
        if self._settings.debug is None or call.excinfo is None or not isinstance(report, pytest.TestReport):
            return
        self._talk.send(DebugRequest(call.excinfo.exconly()[:_ERROR_LENGTH]))
        answer = self._talk.receive()
        if isinstance(answer, DebugDecision) and answer.yes:
            post_mortem(call.excinfo.value)

    def pytest_warning_recorded(
        self,
        warning_message: warnings.WarningMessage,
        when: str,
        nodeid: str,
        location: tuple[str, int, str] | None,
    ) -> None:
        said = warning_message
        self._talk.send(
            RecordedWarning(
                said.category.__name__, str(said.message), said.filename, said.lineno, when, nodeid, location
            )
        )

    def pytest_internalerror(self, excrepr: Any) -> bool:
        self.internal_error = str(excrepr)
        return True  # pytest need not print it
