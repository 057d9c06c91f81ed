"""The pytest sessions in the ranks of one gang, and what makes them like the parent's: options, plugins, coverage."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from random import SystemRandom
from typing import Any

import pytest

from jaxrun.analysis.diagnosis.job_stacks import JobStacks
from jaxrun.errors import JaxrunError, UsageError
from jaxrun.frontends.gang.call_events import Disconnected, LauncherOutput, RankMessage, Returned
from jaxrun.frontends.gang.gang import Gang, mark_broken
from jaxrun.job_events.actions import RecordDivergence
from jaxrun.protocol.names import RUNTIME
from jaxrun.protocol.payload import FunctionReference
from jaxrun.protocol.pytest_messages import SessionReady, SessionSettings
from jaxrun.records.rundir.recorded_files import read_job_events
from jaxrun.text import format_ranks, format_seconds

_STARTUP_TIMEOUT_S = 120.0  # for the ranks to import and collect the tests
_SHUTDOWN_TIMEOUT_S = 10.0  # for the ranks' sessions to tear down their fixtures and to save coverage
_SESSION = FunctionReference(f"{RUNTIME}.pytest.rank_session", "run_session")
_TEST_FILES = "file_or_dir"
# What belongs to the run as a whole, which each rank would otherwise do once more: choice and order of tests, reports,
# measuring coverage (in which the ranks take part by SessionSettings.coverage), distribution over processes.
_PARENT_ONLY: Mapping[str, Any] = {
    "plugins": [],
    "keyword": "",
    "markexpr": "",
    "deselect": None,
    "maxfail": 0,
    "lf": False,
    "failedfirst": False,
    "newfirst": False,
    "stepwise": False,
    "stepwise_skip": False,
    "cacheclear": False,
    "continue_on_collection_errors": True,
    "setupshow": False,
    "usepdb": False,
    "usepdb_cls": (f"{RUNTIME}.pytest.rank_gang", "RelayedPdb"),
    "trace": False,
    "xmlpath": None,
    "pastebin": None,
    "log_file": os.devnull,
    "cov_source": [],
    "numprocesses": None,
    "dist": "no",
    "tx": [],
    "looponfail": False,
}
# With these, coverage starts itself in the children of a process that it measures.
_COVERAGE_VARIABLES = ("COVERAGE_PROCESS_CONFIG", "COVERAGE_PROCESS_START")


class SessionError(JaxrunError):
    """The ranks' pytest sessions could not be started."""


class RankSessions:
    """The pytest sessions in the ranks of `gang`, started when this is made. Raises SessionError or GangError.

    `close` waits until the sessions have ended; `abandon` kills the ranks.
    """

    def __init__(self, gang: Gang, settings: SessionSettings) -> None:
        self.gang = gang
        self.hosts = {worker.rank: worker.host for worker in gang.workers}
        self._captured: dict[int, tuple[str, str]] = {}  # by rank, the files of its stdout and stderr
        self._known_divergences = 0
        self.new_divergences()
        self.call = gang.start_call(_SESSION, settings)
        try:
            self._wait_until_ready()
        except BaseException:
            self.abandon()
            raise

    def stacks(self) -> JobStacks | None:
        """Return where all ranks are; None if they could not be asked."""
        with contextlib.suppress(JaxrunError):
            return self.gang.rank_stacks()
        return None

    def new_divergences(self) -> list[str]:
        """Return how the ranks fell out of step, for each time that the launcher found it since the last call."""
        texts: list[str] = []
        with contextlib.suppress(UsageError):
            messages = [event.message for event in read_job_events(self.gang.run_dir)]
            texts = [message.text for message in messages if isinstance(message, RecordDivergence)]
        known, self._known_divergences = self._known_divergences, len(texts)
        return texts[known:]

    def read_captured(self, rank: int) -> dict[str, str]:
        """Return the rank's output that pytest has captured since its last report, by stream; empty if unreadable."""
        found = {}
        for stream, name in zip(("out", "err"), self._captured.get(rank, ()), strict=False):
            with contextlib.suppress(OSError):
                if text := Path(name).read_text(errors="replace"):
                    found[stream] = text
        return found

    def close(self) -> str:
        """End the sessions. Returns what went wrong, empty if nothing did."""
        with self.call as call:
            call.send(None)
            deadline = time.monotonic() + _SHUTDOWN_TIMEOUT_S
            while call.running and time.monotonic() < deadline:
                call.receive(deadline - time.monotonic())
        if call.running or call.disconnected:
            return f"{format_ranks({*call.running, *call.disconnected})} did not end as asked"
        errors = [*map(session_error, call.outcomes.values()), *self.new_divergences()]
        return next(filter(None, errors), "")

    def abandon(self) -> None:
        """Kill the ranks, whatever they do."""
        # The launcher's report of the kill would only mislead.
        with contextlib.redirect_stderr(io.StringIO()), self.call as call:
            if call.running:
                mark_broken(self.gang, f"{format_ranks(call.running)} did not come to the end of a test")
                # One death ends all ranks. An interrupt would not reach a rank that waits for another one.
                self.gang.kill(call.running[0])
                while call.running and call.receive(_SHUTDOWN_TIMEOUT_S) is not None:
                    pass

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + _STARTUP_TIMEOUT_S
        waiting = set(self.call.running)
        while waiting:
            match self.call.receive(deadline - time.monotonic()):
                case RankMessage(rank, SessionReady(captured)):
                    waiting.discard(rank)
                    if captured is not None:
                        self._captured[rank] = captured
                case Returned(rank) as returned:
                    raise SessionError(f"on rank {rank} pytest did not start:\n{why_session_ended(returned)}")
                case Disconnected():
                    raise SessionError(f"while pytest started, a rank ended:\n{self.call.explain_death()}")
                case LauncherOutput() as output:
                    self.call.show(output)
                case None:
                    missing = f"{format_ranks(waiting)} in {format_seconds(_STARTUP_TIMEOUT_S)}"
                    raise SessionError(f"pytest did not start on {missing}:\n{self.gang.stacks()}")


