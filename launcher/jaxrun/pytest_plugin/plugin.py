"""pytest's hooks and fixtures for tests on several JAX processes.

Every session loads this module, so what only such tests need is imported when the first of them is run. In a rank's own
session only the marks and the fixtures are of use.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from jaxrun.errors import UsageError
from jaxrun.pytest_plugin import collected, options
from jaxrun.pytest_plugin.mark import MARK_NAME, MARK_USAGE, MarkSpec, is_parametrized, parse_counts
from jaxrun.pytest_plugin.mpi_detection import find_mpi_place

if TYPE_CHECKING:
    from jaxrun.api import Gang

_RANK_PLUGIN = "jaxrun-rank"
_MARK = f"""\
{MARK_USAGE}: run the test by n JAX processes; its body runs on every rank, and it has one result. processes([2, 4]) \
runs it with 2 and with 4. devices: of each process; hosts: simulated, or real ones with --gang-backend; timeout: in \
seconds; fresh: with new processes; env: variables; dies: ranks whose death belongs to the test; lockstep: 'strict' \
to agree on each cross-process call first, 'off' not to watch whether the ranks stay in step."""
_options = pytest.StashKey[options.PluginOptions]()
_runner = pytest.StashKey[Any]()
_present = pytest.StashKey[Any]()


def pytest_addoption(parser: pytest.Parser) -> None:
    options.add_options(parser)


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", _MARK)
    config.stash[_options] = options.read_options(config)
    chosen = config.stash[_options].disabled or config.getoption("gang_backend")
    place = None if chosen or hasattr(config, "workerinput") else find_mpi_place(os.environ)
    if place is not None:
        from jaxrun.pytest_plugin.mpi_session import MpiSession

        config.stash[_present] = MpiSession(config, place, config.stash[_options].jaxrun_args)


# ---- collection


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    mark = metafunc.definition.get_closest_marker(MARK_NAME)
    if mark is None or not is_parametrized(mark.args, mark.kwargs):
        return
    try:
        counts = parse_counts(mark.args, mark.kwargs)
    except UsageError as error:
        pytest.fail(str(error), pytrace=False)
    if collected.PARAMETER not in metafunc.fixturenames:
        metafunc.fixturenames.append(collected.PARAMETER)
    metafunc.parametrize(collected.PARAMETER, counts, ids=[f"{n}p" for n in counts], indirect=True)


@pytest.hookimpl(tryfirst=True)
def pytest_itemcollected(item: pytest.Item) -> None:
    collected.read_mark(item)
    wish = collected.mark_spec(item)
    # In pytest_collection_modifyitems it would come too late for pytest-xdist.
    if isinstance(wish, MarkSpec) and item.config.pluginmanager.has_plugin("xdist"):
        item.add_marker(pytest.mark.xdist_group(f"gang-{wish.gang.label}"))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if _present in config.stash:
        config.hook.pytest_deselected(items=config.stash[_present].select(collected))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    left_out = config.stash[_present].summary() if _present in config.stash else ""
    if left_out:
        terminalreporter.write_line(f"jaxrun: {left_out}")


# ---- running


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    wish = collected.mark_spec(item)
    if wish is None or _is_rank(item.config) or item.config.stash[_options].disabled or _is_skipped(item):
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in _get_runner(item.session).run(item, wish):
        found = item.config.hook.pytest_report_from_serializable(config=item.config, data=report)
        item.ihook.pytest_runtest_logreport(report=found)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    # What was set up here for earlier tests, and kept for this one, which has no use for it.
    item.session._setupstate.teardown_exact(nextitem)
    return True


def _is_skipped(item: pytest.Item) -> bool:
    """Whether pytest will skip it without a look at any condition, which may be another on the ranks."""
    return item.get_closest_marker("skip") is not None


def _is_rank(config: pytest.Config) -> bool:
    return config.pluginmanager.has_plugin(_RANK_PLUGIN)


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtestloop(session: pytest.Session) -> Generator[None, object, object]:
    # Here, within all other wrappers, since pytest-cov combines what was measured after the loop.
    if _present in session.config.stash:
        _begin_among_others(session)
    try:
        return (yield)
    finally:
        runner = session.config.stash.get(_runner, None)
        if runner is not None:
            runner.close()


def _begin_among_others(session: pytest.Session) -> None:
    present = session.config.stash[_present]
    broken = session.testsfailed and not session.config.option.continue_on_collection_errors
    wanted = [wish for wish in map(collected.mark_spec, session.items) if isinstance(wish, MarkSpec)]
    if broken or session.config.option.collectonly or not wanted:
        present.go_on()
    elif present.place.rank:
        present.be_worker(session.config)
    else:
        _get_runner(session, present).start(wanted[0])  # the others wait for it already


def _get_runner(session: pytest.Session, present: Any = None) -> Any:
    from jaxrun.pytest_plugin.pool import GangPool
    from jaxrun.pytest_plugin.runner import Runner

    stash = session.config.stash
    if _runner not in stash:
        pool = GangPool(session.config, stash[_options], session.items, present)
        started_by, command = (stash[_options].backend, ()) if present is None else (present.title, present.command)
        stash[_runner] = Runner(session.config, stash[_options], pool, started_by, command)
    return stash[_runner]


# ---- fixtures


@pytest.fixture(scope="session")
def gang(request: pytest.FixtureRequest) -> Any:
    """This process among those of its test: rank, size, local_rank, host, devices, is_main; barrier(name),
    allgather(value), broadcast(value, root=0); kill(rank), pause(rank), cut(rank)."""
    rank = request.config.pluginmanager.get_plugin(_RANK_PLUGIN)
    if rank is not None:
        return rank.gang
    if not request.config.stash[_options].disabled:
        pytest.fail("gang is for tests marked @pytest.mark.processes(n); in others take `gangs`", pytrace=False)
    from jaxrun.pytest_plugin.single_process import SingleProcessGang

    return SingleProcessGang()


@pytest.fixture(scope="session")
def process_index(gang: Any) -> int:
    """The rank of this process."""
    return int(gang.rank)


@pytest.fixture
def process_count(gang: Any) -> int:
    """The number of processes of this test."""
    return int(gang.size)


@pytest.fixture
def shared_tmp_path(request: pytest.FixtureRequest, gang: Any) -> Path:
    """A directory that is the same on all ranks; tmp_path is one of each rank's own."""
    rank = request.config.pluginmanager.get_plugin(_RANK_PLUGIN)
    if rank is None:
        return request.getfixturevalue("tmp_path")  # type: ignore[no-any-return]
    path = Path(rank.shared)
    if not (rank.shares_files and path.is_dir()):
        pytest.fail(
            f"rank {gang.rank} on {gang.host} cannot see {path}; name a directory that all hosts share: --basetemp DIR",
            pytrace=False,
        )
    return path


@pytest.fixture
def gangs(request: pytest.FixtureRequest) -> Iterator[Callable[..., Gang]]:
    """For a test without the mark: gangs(processes=4) starts a jaxrun.Gang, which is closed when the test is over."""
    from jaxrun.api import Gang

    made: list[Gang] = []

    def make(*arguments: Any, **named: Any) -> Gang:
        given = request.config.stash[_options]
        if "backend" not in named:
            named |= {"backend": given.backend, "options": (*given.jaxrun_args, *named.get("options", ()))}
        made.append(Gang(*arguments, **named))
        return made[-1]

    yield make
    for one in made:
        one.close()
