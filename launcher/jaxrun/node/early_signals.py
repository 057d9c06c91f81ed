"""Signals to a process of jaxrun from its first line on, until a SignalPipe makes them events.

    SIGINT            ends the process at once, or, where there is something to tidy up, raises KeyboardInterrupt
    SIGTERM, SIGHUP   end the process, as in any program
    SIGCHLD           must not stay blocked, or no end of a child would be noticed

A process inherits its signal mask. Processes of jaxrun block nothing, whatever the mask they were given: the programs
that they start get the given mask.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_EXIT_INTERRUPTED = 130
_given: frozenset[int] | None = None  # None: this process has kept the mask that it was given
_was_interrupted = False


def begin() -> None:
    """Call it in the first lines of a process."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # and not ignored, as after a shell's `&`
        signal.signal(signal.SIGINT, lambda *_: os._exit(_EXIT_INTERRUPTED))
    clear_mask()


def clear_mask() -> None:
    """Block no signal from now on. Those that wait arrive before this returns."""
    global _given
    _given = frozenset(signal.pthread_sigmask(signal.SIG_SETMASK, ()))


def given_mask() -> Iterable[int]:
    """Return the signals that the program which this process starts should find blocked."""
    return signal.pthread_sigmask(signal.SIG_BLOCK, ()) if _given is None else _given


def raise_interrupts() -> None:
    """Raise KeyboardInterrupt at SIGINT, unless it is ignored.

    Python drops an exception that is raised in a destructor or in a callback of a weak reference, of which each import
    has one: there, an interrupt ends the process at once.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        return
    sys.unraisablehook = _end_if_interrupted
    signal.signal(signal.SIGINT, _raise_interrupt)


def _raise_interrupt(*args: object) -> None:
    global _was_interrupted
    _was_interrupted = True
    raise KeyboardInterrupt


def was_interrupted() -> bool:
    """Whether KeyboardInterrupt has been raised. In a process that still runs, C code has dropped it."""
    return _was_interrupted


def _end_if_interrupted(dropped: Any) -> None:
    if issubclass(dropped.exc_type, KeyboardInterrupt):
        os._exit(_EXIT_INTERRUPTED)
    sys.__unraisablehook__(dropped)
