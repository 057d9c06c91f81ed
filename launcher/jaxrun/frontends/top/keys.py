"""Single keys that are typed at a terminal, read without waiting for the end of a line."""

from __future__ import annotations

import os
import select
import termios
import tty
from types import TracebackType

_ESCAPE = b"\x1b"


class Keyboard:
    """Context manager that reads from the terminal `fd` by keys, which are not echoed; Ctrl-C stays a signal."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._is_open = True

    def __enter__(self) -> Keyboard:
        self._before = termios.tcgetattr(self._fd)
        tty.setcbreak(self._fd, termios.TCSANOW)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        termios.tcsetattr(self._fd, termios.TCSANOW, self._before)

    def wait(self, timeout: float) -> str:
        """The keys that were typed, at the latest after so many seconds; those with escape sequences are left out."""
        if not select.select([self._fd] if self._is_open else [], [], [], timeout)[0]:
            return ""
        try:
            data = os.read(self._fd, 1024)
        except OSError:
            data = b""
        self._is_open = bool(data)  # else the terminal has been closed
        return "" if data.startswith(_ESCAPE) and len(data) > 1 else data.decode(errors="replace")
