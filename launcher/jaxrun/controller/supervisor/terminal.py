"""The terminal that jaxrun was started from, for the debuggers of ranks: head/debugger.py decides who has it."""

from __future__ import annotations

import os
from collections.abc import Callable

from jaxrun.node.channel.event_loop import EventLoop
from jaxrun.records.output.output import Output

_STDIN = 0
_READ_BYTES = 4096


class Terminal:
    """Reads single lines, when they are wanted, so that others can read from the terminal in between."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._partial = b""

    def attach(self, loop: EventLoop, order: int, on_line: Callable[[str], None]) -> None:
        """Call `on_line` in `loop` with each line that was asked for; empty at the end of the input."""
        self._loop, self._order, self._on_line = loop, order, on_line

    def show(self, text: str) -> None:
        self._output.show_debugger(text)

    def read_line(self) -> None:
        """Ask for one line."""
        if not self._loop.has_reader(_STDIN):
            self._loop.add_reader(_STDIN, self._order, self._on_readable)

    def _on_readable(self) -> None:
        try:
            data = os.read(_STDIN, _READ_BYTES)
        except OSError:  # the terminal has been closed
            data = b""
        self._partial += data
        if data and not data.endswith(b"\n"):  # Ctrl-D within a line; the rest comes later
            return
        self._loop.remove_reader(_STDIN)
        line, self._partial = self._partial.decode(errors="replace"), b""
        self._output.end_debugger_line()
        self._on_line(line)
