"""The plugin's fixtures. They work in the ranks' sessions, and under --no-gang in pytest itself.

Every pytest session loads this module, so it imports little.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from jaxrun.errors import UsageError
from jaxrun.protocol.names import RANK_PLUGIN

if TYPE_CHECKING:
    from jaxrun.frontends.gang.gang import Gang


def find_rank_plugin(config: pytest.Config) -> Any:
    """The plugin of a rank's own session; None in every other pytest session."""
    return config.pluginmanager.get_plugin(RANK_PLUGIN)


@pytest.fixture(scope="session")
def gang(request: pytest.FixtureRequest) -> Any:
    """The ranks of this test. Its own: rank, size, local_rank, host, devices, is_main. With the others: barrier(name),
    allgather(value), broadcast(value, root=0). Faults: kill(rank), pause(rank)."""
    rank = find_rank_plugin(request.config)
    if rank is not None:
        return rank.gang
    if not request.config.option.no_gang:
        pytest.fail("gang is for tests marked @pytest.mark.processes(n); in other tests use `gangs`", pytrace=False)
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
    """A directory that all ranks share; tmp_path is different on each rank."""
    rank = find_rank_plugin(request.config)
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
    """For tests without the mark: gangs(processes=4) starts a jaxrun.Gang and closes it at the end of the test."""
    from jaxrun.frontends.gang.gang import Gang
    from jaxrun.frontends.gang.spec import split_options

    def start(*arguments: Any, **named: Any) -> Gang:
        given = request.config.option
        if "backend" not in named:
            options = *given.gang_options, *split_options(named.get("options", ()))
            named |= {"backend": given.gang_backend, "options": options}
        return started.enter_context(Gang(*arguments, **named))

    with contextlib.ExitStack() as started:
        yield start


class SingleProcessGang:
    """The fixture `gang` under --no-gang: this process is rank 0 of 1."""

    rank = 0
    size = 1
    local_rank = 0
    is_main = True

    def __init__(self) -> None:
        self.host = os.uname().nodename

    def __repr__(self) -> str:
        return "<gang: rank 0 of 1>"

    @property
    def devices(self) -> int:
        jax = sys.modules.get("jax")
        return len(jax.local_devices()) if jax is not None else 1

    def barrier(self, name: str = "") -> None:
        pass

    def allgather(self, value: Any) -> list[Any]:
        return [value]

    def broadcast(self, value: Any = None, root: int = 0) -> Any:
        return value

    def kill(self, rank: int) -> None:
        _refuse("kill")

    def pause(self, rank: int) -> None:
        _refuse("pause")


def _refuse(fault: str) -> None:
    raise UsageError(f"gang.{fault} would hit pytest itself under --no-gang; run this test without that option")
