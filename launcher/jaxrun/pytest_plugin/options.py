"""The command line and the ini file: what is said there about gangs, as one value."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

BACKENDS = ("local", "mpirun", "slurm")
_TEACHES = """\
tests on several JAX processes (jaxrun), @pytest.mark.processes(4):
  the body runs on every rank, with the fixtures gang (gang.rank, gang.barrier(), ...) and shared_tmp_path; one result;
  the processes stay warm between tests. More: pytest --markers, pytest --fixtures"""


@dataclass(frozen=True, slots=True)
class PluginOptions:
    """`debug`: the rank that --pdb is for, -1 the first that fails, None no debugger. Times are seconds.

    more: further words for jaxrun's command line
    """

    backend: str
    jaxrun_args: tuple[str, ...]
    show_all: bool
    fresh: bool
    max_processes: int | None
    disabled: bool
    timeout: float
    grace: float
    debug: int | None

    def rerun_args(self) -> list[str]:
        """Those words of the command line that a single test needs to be run the same way."""
        backend = [] if self.backend == "local" else [f"--gang-backend={self.backend}"]
        return [*backend, *([f"--gang-options={shlex.join(self.jaxrun_args)}"] if self.jaxrun_args else [])]


def add_options(parser: pytest.Parser) -> None:
    group = parser.getgroup("gang", _TEACHES)
    group.addoption("--gang-backend", choices=BACKENDS, help="what starts the processes (local)")
    group.addoption(
        "--gang-options",
        action="append",
        default=[],
        metavar="WORDS",
        help="more words for jaxrun's command line: --gang-options='-H h1:2,h2:2'; may be given again",
    )
    group.addoption(
        "--gang-report",
        choices=("first", "all"),
        default="first",
        help="show the failure that came first, or those of all ranks that differ",
    )
    group.addoption("--gang-fresh", action="store_true", help="give every test new processes")
    group.addoption("--gang-max", type=int, metavar="N", help="skip tests that need more than N processes")
    group.addoption("--no-gang", action="store_true", help="run these tests in this process, as the only one")
    group.addoption("--gang-timeout", type=float, metavar="SECONDS", help="for each test (ini: gang_timeout; 300)")
    group.addoption(
        "--gang-grace",
        type=float,
        default=1.5,
        metavar="SECONDS",
        help="how long the others have after one has failed, before they are called stuck (%(default)s)",
    )
    group.addoption("--gang-pdb", type=int, metavar="RANK", help="as --pdb, where this rank fails")
    parser.addini("gang_timeout", "seconds that a test on several processes may take", default="300")


def read_options(config: pytest.Config) -> PluginOptions:
    """UsageError of pytest's where a value cannot be."""
    timeout = config.getoption("gang_timeout")
    if timeout is None:
        try:
            timeout = float(config.getini("gang_timeout"))
        except ValueError:
            raise pytest.UsageError(
                f"gang_timeout = {config.getini('gang_timeout')!r} is no number of seconds"
            ) from None
    if timeout <= 0:
        raise pytest.UsageError(f"--gang-timeout {timeout:g}: must be above 0 seconds")
    debug = config.getoption("gang_pdb")
    if debug is None and config.getoption("usepdb"):
        debug = -1
    return PluginOptions(
        backend=config.getoption("gang_backend") or "local",
        jaxrun_args=_more(config.getoption("gang_options")),
        show_all=config.getoption("gang_report") == "all",
        fresh=config.getoption("gang_fresh"),
        max_processes=config.getoption("gang_max"),
        disabled=config.getoption("no_gang"),
        timeout=timeout,
        grace=config.getoption("gang_grace"),
        debug=debug,
    )


def _more(given: Sequence[str]) -> tuple[str, ...]:
    try:
        return tuple(word for words in given for word in shlex.split(words))
    except ValueError as error:
        raise pytest.UsageError(f"--gang-options {' '.join(given)}: {error}") from None
