"""Which gangs there are: one for each shape, begun when a test needs it and ended after the last that does."""

from __future__ import annotations

import contextlib
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from jaxrun.errors import JaxrunError
from jaxrun.functions import Gang
from jaxrun.gang.remote import GangStartError
from jaxrun.pytest_plugin import covering, items
from jaxrun.pytest_plugin.likeness import settings
from jaxrun.pytest_plugin.mark import Wish
from jaxrun.pytest_plugin.options import Options
from jaxrun.pytest_plugin.session import Session, SessionError

if TYPE_CHECKING:
    from jaxrun.pytest_plugin.present import Present

_START = 120.0  # seconds for the ranks to import and collect
PRESENT = "present"  # the key of the only gang, where its processes are there already


@dataclass(slots=True)
class _Place:
    """A gang, with the session in its ranks if one is going on."""

    gang: Gang
    directory: Path
    session: Session | None = None
    sessions: int = 0


class Pool:
    """The gangs of a run of pytest, for `tests` in their order. `present`: the processes that are there already."""

    def __init__(
        self, config: pytest.Config, options: Options, tests: list[pytest.Item], present: Present | None = None
    ) -> None:
        self._config = config
        self._options = options
        self._present = present
        self._places: dict[str, _Place] = {}
        self._hopeless: dict[str, str] = {}  # by key, why its gang does not start
        self._queues: dict[str, list[pytest.Item]] = {}
        self._turns: dict[pytest.Item, int] = {}
        for test in tests:
            wish = items.wish(test)
            if isinstance(wish, Wish):
                queue = self._queues.setdefault(self.key(test, wish), [])
                self._turns[test] = len(queue)
                queue.append(test)

    def key(self, test: pytest.Item, wish: Wish) -> str:
        """Tests that use the same gang have the same."""
        if self._present is not None:
            return PRESENT
        fresh = wish.fresh or self._options.fresh
        return f"{wish.shape.key} {test.nodeid}" if fresh else wish.shape.key

    def after(self, test: pytest.Item, key: str) -> pytest.Item | None:
        """The next test that wants the same gang."""
        queue, turn = self._queues[key], self._turns[test] + 1
        return queue[turn] if turn < len(queue) else None

    def session(self, test: pytest.Item, wish: Wish, key: str) -> Session:
        """The one that can run this test. SessionError, GangError."""
        if key in self._hopeless:
            raise SessionError(f"as for an earlier test: {self._hopeless[key]}")
        try:
            place = self._places.get(key) or self.start(wish, key)
            if place.session is None:
                place.session = self._begin(place, self._queues[key][self._turns[test] :])
            return place.session
        except GangStartError as error:
            self._hopeless[key] = str(error)
            raise

    def start(self, wish: Wish, key: str) -> _Place:
        shape = wish.shape
        directory = self.directory / f"gang-{shape.processes}p"
        while directory.exists():
            directory = directory.with_name(f"{directory.name}x")
        directory.mkdir()
        with covering.unmeasured():
            if self._present is not None:
                gang = self._present.gang(directory / "run")
            else:
                gang = Gang(
                    shape.processes,
                    shape.devices,
                    hosts=shape.hosts,
                    env=dict(shape.env),
                    lockstep=shape.lockstep,
                    backend=self._options.backend,
                    options=self._options.more,
                    run_dir=directory / "run",
                )
        self._places[key] = _Place(gang, directory)
        return self._places[key]

    def abandon(self, key: str) -> None:
        """The session is of no use any more; nor are the ranks, which the next test finds replaced."""
        place = self._places[key]
        session, place.session = place.session, None
        if session is not None:
            session.abandon()
        if self._present is not None:
            with covering.unmeasured(), contextlib.suppress(JaxrunError):  # the next test will say it
                place.gang.restart()  # now, as the others wait for it

    def give_up(self, key: str) -> None:
        """The same where there will be no next test."""
        place = self._places.pop(key)
        if place.session is not None:
            place.session.abandon()
        place.gang.stop()

    def release(self, key: str) -> None:
        """No test wants this gang any more. Processes that were there already stay: srun may stop us after they end."""
        if self._present is None:
            self.end(key)

    def end(self, key: str) -> None:
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
            self.end(key)

    @property
    def directory(self) -> Path:
        """Under which pytest keeps what is temporary."""
        factory: Any = self._config._tmp_path_factory  # type: ignore[attr-defined]
        return Path(factory.getbasetemp())

    def _begin(self, place: _Place, tests: list[pytest.Item]) -> Session:
        if not place.gang.healthy:
            with covering.unmeasured():
                place.gang.restart()
        place.sessions += 1
        files = tuple(dict.fromkeys(str(test.path) for test in tests))
        # Of a name that no other host has by chance, by which ranks know whether they share this file system.
        directory = tempfile.mkdtemp(prefix=f"session-{place.sessions}-", dir=place.directory)
        return Session(place.gang, settings(self._config, files, directory, self._options.debug), _START)