def session_error(returned: Returned) -> str:
    """The error with which a rank's session has ended; empty if it ended well."""
    if returned.error is not None:
        return returned.error.traceback or f"{returned.error.error}: {returned.error.message}"
    _, internal_error, _ = returned.value()
    return str(internal_error)


def why_session_ended(returned: Returned) -> str:
    """Return why a rank's session has ended before the parent ended it."""
    if error := session_error(returned):
        return error
    _, _, interruption = returned.value()
    return f"its pytest session was ended by {interruption}" if interruption else "its pytest session has ended"


# ---- the settings


def session_settings(config: pytest.Config, files: Sequence[str], directory: str) -> SessionSettings:
    """Settings for the ranks of one gang, whose tests are in `files`. `directory`: for temporary files."""
    return SessionSettings(
        files=tuple(files),
        root=str(config.rootpath),
        ini=str(config.inipath or ""),
        plugins=tuple(config.option.plugins or ()),
        options=_pickle_options(vars(config.option)),
        path=tuple(sys.path),
        directory=directory,
        debug=bool(config.option.usepdb),
        coverage=_coverage_config(),
        environ=_coverage_variables(),
    )


@contextlib.contextmanager
def without_coverage() -> Iterator[None]:
    """Start processes without coverage within this block: a launcher must not be measured."""
    hidden = _coverage_variables()
    for name in hidden:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(hidden)


def _coverage_variables() -> Mapping[str, str]:
    return {name: os.environ[name] for name in _COVERAGE_VARIABLES if name in os.environ}


def _coverage_config() -> str:
    """The configuration with which coverage measures this process, as text; empty if it does not."""
    coverage = sys.modules.get("coverage")
    running = coverage.Coverage.current() if coverage is not None else None
    serialize = getattr(getattr(running, "config", None), "serialize", None)
    return str(serialize()) if serialize is not None else ""


def _pickle_options(options: Mapping[str, Any]) -> dict[str, bytes]:
    """pytest's options for the ranks, each pickled on its own; those that cannot be pickled are left out."""
    import cloudpickle

    wanted = {name: _PARENT_ONLY.get(name, value) for name, value in options.items() if name != _TEST_FILES}
    if "hypothesis" in sys.modules and wanted.get("hypothesis_seed", 0) is None:
        wanted["hypothesis_seed"] = SystemRandom().getrandbits(32)  # all ranks must see the same examples
    pickled = {}
    for name, value in wanted.items():
        try:
            pickled[name] = cloudpickle.dumps(value)
        except Exception:
            continue
    return pickled
