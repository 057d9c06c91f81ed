"""How long a test is waited for. The parent keeps the time, because nothing within a rank can end a wait in C++.

Times are seconds on the caller's clock.
"""

from __future__ import annotations

import contextlib
import enum
from typing import Any

import pytest

from jaxrun.pytest_plugin.mark import MarkSpec
from jaxrun.pytest_plugin.run_state import RunState

_MAX_CHECK_INTERVAL_S = 30.0  # between two checks for an abandoned rank


class Expiry(enum.Enum):
    """What is to happen when the next time has come."""

    TIMEOUT = "the test has taken too long"
    GRACE = "a rank has failed, and the grace of the others is over"
    CHECK = "a rank has finished some time ago: check whether another waits for it in vain"


class Timeouts:
    """`timeout`: seconds for the whole test; `grace`: for the other ranks when one has failed or finished."""

    def __init__(self, began: float, timeout: float, grace: float) -> None:
        self._deadline = began + timeout
        self._grace = grace
        self._resumed_at = began
        self._check_interval = grace
        self._checked_at: float | None = None

    def next_expiry(self, state: RunState) -> tuple[float, Expiry]:
        """When something is to happen next, and what."""
        expiries = [(self._deadline, Expiry.TIMEOUT)]
        if state.first_failure_at is not None:
            expiries.append((max(state.first_failure_at, self._resumed_at) + self._grace, Expiry.GRACE))
        elif state.last_finish_at is not None:
            since = state.last_finish_at if self._checked_at is None else self._checked_at
            expiries.append((max(since, self._resumed_at) + self._check_interval, Expiry.CHECK))
        return min(expiries, key=lambda expiry: expiry[0])

    def record_check(self, now: float) -> None:
        """No rank waits in vain yet; the next check comes after twice the interval."""
        self._checked_at = now
        self._check_interval = min(2 * self._check_interval, _MAX_CHECK_INTERVAL_S)

    def exclude_pause(self, began: float, now: float) -> None:
        """Do not count the time that the user has spent in a debugger."""
        self._deadline += now - began
        self._resumed_at = now


def timeout_of(item: pytest.Item, spec: MarkSpec, default: float) -> float:
    """Seconds for a test: from its own mark, from pytest-timeout's options, or the default."""
    return spec.timeout or _pytest_timeout(item) or default


def cancel_pytest_timeout(item: pytest.Item) -> None:
    """Stop pytest-timeout's clock for this test: it would interrupt the parent, or end it."""
    cancel: Any = getattr(item.config.hook, "pytest_timeout_cancel_timer", None)
    if cancel is not None:
        cancel(item=item)


def _pytest_timeout(item: pytest.Item) -> float | None:
    if not item.config.pluginmanager.has_plugin("timeout"):
        return None
    mark = item.get_closest_marker("timeout")
    of_mark = (mark.args[0] if mark.args else mark.kwargs.get("timeout")) if mark is not None else None
    for value in (of_mark, item.config.getoption("timeout", None), item.config.getini("timeout")):
        with contextlib.suppress(TypeError, ValueError):
            return float(value or "none")
    return None
