"""A terminal, or the pipe or file in its place: how wide it is, and whether it shows colours."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import textwrap
from collections.abc import Mapping

from msgspec import Struct

PROSE_WIDTH = 100  # at which jaxrun wraps what it writes, in files too
_MIN_WIDTH = 40
_RED, _DIM, _RESET = "\x1b[1;31m", "\x1b[2m", "\x1b[0m"
# All control characters but tabs and line ends; those that turn the direction of text; and surrogates that
# stand for no byte of a file's name.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udc7f\udd00-\udfff]")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_PAINTED_LINE = re.compile(rf"({re.escape(_RED)}|{re.escape(_DIM)})(.*){re.escape(_RESET)}")  # as TerminalFormat paints


class TerminalFormat(Struct, frozen=True):
    """`width` is None for what is no terminal."""

    width: int | None = None
    colour: bool = False

    @classmethod
    def at(cls, fd: int, environ: Mapping[str, str]) -> TerminalFormat:
        """The terminal that is open as `fd`, if it is one. NO_COLOR and TERM=dumb want no colours."""
        plain = environ.get("NO_COLOR") or environ.get("TERM") == "dumb"
        width = terminal_width(fd)
        return cls(width, width is not None and not plain)

    def rewrap(self, text: str) -> str:
        """Wrap prose at the terminal's width, in place of PROSE_WIDTH; indented lines, as of a table, stay."""
        if self.width is None:
            return text
        width = max(self.width, _MIN_WIDTH)
        return "\n".join(wrap_prose(paragraph, width) for paragraph in _paragraphs(text))

    def red(self, text: str) -> str:
        return self._paint(text, _RED)

    def dim(self, text: str) -> str:
        return self._paint(text, _DIM)

    def _paint(self, text: str, code: str) -> str:
        if not self.colour:
            return text
        return "\n".join(f"{code}{line}{_RESET}" if line else line for line in text.split("\n"))


A_FILE = TerminalFormat()


def print_notice(text: str) -> None:
    """Print a line of jaxrun's own on stderr where no Output does, if there is any; that nobody reads is no error."""
    with contextlib.suppress(BrokenPipeError):
        if text:
            print(f"jaxrun: {text}", file=sys.stderr, flush=True)


def without_controls(text: str) -> str:
    """What files say, which anybody may have written, as it can be shown on a terminal without steering it.

    Colours are left out, except those of a whole line, which jaxrun gives.
    """
    return "\n".join(map(_clean_line, text.split("\n")))


def without_colours(text: str) -> str:
    """Remove the sequences that give text its colours."""
    return _COLOUR.sub("", text)


def in_one_line(text: str) -> str:
    """What a file says for one cell of a table."""
    return without_controls(" ".join(text.split()))


def _clean_line(line: str) -> str:
    painted = _PAINTED_LINE.fullmatch(line)
    if painted is not None:
        return f"{painted[1]}{_clean_line(painted[2])}{_RESET}"
    return _CONTROLS.sub("\N{REPLACEMENT CHARACTER}", _COLOUR.sub("", line))


def terminal_width(fd: int) -> int | None:
    """The columns of the terminal that is open as `fd`; None if it is no terminal, or does not say."""
    try:
        return os.get_terminal_size(fd).columns or None
    except OSError:
        return None


def wrap_prose(line: str, width: int = PROSE_WIDTH) -> str:
    """Wrap a line between its words, paths and addresses not broken; an indented one stays as it is."""
    if len(line) <= width or line[:1].isspace():
        return line
    return textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False)


def _paragraphs(text: str) -> list[str]:
    """The lines, those joined that wrapping at PROSE_WIDTH has separated."""
    joined: list[str] = []
    length = 0  # of the last line before it was joined to others
    for line in text.split("\n"):
        first_word = line.split(" ", 1)[0]
        continues = joined and first_word and length <= PROSE_WIDTH < length + 1 + len(first_word)
        if continues and not joined[-1][:1].isspace():
            joined[-1] += f" {line}"
        else:
            joined.append(line)
        length = len(line)
    return joined
