"""How long a test may take. The parent keeps the time, for nothing within a rank can end a wait in C++."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from jaxrun.pytest_plugin.mark import MarkSpec


def timeout_of(item: pytest.Item, wish: MarkSpec, default: float) -> float:
    """By the test's own mark, or what pytest-timeout has been told of it, or the default."""
    return wish.timeout or _theirs(item) or default


def cancel_pytest_timeout(item: pytest.Item) -> None:
    """Stop its clock for this test: it would interrupt the parent, or end it."""
    cancel: Any = getattr(item.config.hook, "pytest_timeout_cancel_timer", None)
    if cancel is not None:
        cancel(item=item)


def _theirs(item: pytest.Item) -> float | None:
    if not item.config.pluginmanager.has_plugin("timeout"):
        return None
    mark = item.get_closest_marker("timeout")
    given = (mark.args[0] if mark.args else mark.kwargs.get("timeout")) if mark is not None else None
    for value in (given, item.config.getoption("timeout", None), item.config.getini("timeout")):
        with contextlib.suppress(TypeError, ValueError):
            return float(value or "none")
    return None
