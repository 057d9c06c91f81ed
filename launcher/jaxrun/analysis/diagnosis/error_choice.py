"""Chooses the exception of a chain that names the cause, and finds the exceptions that the threads of a rank handle.

In a chain, the first exception that is not a consequence of another process's end is the cause: what is raised while it
is handled only follows from it, as where a clean-up fails. Where the program chose to raise another exception in its
place (`raise … from …`), that one counts.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from jaxrun import stack_frames
from jaxrun.analysis.diagnosis.consequences import find_consequence
from jaxrun.analysis.diagnosis.helpers import FailedSave
from jaxrun.analysis.diagnosis.stacks import Frame, Stack, main_stack, parse_dump
from jaxrun.protocol.error_chain import BackgroundSave, ChainedError, CoordinationWait, ErrorChain
from jaxrun.protocol.worker_messages import Failed

# By these, Python and its libraries pass on ordinary results.
_ROUTINE = {
    "StopIteration",
    "StopAsyncIteration",
    "GeneratorExit",
    "CancelledError",
    "Empty",
    "Full",
    "ImportError",
    "ModuleNotFoundError",
    "BlockingIOError",
    "InterruptedError",
}
# These are ordinary results where a library raises and handles them, without any function of the program between.
_ROUTINE_IN_LIBRARIES = {"KeyError", "IndexError", "AttributeError", "TypeError", "NotImplementedError", "TimeoutError"}
_ENDS = ("KeyboardInterrupt", "SystemExit")
_ORBAX = "orbax"


class ErrorChoice(Struct, frozen=True):
    """The exception of a chain that names the cause.

    cause:     the exception in whose place the program has raised `chosen`; None if it did not
    followed:  the exception that was raised last, while `chosen` was handled; None if there was none
    """

    chosen: ChainedError
    cause: ChainedError | None = None
    followed: ChainedError | None = None


class HandledError(Struct, frozen=True):
    """An exception that a thread handles while it waits or works, or that a background save has left.

    thread:    the thread's name; empty for the main thread
    place:     where the thread is, "train.py:88 close"; empty if it has ended
    wait:      its wait in JAX's coordination service; None if it is in none
    save:      the background save that has failed; None if the thread saves nothing
    """

    choice: ErrorChoice
    thread: str = ""
    place: str = ""
    wait: CoordinationWait | None = None
    save: BackgroundSave | None = None


def choose_error(chain: ErrorChain) -> ErrorChoice | None:
    """Return the choice; None for an empty chain."""
    if not chain:
        return None
    first = next((number for number, error in enumerate(chain) if not _is_consequence(error)), 0)
    at = first
    while chain[at].is_replaced and at + 1 < len(chain):
        at += 1
    cause = chain[first] if at > first else None
    return ErrorChoice(chain[at], cause, chain[-1] if at + 1 < len(chain) else None)


def error_name(failure: Failed) -> str:
    """Return the type's name of the exception that names the cause of a failure: "ValueError"."""
    choice = choose_error(failure.chain)
    return choice.chosen.error if choice is not None else failure.error


def find_handled_errors(dump: str) -> tuple[HandledError, ...]:
    """Return the exceptions that the threads of a rank handle, the main thread's first; without routine ones."""
    main = main_stack(dump)
    others = [stack for stack in parse_dump(dump) if stack != main]
    found = (_find_handled(stack, main, is_main=stack is main) for stack in [main, *others])
    return tuple(error for error in found if error is not None)


def error_frame(error: ChainedError) -> Frame | None:
    """Return the program's innermost frame through which an exception has passed, else the innermost one of all."""
    frames = [Frame(*place) for place in reversed(error.places)]
    own = stack_frames.find_program_frames([frame.file for frame in frames])
    return frames[own[0]] if own else next(iter(frames), None)


def _find_handled(stack: Stack, main: Stack, *, is_main: bool) -> HandledError | None:
    notable = _without_routine(stack.notes.handled)
    choice = choose_error(notable)
    if choice is None:
        return None
    place = str(stack.users[0]) if stack.users else ""
    saves = not is_main and any(frame.library == _ORBAX for frame in stack.frames)
    save = (main.notes.save or BackgroundSave(None)) if saves else None
    return HandledError(choice, "" if is_main else stack.name or "without a name", place, stack.coordination_wait, save)


def find_interrupted_error(failure: Failed | None, saves: Sequence[FailedSave]) -> HandledError | None:
    """Return the exception that a rank handled when an interrupt or sys.exit ended it, or that a save has left."""
    chain = _without_routine(failure.chain) if failure is not None and failure.error in _ENDS else ()
    choice = choose_error(chain)
    if choice is not None and choice.chosen.error not in _ENDS:
        return HandledError(choice)
    return find_failed_save(saves)


def find_failed_save(saves: Sequence[FailedSave]) -> HandledError | None:
    """Return the error of the last background save that has failed."""
    choice = choose_error(saves[-1].chain) if saves else None
    return HandledError(choice, saves[-1].thread, save=BackgroundSave(saves[-1].step)) if choice is not None else None


def _without_routine(chain: ErrorChain) -> ErrorChain:
    kept = [error for error in chain if not _is_routine(error)]
    # What follows a routine exception was not raised in place of it.
    return tuple(replace(error, is_replaced=error.is_replaced and error is not kept[-1]) for error in kept)


def _is_routine(error: ChainedError) -> bool:
    files = [file for file, _, _ in error.places]
    if error.error in _ROUTINE or not files:
        return True
    if any(map(stack_frames.is_programs, files)):
        return False
    return error.error in _ROUTINE_IN_LIBRARIES or all(map(stack_frames.is_jax, files))


def _is_consequence(error: ChainedError) -> bool:
    """Whether an exception follows from another process's end, or from a signal or a sys.exit that ends the program."""
    return error.error in _ENDS or find_consequence(f"{error.error}: {error.message}") is not None
