"""The screen that the streams of all ranks share; keeps their lines apart."""

from __future__ import annotations

import errno
import os
import select
import time
from collections.abc import Hashable
from dataclasses import dataclass, field

from jaxrun.records.output.line_buffer import LineBuffer
from jaxrun.records.output.spool import Spool

_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)  # no red: it would look like an error
_ERASE_LINE = b"\r\x1b[K"
_STATUS = object()  # the owner of a temporary line of jaxrun's own
_HOLDER_PATIENCE_S = 5.0  # how long the holder may continue once the job is over


class Interleaver:
    """Gives lines their prefixes and keeps unfinished lines from running into others. Pure: no I/O."""

    def __init__(self, *, overwrites: bool = False) -> None:
        """`overwrites`: a line can be redrawn in place, as on a terminal, instead of below."""
        self._redraw = _ERASE_LINE if overwrites else b"\n"
        self._owner: Hashable | None = None
        self._interrupted: set[Hashable] = set()

    def render(self, owner: Hashable, prefix: bytes, text: bytes) -> bytes:
        """Return the bytes that show `text`, which came from the LineBuffer of `owner`."""
        if self._owner == owner:
            head = b""
            if text.startswith(b"\r"):
                head, text = self._redraw + prefix, text[1:]
        else:
            text = text.removeprefix(b"\r")
            if owner in self._interrupted:
                self._interrupted.discard(owner)
                text = text.removeprefix(b"\n")  # the interruption has ended that line already
            if not text:
                return b""
            head = self.interrupt() + prefix
        start = b"\n" + prefix
        if not text.endswith(b"\n"):
            self._owner = owner
            return head + text.replace(b"\n", start)
        self._owner = None
        return b"".join((head, text[:-1].replace(b"\n", start), b"\n"))

    def show_status(self, text: bytes) -> bytes:
        """Return the bytes that show a line which the next one replaces; an empty line is removed."""
        start = self.interrupt()
        self._owner = _STATUS if text else None
        return start + text

    def release(self, owner: Hashable) -> None:
        """Note that something else, such as typed input, has ended the unfinished line of `owner`."""
        if self._owner == owner:
            self._owner = None
        self._interrupted.discard(owner)

    def interrupt(self) -> bytes:
        """Return the bytes that let another line begin: they end an unfinished line, and remove a status."""
        if self._owner is None:
            return b""
        if self._owner is _STATUS:
            self._owner = None
            return _ERASE_LINE
        self._interrupted.add(self._owner)
        self._owner = None
        return b"\n"


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
        """Return why nothing can be shown any more, once; empty as long as there is no problem."""
        error = self.spool.error
        if error is None or self._loss_reported:
            return ""
        self._loss_reported = True
        if error.errno == errno.EPIPE:
            return f"the reader of {self._name} has gone"
        return f"cannot write to {self._name}: {error.strerror}"


@dataclass(slots=True, eq=False)
class RankStream:
    """One stream of one rank on a screen."""

    screen: Screen
    prefix: bytes
    buffer: LineBuffer = field(default_factory=LineBuffer)
    bar_shown_at: float = float("-inf")

    def show(self, text: bytes) -> None:
        self.screen.write(self.screen.interleaver.render(self, self.prefix, text))


def rank_prefix(rank: int, size: int, *, colour: bool) -> bytes:
    """Return the tag "[3] ", padded after the bracket to the width of the largest rank."""
    tag = f"[{rank}]"
    padding = " " * (len(f"[{size - 1}]") - len(tag) + 1)
    if colour:
        tag = f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m{tag}\x1b[0m"
    return (tag + padding).encode()


class HeldScreen:
    """The terminal while another process has it, for --live: jaxrun's text waits until that process has ended."""

    def __init__(self, fd: int) -> None:
        """`fd` reaches end-of-file when the holder has ended; it is closed here."""
        self.kept: list[str] = []  # text that waits
        self._fd = fd
        self._closing_since: float | None = None

    def is_free(self) -> bool:
        """Whether the holder has ended."""
        if self._fd >= 0 and select.select([self._fd], [], [], 0)[0]:
            os.close(self._fd)
            self._fd = -1
        return self._fd < 0

    def wait_until_free(self, timeout: float | None) -> bool:
        """Wait for the holder to end after the job is over, `timeout` seconds in all; returns False if time is up."""
        if self._closing_since is None:
            self._closing_since = time.monotonic()
        left = max(0.0, self._closing_since + _HOLDER_PATIENCE_S - time.monotonic())
        if self._fd >= 0:
            select.select([self._fd], [], [], left if timeout is None else min(left, timeout))
        return self.is_free() or time.monotonic() >= self._closing_since + _HOLDER_PATIENCE_S
