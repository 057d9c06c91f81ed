"""The screen that the streams of all ranks share; keeps their lines apart."""

from __future__ import annotations

import errno
import os
import select
import time
from collections.abc import Hashable

from msgspec import Struct, field

from jaxrun.records.output.line_buffer import LineBuffer
from jaxrun.records.output.spool import Spool

_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)  # no red: it would look like an error
_ERASE_LINE = b"\r\x1b[K"
_MAX_REDRAWN_BYTES = 72  # of an unfinished line that can be drawn again: it must not fill more than a row
_STATUS = object()  # the owner of a temporary line of jaxrun's own
_HOLDER_PATIENCE_S = 5.0  # how long the holder may continue once the job is over


class Interleaver:
    """Gives lines their prefixes and keeps unfinished lines from running into others. Pure: no I/O."""

    def __init__(self, *, overwrites: bool = False) -> None:
        """`overwrites`: a line can be redrawn in place, as on a terminal, instead of below."""
        self._redraw = _ERASE_LINE if overwrites else b"\n"
        self._overwrites = overwrites
        self._owner: Hashable | None = None
        self._unfinished = b""  # the owner's line with its prefix; empty if it is too long to be drawn again
        self._interrupted: set[Hashable] = set()

    def render(self, owner: Hashable, prefix: bytes, text: bytes) -> bytes:
        """Return the bytes that show `text`, which came from the LineBuffer of `owner`."""
        if self._overwrites and self._unfinished and self._owner != owner and text.endswith(b"\n"):
            return self._render_above(owner, prefix, text)
        continues = self._owner == owner
        if continues:
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
            shown = head + text.replace(b"\n", start)
            self._note_unfinished(shown, continues=continues)
            return shown
        self._end_line()
        return b"".join((head, text[:-1].replace(b"\n", start), b"\n"))

    def _render_above(self, owner: Hashable, prefix: bytes, text: bytes) -> bytes:
        """Return the bytes that show whole lines above the unfinished line of another owner."""
        text = text.removeprefix(b"\r")
        if owner in self._interrupted:
            self._interrupted.discard(owner)
            text = text.removeprefix(b"\n")
        lines = prefix + text[:-1].replace(b"\n", b"\n" + prefix) + b"\n" if text else b""
        return _ERASE_LINE + lines + self._unfinished

    def _note_unfinished(self, shown: bytes, *, continues: bool) -> None:
        """Note the last line of what is shown now; `continues`: in the line that was unfinished before."""
        cut = max(shown.rfind(start) + len(start) if start in shown else 0 for start in (b"\n", _ERASE_LINE))
        before = self._unfinished if continues and not cut else b""
        is_whole = bool(before or cut or not continues)
        line = before + shown[cut:]
        self._unfinished = line if is_whole and len(line) <= _MAX_REDRAWN_BYTES else b""

    def _end_line(self) -> None:
        self._owner, self._unfinished = None, b""

    def show_status(self, text: bytes) -> bytes:
        """Return the bytes that show a line which the next one replaces; an empty line is removed."""
        start = self.interrupt()
        self._owner = _STATUS if text else None
        return start + text

    def release(self, owner: Hashable) -> None:
        """Note that something else, such as typed input, has ended the unfinished line of `owner`."""
        if self._owner == owner:
            self._end_line()
        self._interrupted.discard(owner)

    def interrupt(self) -> bytes:
        """Return the bytes that let another line begin: they end an unfinished line, and remove a status."""
        if self._owner is None:
            return b""
        if self._owner is _STATUS:
            self._end_line()
            return _ERASE_LINE
        self._interrupted.add(self._owner)
        self._end_line()
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


class RankStream(Struct, eq=False):
    """One stream of one rank on a screen.

    rank:  -1 for the text of several ranks
    """

    screen: Screen
    prefix: bytes
    buffer: LineBuffer = field(default_factory=LineBuffer)
    bar_shown_at: float = float("-inf")
    rank: int = -1

    def __post_init__(self) -> None:
        self.buffer.drops_cursor = self.screen.colour

    def show(self, text: bytes) -> None:
        self.screen.write(self.screen.interleaver.render(self, self.prefix, text))


def rank_prefix(rank: int, size: int, *, colour: bool, host: str = "") -> bytes:
    """Return the tag "[3] ", or "[3 h2] ", padded after the bracket to the width of the largest rank."""
    padding = " " * (len(f"{size - 1}") - len(f"{rank}") + 1)
    tag = f"[{rank} {host}]" if host else f"[{rank}]"
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
