"""Chains of exceptions as values, and the lines about them that a rank adds to the stacks of its threads.

    Thread 0x00007f2c4e7fc6c0 [async_save] (most recent call first):
      File "train.py", line 88 in close
      Handles [{"error": "ValueError", "message": "bad record", …}]     (the exception that the thread handles)
      Waits {"function": "wait_at_barrier", "name": "close"}            (in JAX's coordination service)
      Saves {"step": 1}                                                 (only of the main thread)
      Keeps [{"error": "ValueError", "message": "bad record", …}]       (likewise: a future's, for which nobody asked)

An exception is being handled by a thread while it runs an `except`, a `finally` or an `__exit__`. What such code waits
for may never come, and until it ends nobody sees the exception. Python's own fault handler writes none of these lines.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from msgspec import Struct, to_builtins

from jaxrun.errors import ProtocolError
from jaxrun.protocol.codec import from_content

# The functions of JAX's client of the coordination service in which a process waits for others.
WAIT_AT_BARRIER = "wait_at_barrier"
GET_KEY, GET_KEY_BYTES = "blocking_key_value_get", "blocking_key_value_get_bytes"
GET_LIVE_NODES = "get_live_nodes"

_HANDLES, _WAITS, _SAVES, _KEEPS = "  Handles ", "  Waits ", "  Saves ", "  Keeps "
_MAX_ERRORS = 20  # of one chain


class ChainedError(Struct, frozen=True, forbid_unknown_fields=True):
    """One exception of a chain; the chain begins with the exception that was raised first.

    error, message:  its type's name and its text
    places:          the frames through which it has passed, innermost last: (file, line, function)
    is_replaced:     whether the program chose to raise the next exception of the chain in its place: by `raise … from`,
                     or by a `raise` of the handler itself. Otherwise the next one was raised by chance meanwhile
    in_callback:     whether it was raised in a callback of a compiled program; the next one only repeats its text
    """

    error: str
    message: str
    places: tuple[tuple[str, int, str], ...] = ()
    is_replaced: bool = False
    in_callback: bool = False


ErrorChain = tuple[ChainedError, ...]


class CoordinationWait(Struct, frozen=True, forbid_unknown_fields=True):
    """A call of JAX's coordination service in which a thread waits for other processes.

    function:  one of the names above
    name:      the barrier's or key's name; empty if unknown
    """

    function: str
    name: str = ""


class BackgroundSave(Struct, frozen=True, forbid_unknown_fields=True):
    """A save in the background, of the last step that the program has begun to save; None if it is unknown."""

    step: int | None


class ThreadNotes(Struct, frozen=True):
    """What the lines above say of a thread; each may be missing. `kept`: the exception of a future."""

    handled: ErrorChain = ()
    wait: CoordinationWait | None = None
    save: BackgroundSave | None = None
    kept: ErrorChain = ()


NO_NOTES = ThreadNotes()


def format_notes(notes: ThreadNotes) -> list[str]:
    """Return the lines, without line breaks and in ASCII."""
    lines = []
    for start, chain in ((_HANDLES, notes.handled), (_KEEPS, notes.kept)):
        if chain:
            shown = chain[:1] + chain[1:][-(_MAX_ERRORS - 1) :]
            lines.append(start + json.dumps(to_builtins(shown)))
    if notes.wait is not None:
        lines.append(_WAITS + json.dumps(to_builtins(notes.wait)))
    if notes.save is not None:
        lines.append(_SAVES + json.dumps(to_builtins(notes.save)))
    return lines


def parse_notes(lines: Sequence[str]) -> ThreadNotes:
    """Parse the lines of one thread. Other lines, and lines that are cut off, are left out."""
    handled: ErrorChain = ()
    kept: ErrorChain = ()
    wait, save = None, None
    for line in lines:
        try:
            if line.startswith(_HANDLES):
                handled = _parse_chain(line.removeprefix(_HANDLES))
            elif line.startswith(_KEEPS):
                kept = _parse_chain(line.removeprefix(_KEEPS))
            elif line.startswith(_WAITS):
                wait = from_content(CoordinationWait, json.loads(line.removeprefix(_WAITS)))
            elif line.startswith(_SAVES):
                save = from_content(BackgroundSave, json.loads(line.removeprefix(_SAVES)))
        except (ValueError, TypeError, RecursionError, ProtocolError):
            continue
    return ThreadNotes(handled, wait, save, kept) if handled or wait or save or kept else NO_NOTES


def _parse_chain(text: str) -> ErrorChain:
    return tuple(from_content(ChainedError, error) for error in list(json.loads(text))[:_MAX_ERRORS])
