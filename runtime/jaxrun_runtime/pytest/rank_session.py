"""The pytest session in a rank of a gang: collects the same files as the parent, then runs the tests that it names.

The session reports each phase when it ends. Fixtures are kept between tests, as in any session.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import warnings
from collections.abc import Generator, Iterable, Iterator, Mapping
from typing import Any

import pytest

from jaxrun.protocol.debugger_messages import DebuggerDecision
from jaxrun.protocol.names import RANK_PLUGIN
from jaxrun.protocol.pytest_messages import (
    PEER_LOST,
    DebuggerQuestion,
    PhaseReport,
    RecordedWarning,
    RunFinished,
    RunTest,
    SessionReady,
    SessionSettings,
)
from jaxrun_runtime.gang import calls
from jaxrun_runtime.gang.calls import CallEnded, CallerConnection
from jaxrun_runtime.lockstep import call_recorder
from jaxrun_runtime.pytest.rank_gang import PeerLostError, RankGang, post_mortem

_ERROR_LENGTH = 500  # characters of a failure that are shown above its debugger
_REMOVED_PLUGINS = ("terminal", "faulthandler")  # they report to a terminal, or replace our handlers of fatal signals
# These plugins would rerun a test on one rank only, or end a rank that takes too long; the parent does both. They are
# removed only after they are configured, because their marks must be known.
_MARKS_ONLY_PLUGINS = ("rerunfailures", "timeout")


def run_session(settings: SessionSettings) -> tuple[int, str, str]:
    """Run tests until the parent ends the call.

    Returns pytest's exit status, its internal error, and the KeyboardInterrupt or pytest.exit() that ended it, both as
    text; "" if there was none.
    """
    parent = calls.current_call()
    sys.path[:] = settings.path
    with _measure_coverage(settings.coverage, settings.environ):
        shares_files = os.path.isdir(settings.directory)
        config = _configure(settings, parent, shares_files)
        plugin = RankPlugin(config, parent, settings, shares_files)
        config.pluginmanager.register(plugin, RANK_PLUGIN)
        status = config.hook.pytest_cmdline_main(config=config)
    return int(status or 0), plugin.internal_error, plugin.interruption


def _configure(settings: SessionSettings, parent: CallerConnection, shares_files: bool) -> pytest.Config:
    """Return pytest's configuration with those of the parent's options that do not concern the whole run."""
    arguments = [word for plugin in settings.plugins for word in ("-p", plugin)]
    arguments += ["--rootdir", settings.root, *(["-c", settings.ini] if settings.ini else []), *settings.files]
    options: dict[str, Any] = {}
    for name, pickled in settings.options.items():
        with contextlib.suppress(Exception):  # a class that only the parent can import
            options[name] = pickle.loads(pickled)
    # Without a shared directory, pytest makes its own directory, and removes it later.
    options["basetemp"] = os.path.join(settings.directory, f"rank-{parent.rank}") if shares_files else None
    config = pytest.Config.fromdictargs(options, arguments)
    _remove_plugins(config, _REMOVED_PLUGINS)
    # pytest-xdist's convention: it tells plugins that another process reports.
    rank = {"workerid": f"rank{parent.rank}", "workercount": parent.size, "testrunuid": settings.directory}
    config.workerinput = {**rank, "mainargv": ["pytest"]}  # type: ignore[attr-defined]
    config.workeroutput = {}  # type: ignore[attr-defined]
    return config


def _remove_plugins(config: pytest.Config, plugins: Iterable[str]) -> None:
    for plugin in filter(None, map(config.pluginmanager.get_plugin, plugins)):
        config.pluginmanager.unregister(plugin)


class RankPlugin:
    """Runs the tests that the parent names, and sends it their reports, warnings and failures.

    gang:            the value of the fixture `gang`
    shared:          the running test's directory for shared_tmp_path
    shares_files:    whether this rank sees the parent's temporary files
    internal_error:  pytest's internal error, as text; empty if there was none
    interruption:    the KeyboardInterrupt or pytest.exit() that ended the session, as text; empty if there was none
    """

    def __init__(
        self, config: pytest.Config, parent: CallerConnection, settings: SessionSettings, shares_files: bool
    ) -> None:
        self.gang = RankGang(parent)
        self.shared = ""
        self.shares_files = shares_files
        self.internal_error = ""
        self.interruption = ""
        self._config = config
        self._parent = parent
        self._settings = settings
        self._items: dict[str, pytest.Item] = {}
        self._collection_errors: list[str] = []

    # ---- collection

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        _remove_plugins(config, _MARKS_ONLY_PLUGINS)

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        self._items.setdefault(item.nodeid, item)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._collection_errors.append(f"{report.nodeid}:\n{report.longreprtext}")

    # ---- tests

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        captured = os.path.join(self._settings.directory, f"captured-{self._parent.rank}")
        files = _redirect_capture(self._config.pluginmanager, captured) if self.shares_files else None
        self._parent.send(SessionReady(files))
        with contextlib.suppress(CallEnded):
            while (order := self._parent.receive()) is not None:
                self._run(order)
        return True

    def _run(self, order: RunTest) -> None:
        item = self._items.get(order.test)
        self.shared = order.shared
        self.gang.begin_test()
        if item is None:
            self._report(self._not_collected(order.test))
        else:
            self._config.hook.pytest_runtest_protocol(item=item, nextitem=self._items.get(order.next_test))
        self._parent.send(RunFinished(call_recorder.call_counts(), call_recorder.call_chains()))

    def _not_collected(self, test: str) -> pytest.TestReport:
        file = test.partition("::")[0]
        of_file = [text for text in self._collection_errors if text.startswith(file)]
        text = "\n".join(of_file or self._collection_errors) or (
            f"{test} was collected in the process that runs pytest, but not on rank {self._parent.rank}; do its "
            "parameters depend on devices, time or chance?"
        )
        return pytest.TestReport(test, (file, None, test), {}, "failed", text, "setup")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        # This may not be the test that next_test named: with -x, or if another worker of pytest-xdist took that test.
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
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._parent.send(PhaseReport(data))

    # ---- errors and warnings

    def pytest_exception_interact(self, call: pytest.CallInfo[Any], report: pytest.TestReport) -> None:
        if not self._settings.debug or call.excinfo is None or not isinstance(report, pytest.TestReport):
            return
        self._parent.send(DebuggerQuestion(call.excinfo.exconly()[:_ERROR_LENGTH]))
        answer = self._parent.receive()
        if isinstance(answer, DebuggerDecision) and answer.granted:
            post_mortem(call.excinfo.value)

    def pytest_warning_recorded(
        self,
        warning_message: warnings.WarningMessage,
        when: str,
        nodeid: str,
        location: tuple[str, int, str] | None,
    ) -> None:
        category, text = warning_message.category.__name__, str(warning_message.message)
        file, line = warning_message.filename, warning_message.lineno
        self._parent.send(RecordedWarning(category, text, file, line, when, nodeid, location))

    def pytest_internalerror(self, excrepr: Any) -> bool:
        self.internal_error = str(excrepr)
        return True  # pytest does not print it

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        error = excinfo.value
        self.interruption = (
            f"pytest.exit({error.msg!r})" if isinstance(error, pytest.exit.Exception) else excinfo.exconly()
        )


def _redirect_capture(plugins: Any, path: str) -> tuple[str, str] | None:
    """Make pytest capture this rank's output in named files, which the parent can read after the rank has died.

    Returns the names of the files for stdout and stderr; None if pytest does not capture file descriptors.
    """
    capture: Any = getattr(plugins.get_plugin("capturemanager"), "_global_capturing", None)
    try:
        fds = [stream.tmpfile.fileno() for stream in (capture.out, capture.err)]
    except (AttributeError, OSError):
        return None
    names = f"{path}.out", f"{path}.err"
    for name, fd in zip(names, fds, strict=True):
        named = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        os.dup2(named, fd, inheritable=False)
        os.close(named)
    return names


@contextlib.contextmanager
def _measure_coverage(config: str, environ: Mapping[str, str]) -> Iterator[None]:
    """Measure coverage as the parent does, and save it before the session reports its end to the parent.

    config:   coverage's configuration, from CoverageConfig.serialize; empty: do not measure
    environ:  variables that make processes of tests measure coverage, too
    """
    os.environ.update(environ)
    if not config:
        yield
        return
    import coverage

    measurement = coverage.Coverage(config_file=f":data:{config}", data_suffix=True)
    measurement.start()
    try:
        yield
    finally:
        measurement.stop()
        measurement.save()
