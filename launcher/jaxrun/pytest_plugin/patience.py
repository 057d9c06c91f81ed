"""Until when a test is waited for, and for what reason no longer. Times are seconds on the caller's clock."""

from __future__ import annotations

import enum

from jaxrun.pytest_plugin.course import Course

_AT_MOST = 30.0  # seconds between two looks


class Due(enum.Enum):
    """What happens when it is time."""

    LIMIT = "the test has taken too long"
    GRACE = "a rank has failed, and the others have had their time"
    LOOK = "a rank has finished some time ago: do the others wait for it in vain?"


class Patience:
    """`timeout` seconds for the test, and `grace` for the others when one has failed or finished."""

    def __init__(self, began: float, timeout: float, grace: float) -> None:
        self.timeout = timeout
        self._limit = began + timeout
        self._grace = grace
        self._resumed = began
        self._pause = grace
        self._looked: float | None = None

    def due(self, course: Course) -> tuple[float, Due]:
        """When it is time, and for what."""
        dues = [(self._limit, Due.LIMIT)]
        if course.failed is not None:
            dues.append((max(course.failed, self._resumed) + self._grace, Due.GRACE))
        elif course.finished is not None:
            since = course.finished if self._looked is None else self._looked
            dues.append((max(since, self._resumed) + self._pause, Due.LOOK))
        return min(dues, key=lambda due: due[0])

    def looked(self, now: float) -> None:
        """Nobody waits in vain yet; the next look comes after twice the time."""
        self._looked = now
        self._pause = min(2 * self._pause, _AT_MOST)

    def paused(self, began: float, now: float) -> None:
        """A debugger was open, which does not count."""
        self._limit += now - began
        self._resumed = now
