"""Writes about exceptions: the choice in a chain of them, the exceptions that threads handle, and waits in JAX."""

from __future__ import annotations

from jaxrun.analysis.diagnosis.error_choice import ErrorChoice, HandledError, error_frame
from jaxrun.protocol.error_chain import (
    GET_KEY,
    GET_KEY_BYTES,
    GET_LIVE_NODES,
    WAIT_AT_BARRIER,
    BackgroundSave,
    ChainedError,
    CoordinationWait,
)

_MAX_MESSAGE_CHARACTERS = 200
_MAX_NAME_CHARACTERS = 80
_KINDS = {WAIT_AT_BARRIER: "barrier", GET_KEY: "key", GET_KEY_BYTES: "key"}


def format_error(error: ChainedError) -> str:
    """Write `ValueError: bad record in shard 1`, the first line of its text only."""
    line = next((line.strip() for line in error.message.splitlines() if line.strip()), "")
    if len(line) > _MAX_MESSAGE_CHARACTERS:
        line = f"{line[: _MAX_MESSAGE_CHARACTERS - 1]}…"
    return f"{error.error}: {line}" if line else error.error


def format_with_place(error: ChainedError) -> str:
    """Write `ValueError: bad record in shard 1 (data.py:31 load)`."""
    frame = error_frame(error)
    return f"{format_error(error)} ({frame})" if frame is not None else format_error(error)


def format_choice(choice: ErrorChoice) -> str:
    """Write `ValueError: bad record in shard 1 (data.py:31 load)`, with its cause if it has one."""
    return f"{format_with_place(choice.chosen)}{_caused(choice)}"


def describe_choice(choice: ErrorChoice) -> str:
    """Write what a rank has raised: `ValueError`, or with its message where the traceback does not end with it."""
    if choice.chosen.in_callback:
        return f"{format_error(choice.chosen)} in a callback of JAX"
    if choice.followed is not None:
        text = f"{format_error(choice.chosen)}{_caused(choice)}"
        return f"{text}, and {choice.followed.error} while it handled that"
    return f"{choice.chosen.error}{_caused(choice)}"


def describe_handled(handled: HandledError, who: str, does: str, *, many: bool = False) -> str:
    """Write `rank 1 handles ValueError: bad record (data.py:31 load) and waits in JAX's barrier 'close' at …`.

    who:   the ranks, "rank 1"
    does:  what their main threads do, `waits in …`
    """
    error = format_choice(handled.choice)
    if not handled.thread:
        return f"{who} {'handle' if many else 'handles'} {error} and {does}"
    thread = f"thread {handled.thread}"
    doing = f"waits {describe_wait(handled.wait)}" if handled.wait is not None else f"is at {handled.place}"
    if handled.save is None:
        return f"{who}'s {thread} handles {error} and {doing}"
    left = f"; its {thread} {doing}" if handled.place else ""
    return f"{who}'s background save{_of_step(handled.save)} failed with {error}{left}"


def describe_meanwhile(handled: HandledError, who: str) -> str:
    """Write `while rank 1 handled ValueError: bad record`, or `after rank 1's background save had failed with …`."""
    error = f"{format_error(handled.choice.chosen)}{_caused(handled.choice)}"
    if handled.save is None:
        thread = f"'s thread {handled.thread}" if handled.thread else ""
        return f"while {who}{thread} handled {error}"
    return f"after {who}'s background save{_of_step(handled.save)} had failed with {error}"


def describe_wait(wait: CoordinationWait) -> str:
    """Write `in JAX's barrier 'close'`, `for the key 'addresses/3' of JAX's coordination service`."""
    if wait.function == GET_LIVE_NODES:
        return "in JAX's live_devices"
    kind = _KINDS.get(wait.function, "barrier")
    name = f" {_shorten(wait.name)!r}" if wait.name else ""
    if kind == "key":
        return f"for {'the' if name else 'a'} key{name} of JAX's coordination service"
    return f"in JAX's barrier{name}" if name else "in a barrier of JAX's coordination service"


def format_frames(error: ChainedError) -> str:
    """Write an exception like Python's traceback, without lines of source; empty if it has no frames."""
    if not error.places:
        return ""
    frames = [f'  File "{file}", line {line}, in {function}' for file, line, function in error.places]
    return "\n".join(["Traceback (most recent call last):", *frames, format_error(error)])


def _of_step(save: BackgroundSave) -> str:
    return f" of step {save.step}" if save.step is not None else ""


def _caused(choice: ErrorChoice) -> str:
    return f", caused by {format_error(choice.cause)}" if choice.cause is not None else ""


def _shorten(name: str) -> str:
    return name if len(name) <= _MAX_NAME_CHARACTERS else f"{name[: _MAX_NAME_CHARACTERS - 1]}…"
