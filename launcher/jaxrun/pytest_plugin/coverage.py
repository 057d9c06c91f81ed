"""How this process measures coverage, so that the ranks do the same; the processes of a gang besides do not."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

# By these coverage starts itself in processes that are started by one that it measures.
_VARIABLES = ("COVERAGE_PROCESS_CONFIG", "COVERAGE_PROCESS_START")


def coverage_config() -> str:
    """That of the measurement that is going on, as text; empty without one."""
    coverage = sys.modules.get("coverage")
    running = coverage.Coverage.current() if coverage is not None else None
    serialize = getattr(getattr(running, "config", None), "serialize", None)
    return str(serialize()) if serialize is not None else ""


def coverage_env() -> Mapping[str, str]:
    return {name: os.environ[name] for name in _VARIABLES if name in os.environ}


@contextmanager
def without_coverage() -> Iterator[None]:
    """Processes that are started in here are not measured."""
    hidden = coverage_env()
    for name in hidden:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(hidden)
