"""The time as a job sees it."""

from __future__ import annotations

import time


class Clock:
    """Seconds since the epoch that no setting of the machine's clock makes jump."""

    def __init__(self) -> None:
        self._epoch = time.time() - time.monotonic()

    def __call__(self) -> float:
        return self._epoch + time.monotonic()
