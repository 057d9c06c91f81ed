"""What a dying worker says: which exception, with the frames of the user's program only."""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from types import TracebackType

from jaxrun import protocol
from jaxrun.protocol.worker_messages import Failed, ThreadFailed
from jaxrun_runtime import program
from jaxrun_runtime.agent_channel import AgentChannel

EXIT_INTERRUPTED = 130

_RUNTIME_DIR = os.path.dirname(os.path.abspath(__file__)) + os.sep
_PROGRAMS = _RUNTIME_DIR + "programs" + os.sep
_PROTOCOL_DIR = os.path.dirname(os.path.abspath(protocol.__file__)) + os.sep
_CLOUDPICKLE_FILE = os.sep + os.path.join("cloudpickle", "cloudpickle.py")
_MESSAGE_LIMIT = 20_000
_TRACEBACK_LIMIT = 200_000
_NOTE_LIMIT = 2_000
_NOTES_LIMIT = 20
_NAME_LIMIT = 200


def describe_failure(error: BaseException, rank: int, stage: str) -> Failed:
    """The last words for `error`; `stage` is "start", "join", "prove" or "program"."""
    return Failed(
        rank=rank,
        time=time.time(),
        stage=stage,
        status=_status(error),
        error=type(error).__name__,
        message=clip_text(_text(error), _MESSAGE_LIMIT),
        traceback=format_traceback(error, in_program=stage == "program"),
        notes=tuple(_notes(error)),
    )


def format_traceback(error: BaseException, *, in_program: bool = True) -> str:
    """As Python prints it, without the frames above the user's program; empty for a sys.exit.

    An error that comes from our own code alone keeps its frames, unless it is about the program
    (`in_program`), which may be missing or not be Python.
    """
    if isinstance(error, SystemExit):
        return ""
    try:
        trim_traceback(error, in_program=in_program)
        text = "".join(traceback.format_exception(error))
    except Exception as trouble:  # anything can be an exception's attribute
        text = f"{type(error).__name__} (its traceback cannot be shown: {type(trouble).__name__})\n"
    return clip_text(text, _TRACEBACK_LIMIT)


def trim_traceback(error: BaseException, *, in_program: bool = True) -> None:
    """Cut the frames of jaxrun, its pickler, runpy and the import system off the top of all the error's tracebacks."""
    seen: set[int] = set()
    todo: list[BaseException | None] = [error]
    while todo:
        current = todo.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        rest = _skip_internal_frames(current.__traceback__)
        if rest is not None or in_program or isinstance(current, SyntaxError):
            current.__traceback__ = rest
        todo += [current.__cause__, current.__context__]
        if isinstance(current, BaseExceptionGroup):
            todo += current.exceptions


def report_thread_failures(link: AgentChannel, rank: int) -> None:
    """Report what Python only prints: a thread that ended by an exception."""
    before = threading.excepthook

    def report(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None and not isinstance(args.exc_value, SystemExit):
            with contextlib.suppress(Exception):
                name = args.thread.name if args.thread else "unknown"
                link.send(
                    ThreadFailed(
                        rank=rank,
                        time=time.time(),
                        thread=clip_text(name, _NAME_LIMIT),
                        error=type(args.exc_value).__name__,
                        traceback=format_traceback(args.exc_value),
                    )
                )
        before(args)

    threading.excepthook = report


def print_error(error: BaseException) -> None:
    """Print as Python does at the end of a program, by the program's own sys.excepthook if it has set one."""
    if isinstance(error, SystemExit):
        if not isinstance(error.code, (int, type(None))):
            with contextlib.suppress(Exception):  # Python is silent too where it cannot print
                print(error.code, file=sys.stderr)
        return
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except Exception as trouble:
        print("Error in sys.excepthook:", file=sys.stderr)
        sys.__excepthook__(type(trouble), trouble, _skip_internal_frames(trouble.__traceback__))
        print("\nOriginal exception was:", file=sys.stderr)
        sys.__excepthook__(type(error), error, error.__traceback__)


def clip_text(text: str, limit: int) -> str:
    """About `limit` characters of `text` at most, less its middle, in a form that every terminal takes."""
    # Undecodable bytes in a message become surrogates, which JSON and terminals refuse.
    clean = text.encode("utf-8", "backslashreplace").decode()
    if len(clean) <= limit:
        return clean
    half = limit // 2
    return f"{clean[:half]}\n… {len(clean) - limit} characters left out …\n{clean[-half:]}"


def _skip_internal_frames(frames: TracebackType | None) -> TracebackType | None:
    while frames is not None and _is_internal(frames.tb_frame.f_code.co_filename):
        frames = frames.tb_next
    return frames


def _is_internal(filename: str) -> bool:
    own = filename.startswith((_RUNTIME_DIR, _PROTOCOL_DIR)) and not filename.startswith(_PROGRAMS)
    return own or filename.startswith("<frozen ") or filename == runpy.__file__ or filename.endswith(_CLOUDPICKLE_FILE)


def _status(error: BaseException) -> int:
    if isinstance(error, SystemExit):
        return program.exit_status(error)
    return EXIT_INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1


def _text(error: BaseException) -> str:
    if isinstance(error, SystemExit) and isinstance(error.code, (int, type(None))):
        return ""
    try:
        return str(error.code if isinstance(error, SystemExit) else error)
    except Exception:
        return "(its message could not be made)"


def _notes(error: BaseException) -> Iterator[str]:
    with contextlib.suppress(Exception):  # the program may have put anything there
        for note in list(getattr(error, "__notes__", ()))[:_NOTES_LIMIT]:
            yield clip_text(str(note), _NOTE_LIMIT)
