"""The gangs of a pytest run: one for each GangKey, started when a test needs it, closed after its last test."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from jaxrun.frontends.gang.exceptions import GangStartError
from jaxrun.frontends.gang.gang import Gang
from jaxrun.frontends.pytest_plugin.mark import GangKey, MarkSpec, mark_spec
from jaxrun.frontends.pytest_plugin.options import OPTIONS
from jaxrun.frontends.pytest_plugin.session import GangSession, SessionError, session_settings, without_coverage

_STARTUP_TIMEOUT_S = 120.0  # for the ranks to import and collect the tests


@dataclass(slots=True)
class _PooledGang:
    """A gang, and the pytest session that runs in its ranks, if one does."""

    gang: Gang
    directory: Path
    session: GangSession | None = None
    sessions: int = 0


class GangPool:
    """The gangs for `tests`, which are run in this order."""

    def __init__(self, config: pytest.Config, tests: list[pytest.Item]) -> None:
        self._config = config
        self._options = config.stash[OPTIONS]
        self._gangs: dict[str, _PooledGang] = {}
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
        """The key of the gang for this test."""
        fresh = spec.fresh or self._options.fresh
        return f"{spec.gang.label} {test.nodeid}" if fresh else spec.gang.label

    def next_test(self, test: pytest.Item, key: str) -> pytest.Item | None:
        """The next test on the same gang."""
        tests, following = self._tests[key], self._index[test] + 1
        return tests[following] if following < len(tests) else None

    def get_session(self, test: pytest.Item, spec: MarkSpec, key: str) -> GangSession:
        """A session that is ready to run this test. Raises SessionError or GangError."""
        if key in self._start_errors:
            raise SessionError(f"as for an earlier test: {self._start_errors[key]}")
        try:
            pooled = self._gangs.get(key) or self._start_gang(spec.gang, key)
            if pooled.session is None:
                pooled.session = self._start_session(pooled, self._tests[key][self._index[test] :])
            return pooled.session
        except GangStartError as error:
            self._start_errors[key] = str(error)
            raise

    def _start_gang(self, wanted: GangKey, key: str) -> _PooledGang:
        """Start a gang and keep it under `key`. Raises GangError."""
        directory = self._base_directory() / f"gang-{wanted.processes}p"
        while directory.exists():
            directory = directory.with_name(f"{directory.name}x")
        directory.mkdir()
        with without_coverage():
            gang = Gang(
                wanted.processes,
                wanted.devices,
                hosts=wanted.hosts,
                env=dict(wanted.env),
                lockstep=wanted.lockstep,
                backend=self._options.backend,
                options=self._options.jaxrun_args,
                run_dir=directory / "run",
            )
        self._gangs[key] = _PooledGang(gang, directory)
        return self._gangs[key]

    def discard_session(self, key: str) -> None:
        """Stop a session that cannot run another test, and its ranks; the next test restarts the gang."""
        pooled = self._gangs[key]
        session, pooled.session = pooled.session, None
        if session is not None:
            session.abandon()

    def discard_gang(self, key: str) -> None:
        """Stop a gang without waiting for its ranks; there is no next test."""
        pooled = self._gangs.pop(key)
        if pooled.session is not None:
            pooled.session.abandon()
        pooled.gang.stop()

    def release(self, key: str) -> None:
        """Close a gang that no later test needs."""
        pooled = self._gangs.pop(key)
        try:
            problem = pooled.session.close() if pooled.session is not None else ""
            if problem:
                self._config.issue_config_time_warning(pytest.PytestWarning(problem), stacklevel=2)
        finally:
            pooled.gang.close()

    def close(self) -> None:
        """Close all gangs."""
        for key in tuple(self._gangs):
            self.release(key)

    def _base_directory(self) -> Path:
        """pytest's directory for temporary files."""
        factory: Any = self._config._tmp_path_factory  # type: ignore[attr-defined]
        return Path(factory.getbasetemp())

    def _start_session(self, pooled: _PooledGang, tests: list[pytest.Item]) -> GangSession:
        if not pooled.gang.healthy:
            with without_coverage():
                pooled.gang.restart()
        pooled.sessions += 1
        files = tuple(dict.fromkeys(str(test.path) for test in tests))
        # A random name: a rank that sees this directory shares the file system, and not merely a path of that name.
        directory = tempfile.mkdtemp(prefix=f"session-{pooled.sessions}-", dir=pooled.directory)
        settings = session_settings(self._config, files, directory, self._options.debug)
        return GangSession(pooled.gang, settings, _STARTUP_TIMEOUT_S)
