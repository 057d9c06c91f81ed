"""Until when a test is waited for, and for what reason no longer. Times are seconds on the caller's clock."""

from __future__ import annotations

import enum

from jaxrun.pytest_plugin.run_state import RunState

_MAX_CHECK_INTERVAL_S = 30.0  # seconds between two looks


class Expiry(enum.Enum):
    """What happens when it is time."""

    TIMEOUT = "the test has taken too long"
    GRACE = "a rank has failed, and the others have had their time"
    CHECK = "a rank has finished some time ago: do the others wait for it in vain?"


class Timeouts:
    """`timeout` seconds for the test, and `grace` for the others when one has failed or finished."""

    def __init__(self, began: float, timeout: float, grace: float) -> None:
        self.timeout = timeout
        self._limit = began + timeout
        self._grace = grace
        self._resumed = began
        self._pause = grace
        self._looked: float | None = None

    def next_expiry(self, course: RunState) -> tuple[float, Expiry]:
        """When it is time, and for what."""
        dues = [(self._limit, Expiry.TIMEOUT)]
        if course.first_failure_at is not None:
            dues.append((max(course.first_failure_at, self._resumed) + self._grace, Expiry.GRACE))
        elif course.last_finish_at is not None:
            since = course.last_finish_at if self._looked is None else self._looked
            dues.append((max(since, self._resumed) + self._pause, Expiry.CHECK))
        return min(dues, key=lambda due: due[0])

    def record_check(self, now: float) -> None:
        """Nobody waits in vain yet; the next look comes after twice the time."""
        self._looked = now
        self._pause = min(2 * self._pause, _MAX_CHECK_INTERVAL_S)

    def exclude_pause(self, began: float, now: float) -> None:
        """A debugger was open, which does not count."""
        self._limit += now - began
        self._resumed = now
