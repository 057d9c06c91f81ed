"""Finds the exception of a callback (jax.debug.callback, pure_callback, io_callback) in the error that JAX makes of it.

JAX quotes the whole stack of the callback in the text of a JaxRuntimeError, with all frames above it, and logs the same
exception before. Here the quoted exception becomes a traceback of its own, which begins in the callback, and the log
keeps one line of it.
"""

from __future__ import annotations

import logging
import re
import traceback
from pathlib import PurePath
from types import TracebackType

from msgspec import Struct

from jaxrun.stack_frames import is_jax, is_scaffold
from jaxrun_runtime import jax_private

_QUOTE = "Traceback (most recent call last):\n"
_QUOTED_AFTER = re.compile(r"\bcallback\b", re.IGNORECASE)  # as in "CpuCallback error calling callback: Traceback …"
_FRAME = re.compile(r'^  File "(?P<file>[^"\n]+)", line (?P<line>\d{1,9}), in (?P<function>.+)$')
_ENTRIES = re.compile(r"/jax/_src/(?:callback|debugging)\.py$")  # JAX's frames that call a program's callback
_LAST_LINE = re.compile(r"^(?:[\w.]+\.)?(?P<error>\w+)(?:: (?P<message>[\s\S]*))?$")
_CAUSED = "The above exception was the direct cause of the following exception:"  # as Python writes it
_MAX_LINE_CHARACTERS = 200

Place = tuple[str, int, str]


class QuotedError(Struct, frozen=True):
    """The exception of a callback, as JAX's error quotes it.

    places:         the callback's frames, innermost last: (file, line, function)
    outer_message:  the text of JAX's error without the quoted stack
    """

    error: str
    message: str
    places: tuple[Place, ...]
    outer_message: str

    def format(self) -> str:
        """Return its traceback as Python prints it, with lines of source, and with a final newline."""
        summary = traceback.StackSummary.from_list(
            [(file, line, function, None) for file, line, function in self.places]
        )
        last = f"{self.error}: {self.message}" if self.message else self.error
        return "".join([_QUOTE, *summary.format(), last, "\n"])


def find_quoted(text: str) -> QuotedError | None:
    """Return the exception of a callback that the text of an error quotes; None if it quotes none."""
    before, quote, quoted = text.partition(_QUOTE)
    if not quote or not _QUOTED_AFTER.search(before):
        return None
    quoted = quoted.rpartition(_QUOTE)[2]  # of a chain of exceptions, the last one
    lines = quoted.rstrip("\n").split("\n")
    frames = [match for line in lines if (match := _FRAME.match(line))]
    last = next((number for number, line in enumerate(lines) if line and not line.startswith(" ")), None)
    found = _LAST_LINE.match("\n".join(lines[last:])) if last is not None else None
    if found is None:
        return None
    places = tuple((frame["file"], int(frame["line"]), frame["function"]) for frame in frames)
    outer = f"{before.rstrip().removesuffix(':')}: {found[0]}"
    return QuotedError(found["error"], found["message"] or "", _in_callback(places), outer)


def separate(text: str, error_text: str) -> str:
    """Return a traceback with the quoted exception as one of its own before it; `error_text` is the error's message."""
    quoted = find_quoted(error_text)
    if quoted is None or error_text not in text:
        return text
    return f"{quoted.format()}\n{_CAUSED}\n\n{text.replace(error_text, quoted.outer_message, 1)}"


def shorten_log() -> None:
    """Reduce the exceptions of callbacks in JAX's log to one line each, because the error that follows quotes them."""
    jax_private.filter_callback_log(_shorten)


def _shorten(record: logging.LogRecord) -> bool:
    if record.exc_info and record.exc_info[1] is not None:
        error, frames = record.exc_info[1], record.exc_info[2]
        record.msg, record.args = f"{record.getMessage()}: {_one_line(error)}{_innermost(frames)}", ()
        record.exc_info = record.exc_text = None
    return True


def _one_line(error: BaseException) -> str:
    lines = traceback.format_exception_only(error)
    text = lines[-1].strip() if len(lines) == 1 else "".join(lines).strip().split("\n")[0]
    return text[:_MAX_LINE_CHARACTERS]


def _innermost(frames: TracebackType | None) -> str:
    places = [(entry.filename, entry.lineno, entry.name) for entry in traceback.extract_tb(frames)]
    own = [place for place in places if not (is_jax(place[0]) or is_scaffold(place[0]))]
    return f" ({PurePath(own[-1][0]).name}:{own[-1][1]} {own[-1][2]})" if own else ""


def _in_callback(places: tuple[Place, ...]) -> tuple[Place, ...]:
    entries = [number for number, place in enumerate(places) if _ENTRIES.search(place[0])]
    inner = places[entries[-1] + 1 :] if entries else ()
    return inner or tuple(place for place in places if not (is_jax(place[0]) or is_scaffold(place[0])))
