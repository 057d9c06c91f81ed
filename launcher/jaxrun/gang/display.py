"""What ranks print, line by line, each with its rank, on this process's own streams."""

from __future__ import annotations

import sys

from jaxrun.gang.call import GangCall, Printed


class TerminalDisplay:
    """Keeps what a rank has printed of a line until it is whole."""

    def __init__(self) -> None:
        self._begun: dict[tuple[int, str], str] = {}

    def show(self, printed: Printed) -> None:
        stream = sys.stdout if printed.stream == "out" else sys.stderr
        key = printed.rank, printed.stream
        text = self._begun.pop(key, "") + printed.data.decode(errors="replace")
        *lines, rest = text.split("\n")
        for line in lines:
            print(f"[{printed.rank}] {line}", file=stream)
        if rest:
            self._begun[key] = rest
        stream.flush()

    def refresh(self, talk: GangCall) -> None:
        """Nothing is due."""

    def end_call(self, talk: GangCall, error: BaseException | None, *, healthy: bool) -> None:
        """Show the lines that were not ended."""
        for rank, stream in tuple(self._begun):
            self.show(Printed(rank, stream, b"\n"))
