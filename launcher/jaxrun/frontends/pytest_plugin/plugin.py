"""pytest's hooks for tests on several JAX processes, and the options of the command line and the ini file.

Every pytest session loads this module, so what only marked tests need is imported when the first of them runs.
In the session of a rank, only the marks and the fixtures are used.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from jaxrun.errors import UsageError
from jaxrun.frontends.pytest_plugin import mark
from jaxrun.frontends.pytest_plugin.fixtures import (  # noqa: F401 (pytest finds fixtures in this module's namespace)
    find_rank_plugin,
    gang,
    gangs,
    process_count,
    process_index,
    shared_tmp_path,
)
from jaxrun.protocol.rank_or_child import is_rank
from jaxrun.spec.backends import BACKENDS, LOCAL

_GROUP_HELP = """\
tests on several JAX processes (jaxrun), @pytest.mark.processes(4):
  the body runs on every rank, with the fixtures gang (gang.rank, gang.barrier(), ...) and shared_tmp_path; one result;
  the processes stay warm between tests. More: pytest --markers, pytest --fixtures"""
MARKER = f"""\
{mark.MARK_USAGE}: run the body of the test on n JAX processes; the test has one result. processes([2, 4]) runs it \
on 2 and on 4. devices: of each process; hosts: simulated hosts, or real ones with --gang-backend; timeout: in \
seconds; fresh: start new processes; env: variables to set; dies: ranks that the test expects to die; lockstep: \
'strict' stops before a cross-process call that differs, 'fail' ends all ranks after one, 'off' does not compare \
the calls."""
_MARK = f"mark.{mark.MARK_NAME}".encode()  # in the text of a module with marked tests
_FORK_SERVER = pytest.StashKey[Any]()
_RUNNER = pytest.StashKey[Any]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("gang", _GROUP_HELP)
    group.addoption(
        "--gang-backend", choices=tuple(BACKENDS), default=LOCAL, help="what starts the processes (%(default)s)"
    )
    group.addoption(
        "--gang-options",
        action="extend",
        type=_split_words,
        default=[],
        metavar="WORDS",
        help="more words for jaxrun's command line: --gang-options='-H h1:2,h2:2'; may be given again",
    )
    group.addoption("--no-gang", action="store_true", help="run these tests in this process, as the only one")
    group.addoption("--gang-timeout", type=float, metavar="SECONDS", help="for each test (ini: gang_timeout; 300)")
    group.addoption(
        "--gang-grace",
        type=float,
        default=1.5,
        metavar="SECONDS",
        help="how long the others have after one has failed, before they are called stuck (%(default)s)",
    )
    parser.addini("gang_timeout", "seconds that a test on several processes may take", default="300")


def _split_words(words: str) -> list[str]:
    try:
        return shlex.split(words)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{words}: {error}") from None


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", MARKER)
    read_timeout(config)


def read_timeout(config: pytest.Config) -> float:
    """Seconds for each test, by the command line or the ini file. Raises pytest.UsageError for what is no time."""
    given = config.getoption("gang_timeout")
    if given is None:
        written = config.getini("gang_timeout")
        try:
            given = float(written)
        except ValueError:
            raise pytest.UsageError(f"gang_timeout = {written!r} is not a number of seconds") from None
    if not given > 0:  # as nan
        raise pytest.UsageError(f"--gang-timeout {given:g}: must be above 0 seconds")
    return float(given)


# ---- collection


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> None:
    """Start the fork server of the gangs, which imports jax while pytest imports the module."""
    config = parent.config
    elsewhere = hasattr(config, "workerinput") or find_rank_plugin(config) is not None or is_rank(os.environ)
    if not (elsewhere or config.option.no_gang or config.option.collectonly):
        with contextlib.suppress(OSError):  # pytest or the first gang reports it
            if _MARK in module_path.read_bytes():
                from jaxrun.frontends.pytest_plugin.file_imports import imports_of_tests
                from jaxrun.frontends.pytest_plugin.rank_sessions import without_coverage
                from jaxrun.node.forkserver.launcher_pool import pool_for

                if _FORK_SERVER not in config.stash:
                    with without_coverage():
                        config.stash[_FORK_SERVER] = pool_for(os.environ, with_jax=True)
                config.stash[_FORK_SERVER].preload(
                    imports_of_tests(module_path, config.rootpath), str(module_path.parent)
                )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    found = metafunc.definition.get_closest_marker(mark.MARK_NAME)
    if found is None or not mark.is_parametrized(found.args, found.kwargs):
        return
    try:
        counts = mark.parse_counts(found.args, found.kwargs)
    except UsageError as error:
        pytest.fail(str(error), pytrace=False)
    if mark.PARAMETER not in metafunc.fixturenames:
        metafunc.fixturenames.append(mark.PARAMETER)
    metafunc.parametrize(mark.PARAMETER, counts, ids=[f"{n}p" for n in counts], indirect=True)


@pytest.hookimpl(tryfirst=True)
def pytest_itemcollected(item: pytest.Item) -> None:
    mark.read_mark(item)
    spec = mark.mark_spec(item)
    # pytest_collection_modifyitems would be too late for pytest-xdist.
    if isinstance(spec, mark.MarkSpec) and item.config.pluginmanager.has_plugin("xdist"):
        item.add_marker(pytest.mark.xdist_group(f"gang-{spec.gang.label}"))


# ---- running


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    spec = mark.mark_spec(item)
    # pytest itself handles an unconditional skip. The conditions of a skipif may differ on the ranks.
    skipped = item.get_closest_marker("skip") is not None
    if spec is None or skipped or item.config.option.no_gang or find_rank_plugin(item.config) is not None:
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for data in _get_runner(item.session).run(item, spec):
        report = item.config.hook.pytest_report_from_serializable(config=item.config, data=data)
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    # Fixtures of earlier unmarked tests were kept in this process for the next test, which does not use them here.
    item.session._setupstate.teardown_exact(nextitem)
    return True


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtestloop(session: pytest.Session) -> Generator[None, object, object]:
    # The innermost wrapper, because pytest-cov's combines the ranks' data when its own inner part has ended.
    try:
        return (yield)
    finally:
        runner = session.config.stash.get(_RUNNER, None)
        if runner is not None:
            runner.close()


def _get_runner(session: pytest.Session) -> Any:
    """The session's runner, made when it is first needed."""
    from jaxrun.frontends.pytest_plugin.runner import Runner

    stash = session.config.stash
    if _RUNNER not in stash:
        stash[_RUNNER] = Runner(session.config, session.items, read_timeout(session.config))
    return stash[_RUNNER]
