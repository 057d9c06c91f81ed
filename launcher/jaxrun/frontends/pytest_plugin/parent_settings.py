"""What makes the pytest sessions of ranks like the parent's: its options, plugins, paths and coverage."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from random import SystemRandom
from typing import Any

import pytest

from jaxrun import RUNTIME
from jaxrun.protocol.pytest_messages import SessionSettings

_TEST_FILES = "file_or_dir"
# What belongs to the run as a whole, which each rank would otherwise do once more: choice and order of tests, reports,
# measuring coverage (in which the ranks take part by SessionSettings.coverage), distribution over processes.
_PARENT_ONLY: Mapping[str, Any] = {
    "plugins": [],
    "keyword": "",
    "markexpr": "",
    "deselect": None,
    "maxfail": 0,
    "lf": False,
    "failedfirst": False,
    "newfirst": False,
    "stepwise": False,
    "stepwise_skip": False,
    "cacheclear": False,
    "continue_on_collection_errors": True,
    "setupshow": False,
    "usepdb": False,
    "usepdb_cls": (f"{RUNTIME}.pytest.rank_gang", "RelayedPdb"),
    "trace": False,
    "xmlpath": None,
    "pastebin": None,
    "log_file": os.devnull,
    "cov_source": [],
    "numprocesses": None,
    "dist": "no",
    "tx": [],
    "looponfail": False,
}
# With these, coverage starts itself in the children of a process that it measures.
_COVERAGE_VARIABLES = ("COVERAGE_PROCESS_CONFIG", "COVERAGE_PROCESS_START")


def session_settings(config: pytest.Config, files: Sequence[str], directory: str) -> SessionSettings:
    """Settings for the ranks of one gang, whose tests are in `files`. `directory`: for temporary files."""
    return SessionSettings(
        files=tuple(files),
        root=str(config.rootpath),
        ini=str(config.inipath or ""),
        plugins=tuple(config.option.plugins or ()),
        options=_pickle_options(vars(config.option)),
        path=tuple(sys.path),
        directory=directory,
        debug=bool(config.option.usepdb),
        coverage=_coverage_config(),
        environ=_coverage_variables(),
    )


@contextmanager
def without_coverage() -> Iterator[None]:
    """Within this block, processes are started without coverage: a launcher is not to be measured."""
    hidden = _coverage_variables()
    for name in hidden:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(hidden)


def _coverage_variables() -> Mapping[str, str]:
    return {name: os.environ[name] for name in _COVERAGE_VARIABLES if name in os.environ}


def _coverage_config() -> str:
    """The configuration with which coverage measures this process, as text; empty if it does not."""
    coverage = sys.modules.get("coverage")
    running = coverage.Coverage.current() if coverage is not None else None
    serialize = getattr(getattr(running, "config", None), "serialize", None)
    return str(serialize()) if serialize is not None else ""


def _pickle_options(options: Mapping[str, Any]) -> dict[str, bytes]:
    """pytest's options for the ranks, each pickled on its own; those that cannot be pickled are left out."""
    import cloudpickle

    wanted = {name: _PARENT_ONLY.get(name, value) for name, value in options.items() if name != _TEST_FILES}
    if "hypothesis" in sys.modules and wanted.get("hypothesis_seed", 0) is None:
        wanted["hypothesis_seed"] = SystemRandom().getrandbits(32)  # all ranks must see the same examples
    pickled = {}
    for name, value in wanted.items():
        try:
            pickled[name] = cloudpickle.dumps(value)
        except Exception:
            continue
    return pickled
