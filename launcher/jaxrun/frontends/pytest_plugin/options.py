"""The plugin's command-line and ini options, as one value."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from jaxrun.spec.backends import BACKENDS

_GROUP_HELP = """\
tests on several JAX processes (jaxrun), @pytest.mark.processes(4):
  the body runs on every rank, with the fixtures gang (gang.rank, gang.barrier(), ...) and shared_tmp_path; one result;
  the processes stay warm between tests. More: pytest --markers, pytest --fixtures"""


@dataclass(frozen=True, slots=True)
class PluginOptions:
    """What was given for gangs.

    jaxrun_args:     further words for jaxrun's command line
    show_all:        show the failures of all ranks, not only the first
    disabled:        --no-gang: run marked tests in this process
    timeout, grace:  seconds
    debug:           --pdb: open a debugger on the first rank that fails
    """

    backend: str
    jaxrun_args: tuple[str, ...]
    show_all: bool
    fresh: bool
    disabled: bool
    timeout: float
    grace: float
    debug: bool

    def rerun_args(self) -> list[str]:
        """The options that are needed to run a single test in the same way."""
        backend = [] if self.backend == "local" else [f"--gang-backend={self.backend}"]
        return [*backend, *([f"--gang-options={shlex.join(self.jaxrun_args)}"] if self.jaxrun_args else [])]


OPTIONS = pytest.StashKey[PluginOptions]()  # of the session's config


def add_options(parser: pytest.Parser) -> None:
    group = parser.getgroup("gang", _GROUP_HELP)
    group.addoption("--gang-backend", choices=tuple(BACKENDS), help="what starts the processes (local)")
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


def read_options(config: pytest.Config) -> PluginOptions:
    """The options of this session. Raises pytest.UsageError for a value that is out of range."""
    return PluginOptions(
        backend=config.getoption("gang_backend") or "local",
        jaxrun_args=_split_words(config.getoption("gang_options")),
        show_all=config.getoption("gang_report") == "all",
        fresh=config.getoption("gang_fresh"),
        disabled=config.getoption("no_gang"),
        timeout=_read_timeout(config),
        grace=config.getoption("gang_grace"),
        debug=bool(config.getoption("usepdb")),
    )


def _read_timeout(config: pytest.Config) -> float:
    timeout = config.getoption("gang_timeout")
    if timeout is None:
        written = config.getini("gang_timeout")
        try:
            timeout = float(written)
        except ValueError:
            raise pytest.UsageError(f"gang_timeout = {written!r} is no number of seconds") from None
    if timeout <= 0:
        raise pytest.UsageError(f"--gang-timeout {timeout:g}: must be above 0 seconds")
    return float(timeout)


def _split_words(given: Sequence[str]) -> tuple[str, ...]:
    try:
        return tuple(word for words in given for word in shlex.split(words))
    except ValueError as error:
        raise pytest.UsageError(f"--gang-options {' '.join(given)}: {error}") from None
