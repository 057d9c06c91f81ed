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

from jaxrun.contract.testing import RunTest
from jaxrun.errors import JaxrunError
from jaxrun.pytest_plugin import items, limits, reports
from jaxrun.pytest_plugin.conduct import Conduct, Ended
from jaxrun.pytest_plugin.debugging import Terminal
from jaxrun.pytest_plugin.mark import Wish
from jaxrun.pytest_plugin.options import Options
from jaxrun.pytest_plugin.pool import PRESENT, Pool
from jaxrun.pytest_plugin.reports import Report, Test
from jaxrun.pytest_plugin.session import Session
from jaxrun.pytest_plugin.table import Scene
from jaxrun.pytest_plugin.warned import recorder

_NAME = 30  # characters of a test's name in that of a directory


class Runner:
    """`started_by`: what starts the processes; `command`: its words, where it has started this one, too."""

    def __init__(
        self, config: pytest.Config, options: Options, pool: Pool, started_by: str, command: Sequence[str]
    ) -> None:
        self._config = config
        self._options = options
        self._pool = pool
        self._started_by = started_by
        self._command = command
        self._terminal = Terminal(config)

    def run(self, item: pytest.Item, wish: Wish | str) -> list[Report]:
        """The reports of its phases. `wish`: what it asks for, or what is wrong with that."""
        test = Test(item.nodeid, item.location, tuple(item.keywords), self._options.everything)
        if isinstance(wish, str):
            return _not_run(reports.failed(test, wish, time.time()), test)
        most, processes = self._options.most, wish.shape.processes
        if most is not None and processes > most:
            reason = f"Skipped: needs {processes} processes, and --gang-max is {most}"
            return _not_run(reports.skipped(test, reason, time.time()), test)
        limits.relieve_pytest_timeout(item)
        key = self._pool.key(item, wish)
        try:
            session = self._pool.session(item, wish, key)
        except JaxrunError as error:
            return _not_run(reports.failed(test, str(error), time.time()), test)
        following = self._pool.after(item, key)
        began = time.time()
        ended = self._conduct(item, wish, session, following, key)
        scene = self._scene(item, wish, session, ended)
        if not ended.whole:
            self._pool.abandon(key)
        if following is None:
            self._pool.release(key)
        return reports.tell(test, ended.parts, wish.dies, scene, (began, time.time()))

    def start(self, wish: Wish) -> None:
        """Start the gang of the processes that are there, before a test needs it. JaxrunError."""
        self._pool.start(wish, PRESENT)

    def close(self) -> None:
        self._pool.close()

    def _conduct(
        self, item: pytest.Item, wish: Wish, session: Session, following: pytest.Item | None, key: str
    ) -> Ended:
        then = items.nodeid(following) if following is not None else ""
        order = RunTest(items.nodeid(item), then, self._shared(item))
        conduct = Conduct(session, self._terminal, recorder(item), self._options.debug)
        try:
            return conduct.run(order, limits.seconds(item, wish, self._options.timeout), self._options.grace)
        except BaseException:  # a Ctrl-C, above all
            self._pool.give_up(key)
            raise

    def _shared(self, item: pytest.Item) -> str:
        if "shared_tmp_path" not in getattr(item, "fixturenames", ()):
            return ""
        name = re.sub(r"\W", "_", item.name)[:_NAME]
        factory: Any = self._config._tmp_path_factory  # type: ignore[attr-defined]
        return str(factory.mktemp(f"shared-{name}", numbered=True))

    def _scene(self, item: pytest.Item, wish: Wish, session: Session, ended: Ended) -> Scene:
        shape = replace(wish.shape, devices=session.gang.devices)
        words = [*self._command, "pytest", *self._options.words(), self._from_here(items.nodeid(item))]
        heading = f"{shape}, {self._started_by}"
        return Scene(heading, session.hosts, ended.apart, tuple(ended.notes), shlex.join(words), ended.limit)

    def _from_here(self, nodeid: str) -> str:
        """The node id relative to where pytest was started, as its command line takes it."""
        file, colons, rest = nodeid.partition("::")
        return os.path.relpath(self._config.rootpath / file, self._config.invocation_params.dir) + colons + rest


def _not_run(report: Report, test: Test) -> list[Report]:
    return [report, reports.nothing(test, "teardown", report["stop"])]
