"""Reports of failures for the launcher: the exception, with a traceback that begins in the user's program."""

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

from jaxrun.protocol.error_chain import ErrorChain
from jaxrun.protocol.worker_messages import Failed, ThreadFailed, WorkerStage
from jaxrun.stack_frames import is_ours
from jaxrun_runtime import callback_errors, error_chains, run_program
from jaxrun_runtime.agent_channel import AgentChannel
from jaxrun_runtime.unsupported import UsedTooEarlyError

EXIT_INTERRUPTED = 130  # 128 + SIGINT

_HERE = os.path.dirname(os.path.abspath(__file__))
# Files with functions that replace a library's function and call it.
_WRAPPER_FILES = {
    os.path.join(_HERE, f"{name}.py")
    for name in (
        "checkpoints",
        "coordination_waits",
        "future_errors",
        "import_watch",
        "jax_private",
        "make_mesh",
        "profiles",
        "unsupported",
    )
}
_CLOUDPICKLE_FILE = os.sep + os.path.join("cloudpickle", "cloudpickle.py")
# The most characters that are sent, and the most notes of an exception.
_MAX_MESSAGE_LENGTH = 20_000
_MAX_TRACEBACK_LENGTH = 200_000
_MAX_NOTE_LENGTH = 2_000
_MAX_THREAD_NAME_LENGTH = 200
_MAX_NOTES = 20


def describe_failure(error: BaseException, rank: int, stage: WorkerStage = WorkerStage.PROGRAM) -> Failed:
    """Return the report of `error`."""
    is_programs = stage == WorkerStage.PROGRAM or isinstance(error, UsedTooEarlyError)
    chain = _chain(error)
    return Failed(
        rank=rank,
        time=time.time(),
        stage=stage,
        status=_status(error),
        error=type(error).__name__,
        message=clip_text(_text(error), _MAX_MESSAGE_LENGTH),
        traceback=format_traceback(error, in_program=is_programs),
        notes=tuple(_notes(error)),
        chain=chain if len(chain) > 1 else (),
    )


def format_traceback(error: BaseException, *, in_program: bool = True) -> str:
    """Return the traceback as Python prints it, without the frames above the user's program; empty for a sys.exit.

    in_program:  whether the program was running. If it was not, an error in jaxrun's own code keeps its frames.
    """
    if isinstance(error, SystemExit):
        return ""
    try:
        trim_traceback(error, in_program=in_program)
        text = callback_errors.separate("".join(traceback.format_exception(error)), _text(error))
    except BaseException as secondary:  # the error's class may run any code for its attributes, even sys.exit
        text = f"{type(error).__name__} (its traceback cannot be shown: {type(secondary).__name__})\n"
    return clip_text(text, _MAX_TRACEBACK_LENGTH)


def trim_traceback(error: BaseException, *, in_program: bool = True) -> None:
    """Remove frames that are not the program's from the traceback of `error`, its causes and contexts.

    These are the outer frames of jaxrun, cloudpickle, runpy and the import system, and the frames of jaxrun's wrappers
    around functions of JAX and orbax.
    """
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
            _unlink_wrappers(rest)
        todo += [current.__cause__, current.__context__]
        if isinstance(current, BaseExceptionGroup):
            todo += current.exceptions


def report_thread_failures(channel: AgentChannel, rank: int) -> None:
    """Send a ThreadFailed for each thread that ends by an exception. Python prints the exception as usual."""
    before = threading.excepthook

    def report(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None and not isinstance(args.exc_value, SystemExit):
            with contextlib.suppress(Exception):
                name = args.thread.name if args.thread else "unknown"
                channel.send(
                    ThreadFailed(
                        rank=rank,
                        time=time.time(),
                        thread=clip_text(name, _MAX_THREAD_NAME_LENGTH),
                        error=type(args.exc_value).__name__,
                        traceback=format_traceback(args.exc_value),
                        chain=_chain(args.exc_value),
                    )
                )
        before(args)

    threading.excepthook = report


def print_error(error: BaseException) -> None:
    """Print the error as Python does at the end of a program, with the program's own sys.excepthook if it has one."""
    if isinstance(error, SystemExit):
        if not isinstance(error.code, (int, type(None))):
            with contextlib.suppress(BaseException):  # Python ignores errors here, too
                print(error.code, file=sys.stderr)
        return
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except BaseException as secondary:
        print("Error in sys.excepthook:", file=sys.stderr)
        sys.__excepthook__(type(secondary), secondary, _skip_internal_frames(secondary.__traceback__))
        print("\nOriginal exception was:", file=sys.stderr)
        sys.__excepthook__(type(error), error, error.__traceback__)


def clip_text(text: str, limit: int) -> str:
    """Return `text` as valid Unicode, without its middle if it has more than `limit` characters."""
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


def _unlink_wrappers(frames: TracebackType | None) -> None:
    """Remove the frames of jaxrun's wrappers, except the first frame."""
    kept, between = frames, frames.tb_next if frames is not None else None
    while kept is not None and between is not None:
        if between.tb_frame.f_code.co_filename not in _WRAPPER_FILES:
            kept.tb_next, kept = between, between
        between = between.tb_next


def _is_internal(filename: str) -> bool:
    return is_ours(filename) or filename == runpy.__file__ or filename.endswith(_CLOUDPICKLE_FILE)


def _chain(error: BaseException) -> ErrorChain:
    try:
        return error_chains.describe_chain(error, lambda one: clip_text(_text(one), _MAX_MESSAGE_LENGTH))
    except Exception:  # of a class whose attributes are not what Python's are
        return ()


def _status(error: BaseException) -> int:
    if isinstance(error, SystemExit):
        return run_program.exit_status(error)
    return EXIT_INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1


def _text(error: BaseException) -> str:
    if isinstance(error, SystemExit) and isinstance(error.code, (int, type(None))):
        return ""
    try:
        return str(error.code if isinstance(error, SystemExit) else error)
    except BaseException:  # even a sys.exit, which would end this rank before its report
        return "(its message could not be made)"


def _notes(error: BaseException) -> Iterator[str]:
    with contextlib.suppress(BaseException):  # the program may have put anything into __notes__
        for note in list(getattr(error, "__notes__", ()))[:_MAX_NOTES]:
            yield clip_text(str(note), _MAX_NOTE_LENGTH)
