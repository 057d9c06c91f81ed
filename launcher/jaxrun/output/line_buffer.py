"""A worker's bytes as lines on a screen that many share. Pure: no I/O, no clock.

`Lines` cuts one stream of one rank at its newlines; `Layout` gives every line its prefix and knows whose
unfinished line the screen shows. Both work on whole chunks: Python never looks at single lines. Bytes are not
decoded, so what is not UTF-8 passes as it is; only a carriage return means something: it overwrites its line.
"""

from __future__ import annotations

import re
from collections.abc import Hashable

# "\r\n" ends a line like "\n". Without the look-behind a long run of "\r" is tried at each of its bytes.
_RETURNS_AT_END = re.compile(rb"(?<!\r)\r+\n")
_OVERWRITTEN = re.compile(rb"(?m)^.*\r")
# What Gloo says whenever it has connected: true of every run that works, so nobody needs to see it.
_GLOO = re.compile(
    rb"(?m)^\[Gloo\] Rank \d+ is connected to \d+ peer ranks\. "
    rb"Expected number of connected peer ranks is : \d+\n"
)
_GLOO_MARK = b"[Gloo]"


class LineBuffer:
    """One stream of one rank: what is ready for the screen is returned, the `rest` waits for its newline.

    A "\\r" at the start of `rest`, or of what `feed` and `partial` return, says that the text after it
    replaces the part of the same line that was returned earlier; one at the end of `rest` does so once text
    follows.
    """

    __slots__ = ("line_started", "pending")

    def __init__(self) -> None:
        self.pending = b""
        self.line_started = False

    def feed(self, data: bytes) -> bytes:
        """The lines that `data` completes, in one piece, each collapsed to what its last "\\r" left of it."""
        text = self.pending + data
        cut = text.rfind(b"\n") + 1
        whole, rest = text[:cut], text[cut:]
        if b"\r" in text:
            whole, rest = _collapse_lines(whole), _collapse_rest(rest)
        self.pending = rest
        if whole:
            if not self.line_started:
                whole = whole.removeprefix(b"\r")
                if _GLOO_MARK in whole:
                    whole = _GLOO.sub(b"", whole)
            self.line_started = False
        return whole

    def flush_partial(self) -> bytes:
        """What there is of the last line and was not returned yet; the line goes on with the next `feed`."""
        text = self.pending.rstrip(b"\r")
        if not text:
            return b""
        self.pending = self.pending[len(text) :]
        shown = text if self.line_started else text.removeprefix(b"\r")
        self.line_started = True
        return shown

    def finish(self) -> bytes:
        """The last line, with the newline that it lacks; empty if the stream ended at a newline."""
        unfinished = self.line_started or self.pending.strip(b"\r")
        return self.feed(b"\n") if unfinished else b""

    @property
    def has_partial(self) -> bool:
        """Whether `partial` has text to return that may be shown unfinished: Gloo's fragments may not."""
        return self.pending not in (b"", b"\r") and not self.pending.startswith(_GLOO_MARK)

    @property
    def is_progress_bar(self) -> bool:
        """Whether the unfinished line is a progress bar: it has a carriage return."""
        return b"\r" in self.pending


class Interleaver:
    """One screen: gives lines their prefixes and keeps unfinished lines from running into others."""

    def __init__(self, *, overwrites: bool = False) -> None:
        """`overwrites`: a terminal, where a line can be drawn anew in its place instead of below."""
        self._redraw = b"\r\x1b[K" if overwrites else b"\n"
        self._owner: Hashable | None = None
        self._interrupted: set[Hashable] = set()

    def render(self, voice: Hashable, prefix: bytes, text: bytes) -> bytes:
        """The bytes that show `text`, which `Lines` of that voice returned."""
        if self._owner == voice:
            head = b""
            if text.startswith(b"\r"):
                head, text = self._redraw + prefix, text[1:]
        else:
            text = text.removeprefix(b"\r")
            if voice in self._interrupted:
                self._interrupted.discard(voice)
                text = text.removeprefix(b"\n")  # the interruption has ended that line already
            if not text:
                return b""
            head = self.interrupt() + prefix
        start = b"\n" + prefix
        if not text.endswith(b"\n"):
            self._owner = voice
            return head + text.replace(b"\n", start)
        self._owner = None
        return b"".join((head, text[:-1].replace(b"\n", start), b"\n"))

    def interrupt(self) -> bytes:
        """Ends the unfinished line, if one is shown, so that another's can begin: a newline or nothing."""
        if self._owner is None:
            return b""
        self._interrupted.add(self._owner)
        self._owner = None
        return b"\n"


def _collapse_lines(text: bytes) -> bytes:
    """Each line without what a carriage return has overwritten; the first keeps one "\\r" if it had any."""
    text = _OVERWRITTEN.sub(b"\r", _RETURNS_AT_END.sub(b"\n", text))
    return text.replace(b"\n\r", b"\n")


def _collapse_rest(text: bytes) -> bytes:
    """An unfinished line's last state, after a "\\r" if it overwrote text, before one if it ended so."""
    state = text.rstrip(b"\r")
    ended = b"\r" if len(state) < len(text) else b""
    return state[max(state.rfind(b"\r"), 0) :] + ended
