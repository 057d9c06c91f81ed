"""pytest's hooks for tests on several JAX processes.

Every pytest session loads this module, so what only marked tests need is imported when the first of them runs.
In the session of a rank, only the marks and the fixtures are used.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from jaxrun.errors import UsageError
from jaxrun.frontends.pytest_plugin import mark, options
from jaxrun.frontends.pytest_plugin.fixtures import (  # noqa: F401 (pytest finds fixtures in this module's namespace)
    find_rank_plugin,
    gang,
    gangs,
    process_count,
    process_index,
    shared_tmp_path,
)
from jaxrun.frontends.pytest_plugin.options import OPTIONS
from jaxrun.protocol.names import RANK

_MARKER = f"""\
{mark.MARK_USAGE}: run the test by n JAX processes; its body runs on every rank, and it has one result. processes([2, \
4]) runs it with 2 and with 4. devices: of each process; hosts: simulated, or real ones with --gang-backend; timeout: \
in seconds; fresh: with new processes; env: variables; dies: ranks whose death belongs to the test; lockstep: \
'strict' to agree on each cross-process call first, 'off' not to watch whether the ranks stay in step."""
_MARK = f"mark.{mark.MARK_NAME}".encode()  # in the text of a module with marked tests
_FORK_SERVER = pytest.StashKey[Any]()
_RUNNER = pytest.StashKey[Any]()


def pytest_addoption(parser: pytest.Parser) -> None:
    options.add_options(parser)


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", _MARKER)
    config.stash[OPTIONS] = options.read_options(config)


# ---- collection


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> None:
    """Start the fork server of the gangs, which imports jax while pytest imports the module."""
    config = parent.config
    elsewhere = hasattr(config, "workerinput") or find_rank_plugin(config) is not None or RANK in os.environ
    if not (elsewhere or config.stash[OPTIONS].disabled or config.option.collectonly or _FORK_SERVER in config.stash):
        with contextlib.suppress(OSError):  # pytest or the first gang reports it
            if _MARK in module_path.read_bytes():
                from jaxrun.frontends.pytest_plugin.session import without_coverage
                from jaxrun.node.forkserver.launcher_pool import pool_for

                with without_coverage():
                    config.stash[_FORK_SERVER] = pool_for(os.environ, with_jax=True)


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
    if spec is None or skipped or item.config.stash[OPTIONS].disabled or find_rank_plugin(item.config) is not None:
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
        stash[_RUNNER] = Runner(session.config, session.items)
    return stash[_RUNNER]
