"""Where the output of the ranks is shown: on this process's own streams, or in a notebook."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from jaxrun.frontends.gang.call_events import Printed

if TYPE_CHECKING:
    from jaxrun.frontends.gang.call import GangCall


class Display(Protocol):
    """Shows what ranks print during a call."""

    def show(self, printed: Printed) -> None: ...

    def refresh(self, call: GangCall) -> float | None:
        """Show what is due; returns the seconds until there may be more to show, None for never."""

    def end_call(self, call: GangCall, error: BaseException | None, *, healthy: bool) -> None:
        """Show the rest. `error` is what ended the call early, if anything; `healthy`: the gang can be used on."""


class CellSources(Protocol):
    """The source of code that is in no file but in cells: `lines` by file name, of the code that `reduce` has met."""

    @property
    def lines(self) -> Mapping[str, str]: ...

    def reduce(self, value: Any) -> Any:
        """As pickle's `reducer_override`."""


class TerminalDisplay:
    """Prints what ranks print line by line, each with its rank, on this process's own streams."""

    def __init__(self) -> None:
        self._unfinished: dict[tuple[int, str], str] = {}

    def show(self, printed: Printed) -> None:
        stream: TextIO | None = sys.stdout if printed.stream == "out" else sys.stderr
        if stream is None:  # as in a daemon that has closed it
            return
        key = printed.rank, printed.stream
        text = self._unfinished.pop(key, "") + printed.data.decode(errors="replace")
        *lines, rest = text.split("\n")
        for line in lines:
            print(f"[{printed.rank}] {line}", file=stream)
        if rest:
            self._unfinished[key] = rest
        stream.flush()

    def refresh(self, call: GangCall) -> None:
        """Nothing is ever due."""

    def end_call(self, call: GangCall, error: BaseException | None, *, healthy: bool) -> None:
        """Print the lines that have no end."""
        for rank, stream in tuple(self._unfinished):
            self.show(Printed(rank, stream, b"\n"))


def make_display() -> Display:
    """The notebook's display where this process is a notebook's kernel, else the terminal's."""
    # Imported by name: the package notebook stands above this one.
    found: Display | None = (
        import_module("jaxrun.frontends.notebook.display").find_display() if "IPython" in sys.modules else None
    )
    return found or TerminalDisplay()


def find_sources() -> CellSources | None:
    """The sources of this process's cells; None where there are no cells, which is outside of IPython."""
    if "IPython" not in sys.modules:
        return None
    found: CellSources | None = import_module("jaxrun.frontends.notebook.ipython").find_sources()
    return found
