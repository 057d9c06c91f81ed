"""What makes the sessions in the ranks like the parent's: its options, plugins, files and paths."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from random import SystemRandom
from typing import Any

import pytest

from jaxrun.protocol.pytest_messages import SessionSettings
from jaxrun.pytest_plugin import coverage

_TESTS = "file_or_dir"
# What belongs to the run as a whole, and would be done once more by each rank: choice and order of tests, reports,
# the measuring of coverage (which the ranks take part in by other means), and the distribution over processes.
_PARENTS_OWN: Mapping[str, Any] = {
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
    "usepdb_cls": ("jaxrun_runtime.pytest.debugger", "RelayedPdb"),
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


def session_settings(config: pytest.Config, files: Sequence[str], directory: str, debug: int | None) -> SessionSettings:
    """For the sessions of one gang, whose tests stand in `files`; they may use `directory`."""
    return SessionSettings(
        files=tuple(files),
        root=str(config.rootpath),
        ini=str(config.inipath or ""),
        plugins=tuple(config.option.plugins or ()),
        options=_pickled(vars(config.option)),
        path=tuple(sys.path),
        directory=directory,
        debug=debug,
        coverage=coverage.coverage_config(),
        environ=coverage.coverage_env(),
    )


def _pickled(options: Mapping[str, Any]) -> dict[str, bytes]:
    """Each on its own: one that cannot travel does not keep the others."""
    import cloudpickle

    wanted = {name: _PARENTS_OWN.get(name, value) for name, value in options.items() if name != _TESTS}
    if "hypothesis" in sys.modules and wanted.get("hypothesis_seed", 0) is None:
        wanted["hypothesis_seed"] = SystemRandom().getrandbits(32)  # all ranks must see the same examples
    pickled = {}
    for name, value in wanted.items():
        try:
            pickled[name] = cloudpickle.dumps(value)
        except Exception:
            continue
    return pickled
