"""What a dying worker says: which exception, with the frames of the user's program only."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from types import TracebackType

from jaxrun.contract import Failed, ThreadFailed

from . import program
from .link import AgentGone, Link

_OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep
_MESSAGE_LIMIT = 20_000
_TRACEBACK_LIMIT = 200_000


def describe(error: BaseException, rank: int, stage: str) -> Failed:
    """The last words for `error`; `stage` is "start", "join", "prove" or "program"."""
    return Failed(
        rank=rank,
        time=time.time(),
        stage=stage,
        status=_status(error),
        error=type(error).__name__,
        message=_clip(_text(error), _MESSAGE_LIMIT),
        traceback=_clip(format_traceback(error), _TRACEBACK_LIMIT),
        notes=tuple(str(note) for note in getattr(error, "__notes__", ())),
    )


def format_traceback(error: BaseException) -> str:
    """As Python prints it, without the frames above the user's program; empty for a sys.exit."""
    if isinstance(error, SystemExit):
        return ""
    trim(error)
    return "".join(traceback.format_exception(error))


def trim(error: BaseException) -> None:
    """Cut the frames of jaxrun, runpy and the import system off the top of the error's traceback, and of its causes."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        current.__traceback__ = _user_part(current.__traceback__)
        current = current.__cause__ or current.__context__


def watch_threads(link: Link, rank: int) -> None:
    """Report what Python only prints: a thread that ended by an exception."""
    before = threading.excepthook

    def report(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None and not isinstance(args.exc_value, SystemExit):
            name = args.thread.name if args.thread else "unknown"
            words = ThreadFailed(
                rank=rank,
                time=time.time(),
                thread=name,
                error=type(args.exc_value).__name__,
                traceback=_clip(format_traceback(args.exc_value), _TRACEBACK_LIMIT),
            )
            try:
                link.send(words)
            except AgentGone:
                pass
        before(args)

    threading.excepthook = report


def _user_part(frames: TracebackType | None) -> TracebackType | None:
    first = frames
    while first is not None and _is_scaffold(first.tb_frame.f_code.co_filename):
        first = first.tb_next
    return first if first is not None else frames


def _is_scaffold(filename: str) -> bool:
    own = filename.startswith(_OURS) and not filename.startswith(_OURS + "programs")
    return own or filename.startswith("<frozen ") or os.path.basename(filename) == "runpy.py"


def _status(error: BaseException) -> int:
    if isinstance(error, SystemExit):
        return program.exit_status(error)
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def _text(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return "" if isinstance(error.code, (int, type(None))) else str(error.code)
    try:
        return str(error)
    except Exception:
        return "(its message could not be made)"


def _clip(text: str, limit: int) -> str:
    # Undecodable bytes in a message become surrogates, which JSON and terminals refuse.
    clean = text.encode("utf-8", "backslashreplace").decode()
    if len(clean) <= limit:
        return clean
    half = limit // 2
    return f"{clean[:half]}\n… {len(clean) - limit} characters left out …\n{clean[-half:]}"


def print_error(error: BaseException) -> None:
    """Print as Python would at the end of a program, by the program's own sys.excepthook if it has set one."""
    if isinstance(error, SystemExit):
        if not isinstance(error.code, (int, type(None))):
            print(error.code, file=sys.stderr)
        return
    sys.excepthook(type(error), error, error.__traceback__)
