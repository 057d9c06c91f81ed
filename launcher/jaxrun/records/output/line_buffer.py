"""Splits one stream of one rank at its newlines. Pure: no I/O, no clock.

LineBuffer works on whole chunks; Python never looks at single lines. Bytes are not decoded, so text that is not UTF-8
passes unchanged. Only a carriage return has a meaning: it overwrites its line. For a terminal, sequences that move the
cursor, hide it or erase are left out, as other ranks' lines are there, too; colours stay.
"""

from __future__ import annotations

import re

from jaxrun.records.output.noise import NoiseFilter, may_be_noise

# "\r\n" ends a line like "\n". Without the look-behind, the match of a long run of "\r" would start at each byte.
_RETURNS_AT_END = re.compile(rb"(?<!\r)\r+\n")
_OVERWRITTEN = re.compile(rb"(?m)^.*\r")


_CURSOR_SEQUENCE = re.compile(rb"\x1b\[[0-?]*[ -/]*[@-ln-~]")  # every control sequence except colours


class LineBuffer:
    """Returns text that is ready for the screen; `pending` waits for its newline.

    A "\\r" at the start of `pending`, or of the text from `feed` and `flush_partial`, means that the text after it
    replaces the part of the same line that was returned earlier; a "\\r" at the end of `pending` means this once text
    follows.
    """

    __slots__ = ("_noise", "drops_cursor", "line_started", "pending")

    def __init__(self) -> None:
        self.pending = b""
        self.line_started = False
        self.drops_cursor = False
        self._noise = NoiseFilter()

    def feed(self, data: bytes) -> bytes:
        """Return the lines that `data` completes, in one piece, each reduced to what its last "\\r" left visible."""
        text = self.pending + data
        if self.drops_cursor and b"\x1b" in text:
            text = _CURSOR_SEQUENCE.sub(b"", text)
        cut = text.rfind(b"\n") + 1
        whole, rest = text[:cut], text[cut:]
        if b"\r" in text:
            whole, rest = _collapse_lines(whole), _collapse_rest(rest)
        self.pending = rest
        if whole:
            if not self.line_started:
                whole = whole.removeprefix(b"\r")
            whole = self._noise.remove(whole, continues=self.line_started)
            self.line_started = False
        return whole

    def flush_partial(self) -> bytes:
        """Return the part of the last line that was not returned yet; the line continues with the next `feed`."""
        text = self.pending.rstrip(b"\r")
        if not text:
            return b""
        self.pending = self.pending[len(text) :]
        shown = text if self.line_started else text.removeprefix(b"\r")
        self.line_started = True
        return shown

    def finish(self) -> bytes:
        """Return the last line with a newline added; empty if the stream ended at a newline."""
        unfinished = self.line_started or self.pending.strip(b"\r")
        return self.feed(b"\n") if unfinished else b""

    @property
    def has_partial(self) -> bool:
        """Whether `flush_partial` has text that may be shown unfinished: pieces of Gloo's lines may not."""
        return self.pending not in (b"", b"\r") and not may_be_noise(self.pending)

    @property
    def is_progress_bar(self) -> bool:
        """Whether the unfinished line is a progress bar: it has a carriage return."""
        return b"\r" in self.pending


def _collapse_lines(text: bytes) -> bytes:
    """Remove text that a carriage return has overwritten from each line; the first keeps one "\\r" if it had any."""
    text = _OVERWRITTEN.sub(b"\r", _RETURNS_AT_END.sub(b"\n", text))
    return text.replace(b"\n\r", b"\n")


def _collapse_rest(text: bytes) -> bytes:
    """Return the last state of an unfinished line: after a "\\r" if it overwrote text, before a final one."""
    state = text.rstrip(b"\r")
    ended = b"\r" if len(state) < len(text) else b""
    return state[max(state.rfind(b"\r"), 0) :] + ended
