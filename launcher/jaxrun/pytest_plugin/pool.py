"""Which gangs there are: one for each shape, begun when a test needs it and ended after the last that does."""

from __future__ import annotations

import contextlib
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from jaxrun.api import Gang
from jaxrun.errors import JaxrunError
from jaxrun.gang.exceptions import GangStartError
from jaxrun.pytest_plugin import collected, coverage
from jaxrun.pytest_plugin.mark import MarkSpec
from jaxrun.pytest_plugin.options import PluginOptions
from jaxrun.pytest_plugin.session import GangSession, SessionError
from jaxrun.pytest_plugin.session_settings import session_settings

if TYPE_CHECKING:
    from jaxrun.pytest_plugin.mpi_session import MpiSession

_STARTUP_TIMEOUT_S = 120.0  # seconds for the ranks to import and collect
MPI_SESSION_KEY = "present"  # the key of the only gang, where its processes are there already


@dataclass(slots=True)
class _PooledGang:
    """A gang, with the session in its ranks if one is going on."""

    gang: Gang
    directory: Path
    session: GangSession | None = None
    sessions: int = 0


class GangPool:
    """The gangs of a run of pytest, for `tests` in their order. `present`: the processes that are there already."""

    def __init__(
        self, config: pytest.Config, options: PluginOptions, tests: list[pytest.Item], present: MpiSession | None = None
    ) -> None:
        self._config = config
        self._options = options
        self._present = present
        self._places: dict[str, _PooledGang] = {}
        self._hopeless: dict[str, str] = {}  # by key, why its gang does not start
        self._queues: dict[str, list[pytest.Item]] = {}
        self._turns: dict[pytest.Item, int] = {}
        for test in tests:
            wish = collected.mark_spec(test)
            if isinstance(wish, MarkSpec):
                queue = self._queues.setdefault(self.key(test, wish), [])
                self._turns[test] = len(queue)
                queue.append(test)

    def key(self, test: pytest.Item, wish: MarkSpec) -> str:
        """Tests that use the same gang have the same."""
        if self._present is not None:
            return MPI_SESSION_KEY
        fresh = wish.fresh or self._options.fresh
        return f"{wish.gang.label} {test.nodeid}" if fresh else wish.gang.label

    def next_test(self, test: pytest.Item, key: str) -> pytest.Item | None:
        """The next test that wants the same gang."""
        queue, turn = self._queues[key], self._turns[test] + 1
        return queue[turn] if turn < len(queue) else None

    def get_session(self, test: pytest.Item, wish: MarkSpec, key: str) -> GangSession:
        """The one that can run this test. SessionError, GangError."""
        if key in self._hopeless:
            raise SessionError(f"as for an earlier test: {self._hopeless[key]}")
        try:
            place = self._places.get(key) or self.start_gang(wish, key)
            if place.session is None:
                place.session = self._begin(place, self._queues[key][self._turns[test] :])
            return place.session
        except GangStartError as error:
            self._hopeless[key] = str(error)
            raise

    def start_gang(self, wish: MarkSpec, key: str) -> _PooledGang:
        shape = wish.gang
        directory = self.directory / f"gang-{shape.processes}p"
        while directory.exists():
            directory = directory.with_name(f"{directory.name}x")
        directory.mkdir()
        with coverage.without_coverage():
            if self._present is not None:
                gang = self._present.start_gang(directory / "run")
            else:
                gang = Gang(
                    shape.processes,
                    shape.devices,
                    hosts=shape.hosts,
                    env=dict(shape.env),
                    lockstep=shape.lockstep,
                    backend=self._options.backend,
                    options=self._options.jaxrun_args,
                    run_dir=directory / "run",
                )
        self._places[key] = _PooledGang(gang, directory)
        return self._places[key]

    def discard_session(self, key: str) -> None:
        """The session is of no use any more; nor are the ranks, which the next test finds replaced."""
        place = self._places[key]
        session, place.session = place.session, None
        if session is not None:
            session.abandon()
        if self._present is not None:
            with coverage.without_coverage(), contextlib.suppress(JaxrunError):  # the next test will say it
                place.gang.restart()  # now, as the others wait for it

    def discard_gang(self, key: str) -> None:
        """The same where there will be no next test."""
        place = self._places.pop(key)
        if place.session is not None:
            place.session.abandon()
        place.gang.stop()

    def release(self, key: str) -> None:
        """No test wants this gang any more. Processes that were there already stay: srun may stop us after they end."""
        if self._present is None:
            self.end_gang(key)

    def end_gang(self, key: str) -> None:
        """Let it leave."""
        place = self._places.pop(key)
        try:
            trouble = place.session.close() if place.session is not None else ""
            if trouble:
                self._config.issue_config_time_warning(pytest.PytestWarning(trouble), stacklevel=2)
        finally:
            place.gang.close()

    def close(self) -> None:
        """End all gangs, whatever they do."""
        for key in tuple(self._places):
            self.end_gang(key)

    @property
    def directory(self) -> Path:
        """Under which pytest keeps what is temporary."""
        factory: Any = self._config._tmp_path_factory  # type: ignore[attr-defined]
        return Path(factory.getbasetemp())

    def _begin(self, place: _PooledGang, tests: list[pytest.Item]) -> GangSession:
        if not place.gang.healthy:
            with coverage.without_coverage():
                place.gang.restart()
        place.sessions += 1
        files = tuple(dict.fromkeys(str(test.path) for test in tests))
        # Of a name that no other host has by chance, by which ranks know whether they share this file system.
        directory = tempfile.mkdtemp(prefix=f"session-{place.sessions}-", dir=place.directory)
        return GangSession(
            place.gang, session_settings(self._config, files, directory, self._options.debug), _STARTUP_TIMEOUT_S
        )
