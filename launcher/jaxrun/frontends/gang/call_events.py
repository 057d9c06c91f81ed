"""The events of a call on a gang while its function runs on the ranks, and a terminal's display of them."""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import Any, Protocol, TextIO

from msgspec import Struct

from jaxrun.frontends.gang.gang_errors import RemoteFailure
from jaxrun.protocol.gang_messages import GangMessage


class RankMessage(Struct, frozen=True):
    """A rank's function has sent a value."""

    rank: int
    value: Any


class Printed(Struct, frozen=True):
    """A rank's Python code has printed; `stream` is "out" or "err"."""

    rank: int
    stream: str
    data: bytes


class Returned(Struct, frozen=True):
    """The function has ended on a rank; `error` is None if it has returned."""

    rank: int
    error: RemoteFailure | None
    message: GangMessage

    def value(self) -> Any:
        """The return value. Two values of one message may share memory. Raises any exception of unpickling."""
        return self.message.load()


class Disconnected(Struct, frozen=True):
    """A rank's connection has ended: the rank has died, or its job was stopped."""

    rank: int


class LauncherOutput(Struct, frozen=True):
    """Complete lines that the launcher printed about the job, mainly that its ranks are out of step."""

    text: str


CallEvent = RankMessage | Printed | Returned | Disconnected | LauncherOutput


# ---- displays of output


class ShownCall(Protocol):
    """The part of a call (call.py) that a display needs."""

    main_rank: int

    @property
    def running(self) -> tuple[int, ...]:
        """The ranks on which the function still runs."""

    @property
    def returned(self) -> Collection[int]:
        """The ranks on which the function has ended."""


class Display(Protocol):
    """Shows the ranks' output during a call."""

    def show(self, printed: Printed) -> None: ...

    def refresh(self, call: ShownCall) -> float | None:
        """Show what is due; returns the seconds until there may be more to show, None for never."""

    def end_call(self, call: ShownCall, error: BaseException | None, *, healthy: bool) -> None:
        """Show the rest. `error` ended the call early, if anything did; `healthy`: the gang can still be used."""


class TerminalDisplay:
    """Prints the ranks' output line by line, each with its rank, on this process's own streams."""

    def __init__(self) -> None:
        self._unfinished: dict[tuple[int, str], str] = {}

    def show(self, printed: Printed) -> None:
        stream: TextIO | None = sys.stdout if printed.stream == "out" else sys.stderr
        if stream is None:  # for example, in a daemon that has closed it
            return
        key = printed.rank, printed.stream
        text = self._unfinished.pop(key, "") + printed.data.decode(errors="replace")
        *lines, rest = text.split("\n")
        for line in lines:
            print(f"[{printed.rank}] {line}", file=stream)
        if rest:
            self._unfinished[key] = rest
        stream.flush()

    def refresh(self, call: ShownCall) -> None:
        """Nothing is ever due."""

    def end_call(self, call: ShownCall, error: BaseException | None, *, healthy: bool) -> None:
        """Print the unfinished lines."""
        for rank, stream in tuple(self._unfinished):
            self.show(Printed(rank, stream, b"\n"))
