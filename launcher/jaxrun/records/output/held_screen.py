"""The terminal while another process has it, for --live: what jaxrun says meanwhile waits until that one has ended."""

from __future__ import annotations

import os
import select
import time

POLL_S = 0.2  # between two looks whether it has ended
_PATIENCE_S = 5.0  # for which it may go on once the job is over


class HeldScreen:
    """The terminal's holder, seen by a pipe of which it has the other end."""

    def __init__(self, fd: int) -> None:
        """`fd` is at its end when the holder has ended; it is closed here."""
        self._fd = fd
        self._kept: list[str] = []
        self._closing_since: float | None = None

    def keep(self, text: str) -> None:
        """Keep lines of jaxrun's own."""
        self._kept.append(text)

    def take_kept(self) -> list[str]:
        kept, self._kept = self._kept, []
        return kept

    def is_free(self) -> bool:
        """Whether the holder has ended."""
        if self._fd >= 0 and select.select([self._fd], [], [], 0)[0]:
            os.close(self._fd)
            self._fd = -1
        return self._fd < 0

    def wait_until_free(self, timeout: float | None) -> bool:
        """The job is over: wait for the holder to end, for some seconds in all; returns False if time is up before."""
        if self._closing_since is None:
            self._closing_since = time.monotonic()
        left = max(0.0, self._closing_since + _PATIENCE_S - time.monotonic())
        if self._fd >= 0:
            select.select([self._fd], [], [], left if timeout is None else min(left, timeout))
        return self.is_free() or time.monotonic() >= self._closing_since + _PATIENCE_S
