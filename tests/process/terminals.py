"""A command in a pseudo terminal of its own, and somebody who types there."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from harness import TIME_LIMIT

_COLOURS = re.compile(r"\x1b\[[\d;]*m")


class TerminalSession:
    """A `jaxrun` that runs in a terminal, until the end of the `with` block at the latest."""

    def __init__(
        self,
        directory: Path,
        *arguments: str,
        command: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        size: tuple[int, int] | None = None,
    ) -> None:
        """`command` is what to run instead of this Python's jaxrun; `env` are variables besides those of the tests;
        `size` is that of the terminal, in columns and lines."""
        self.text = ""
        self._read_so_far = b""
        self._seen = 0
        self._fd, terminal = pty.openpty()
        if size is not None:
            fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", size[1], size[0], 0, 0))
        argv = ["setsid", "--ctty", *(command or (sys.executable, "-m", "jaxrun")), *arguments]
        streams = {"stdin": terminal, "stdout": terminal, "stderr": terminal}
        self._process = subprocess.Popen(argv, cwd=directory, env={**os.environ, **(env or {})}, **streams)
        os.close(terminal)

    def __enter__(self) -> TerminalSession:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._fd)

    @property
    def raw(self) -> str:
        """All that was shown, with colours and line ends as they were sent."""
        return self._read_so_far.decode(errors="replace")

    def wait_for(self, text: str) -> None:
        """Until this text appears, after what was waited for before."""
        deadline = time.monotonic() + TIME_LIMIT
        while (found := self.text.find(text, self._seen)) < 0:
            assert time.monotonic() < deadline and self._read(), f"no {text!r} in:\n{self.text}"
        self._seen = found + len(text)

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def end(self) -> int:
        """Wait for its exit status."""
        while self._read():
            pass
        return self._process.wait(TIME_LIMIT)

    def _read(self) -> bool:
        """Read what comes next; returns whether more may come."""
        if not select.select([self._fd], [], [], TIME_LIMIT)[0]:
            return False
        try:
            data = os.read(self._fd, 65536)
        except OSError:  # nobody holds the terminal any more
            return False
        self._read_so_far += data  # which may end within a character, or within a colour
        self.text = _COLOURS.sub("", self._read_so_far.decode(errors="replace").replace("\r\n", "\n"))
        return bool(data)
