"""The gangs of a pytest run: one for each GangKey, started when a test needs it, closed after its last test."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct

from jaxrun.frontends.gang.gang import Gang
from jaxrun.frontends.gang.gang_errors import GangStartError
from jaxrun.frontends.pytest_plugin.mark import GangKey, MarkSpec, mark_spec
from jaxrun.frontends.pytest_plugin.rank_sessions import (
    RankSessions,
    SessionError,
    session_settings,
    without_coverage,
)


class _WarmGang(Struct):
    """A gang, and the pytest sessions that run in its ranks, if they do."""

    gang: Gang
    directory: Path
    sessions: RankSessions | None = None


class WarmGangs:
    """The gangs for `tests`, which are run in this order."""

    def __init__(self, config: pytest.Config, tests: list[pytest.Item]) -> None:
        self._config = config
        self._given: Any = config.option
        self._gangs: dict[str, _WarmGang] = {}
        self._start_errors: dict[str, str] = {}  # by key
        self._tests: dict[str, list[pytest.Item]] = {}  # by key
        self._index: dict[pytest.Item, int] = {}  # of each test, in the list of its key
        for test in tests:
            spec = mark_spec(test)
            if isinstance(spec, MarkSpec):
                same_gang = self._tests.setdefault(self.key(test, spec), [])
                self._index[test] = len(same_gang)
                same_gang.append(test)

    def key(self, test: pytest.Item, spec: MarkSpec) -> str:
        return f"{spec.gang.label} {test.nodeid}" if spec.fresh else spec.gang.label

    def next_test(self, test: pytest.Item, key: str) -> pytest.Item | None:
        """The next test on the same gang."""
        tests, following = self._tests[key], self._index[test] + 1
        return tests[following] if following < len(tests) else None

    def get_sessions(self, test: pytest.Item, spec: MarkSpec, key: str) -> RankSessions:
        """Sessions that are ready to run this test. Raises SessionError or GangError."""
        if key in self._start_errors:
            raise SessionError(f"as for an earlier test: {self._start_errors[key]}")
        try:
            warm = self._gangs.get(key) or self._start_gang(spec.gang, key)
            if warm.sessions is None:
                warm.sessions = self._start_sessions(warm, self._tests[key][self._index[test] :])
            return warm.sessions
        except GangStartError as error:
            self._start_errors[key] = str(error)
            raise

    def discard_sessions(self, key: str) -> None:
        """Stop sessions that cannot run another test, and their ranks; the next test restarts the gang."""
        warm = self._gangs[key]
        sessions, warm.sessions = warm.sessions, None
        if sessions is not None:
            sessions.abandon()

    def discard_gang(self, key: str) -> None:
        """Stop a gang without waiting for its ranks; there is no next test."""
        self.discard_sessions(key)
        self._gangs.pop(key).gang.stop()

    def release(self, key: str) -> None:
        """Close a gang that no later test needs."""
        warm = self._gangs.pop(key)
        try:
            problem = warm.sessions.close() if warm.sessions is not None else ""
            if problem:
                self._config.issue_config_time_warning(pytest.PytestWarning(problem), stacklevel=2)
        finally:
            warm.gang.close()

    def close(self) -> None:
        for key in tuple(self._gangs):
            self.release(key)

    def _start_gang(self, wanted: GangKey, key: str) -> _WarmGang:
        """Start a gang and keep it under `key`. Raises GangError."""
        factory: Any = self._config._tmp_path_factory  # type: ignore[attr-defined]
        directory = factory.mktemp(f"gang-{wanted.processes}p", numbered=True)
        with without_coverage():
            gang = Gang(
                wanted.processes,
                wanted.devices,
                hosts=wanted.hosts,
                env=dict(wanted.env),
                lockstep=wanted.lockstep,
                backend=self._given.gang_backend,
                options=self._given.gang_options,
                run_dir=directory / "run",
            )
        self._gangs[key] = _WarmGang(gang, directory)
        return self._gangs[key]

    def _start_sessions(self, warm: _WarmGang, tests: list[pytest.Item]) -> RankSessions:
        if not warm.gang.healthy:
            with without_coverage():
                warm.gang.restart()
        files = tuple(dict.fromkeys(str(test.path) for test in tests))
        # A random name: a rank that sees this directory shares the file system, and not merely a path of that name.
        directory = tempfile.mkdtemp(prefix="session-", dir=warm.directory)
        settings = session_settings(self._config, files, directory)
        return RankSessions(warm.gang, settings)
