"""Screens, which many share, and the voices on them: one stream of one rank each."""

from __future__ import annotations

import errno
from dataclasses import dataclass, field

from jaxrun.output.line_buffer import Interleaver, LineBuffer
from jaxrun.output.spool import Spool

_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)  # no red: it would look like an error


class Screen:
    """jaxrun's stdout or stderr, or both where they are the same open file."""

    def __init__(self, fd: int, name: str, *, colour: bool) -> None:
        self.colour = colour
        self.spool = Spool(fd)
        self.interleaver = Interleaver(overwrites=colour)
        self._name = name
        self._loss_reported = False

    def write(self, data: bytes) -> None:
        if data:
            self.spool.write(data)

    def new_loss(self) -> str:
        """Why nothing can be shown any more, told once; empty as long as all is well."""
        error = self.spool.error
        if error is None or self._loss_reported:
            return ""
        self._loss_reported = True
        if error.errno == errno.EPIPE:
            return f"the reader of {self._name} has gone"
        return f"cannot write to {self._name}: {error.strerror}"


@dataclass(slots=True, eq=False)
class RankStream:
    """One stream of one rank that is shown."""

    screen: Screen
    prefix: bytes
    buffer: LineBuffer = field(default_factory=LineBuffer)
    bar_shown_at: float = float("-inf")

    def show(self, text: bytes) -> None:
        """`text` is what `lines` returned."""
        self.screen.write(self.screen.interleaver.render(self, self.prefix, text))


def rank_prefix(rank: int, size: int, *, colour: bool) -> bytes:
    """The tag "[3] ", padded after the bracket to the width of the largest rank."""
    tag = f"[{rank}]"
    padding = " " * (len(f"[{size - 1}]") - len(tag) + 1)
    if colour:
        tag = f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m{tag}\x1b[0m"
    return (tag + padding).encode()
