"""Recognizes errors that are only ever caused by the end of another process, and says what became of their rank.

In a chain of exceptions the first one decides: a program's own error that it raises while it handles a broken
connection is a consequence too. Errors of the user's own network code ("Connection reset by peer" without Gloo or
NCCL) do not count as consequences.
"""

from __future__ import annotations

import enum
import re

from jaxrun.lazy_pattern import lazy_pattern


class Fate(enum.StrEnum):
    """What became of a rank that had no fault of its own; each value completes "rank 3 …"."""

    STOPPED = "was stopped"
    FINISHED = "had finished"
    LOST_TOO = "was lost too"
    LOST_CONNECTION = "lost its connection"
    ENDED = "was ended by JAX"
    WAITED = "waited in vain"


# Matched in lower case, in this order. Seen with JAX 0.8 to 0.12 on CPU; the texts of NCCL are from its sources.
_SIGNS = {
    Fate.LOST_CONNECTION: (
        r"gloo\b.{0,300}?(?:closed by peer|reset by peer|broken pipe|refused|no route to host|read error)",
        r"gloo context initialization failed(?!: deadline_exceeded)",
        r"nccl\b.{0,300}?(?:process exited|network error|remote error|closed by remote peer)",
        r"ncclremoteerror",
        r"remote process exited or there was a network error",
        r"the connection to rank \d+, for snapshots, was lost",
    ),
    Fate.ENDED: (
        r"terminating process because the jax distributed service detected fatal errors",
        r"this most likely indicates that another task died",
        r"failed to send rpc to coordination service",
        r"leader task was preempted/died",
        r"the following tasks are unhealthy",
        r"stopped sending heartbeats",
        r"error from coordination service",
        r"shutdown barrier",
        r"coordination.{0,20} service.{0,200}?(?:unavailable|socket closed|connection reset)",
    ),
    Fate.WAITED: (
        r"gloo\b.{0,300}?(?:timed out|timeout)",
        r"getkeyvalue\(\) timed out",
        r"some timed out task names",
        r"barrier timed out",
        r"getting local topologies failed.{0,300}?timed out",
    ),
}
_PATTERNS = {fate: lazy_pattern("|".join(signs)) for fate, signs in _SIGNS.items()}
_NO_COORDINATOR = lazy_pattern(r"failed to send rpc to coordination service|leader task was preempted/died")
# Gloo also reports faults of the program itself, in texts that a pattern above would match.
_OWN_FAULTS = ("received data size doesn't match expected size", "collective mismatch")
_MAX_CHARACTERS = 10_000  # the end of a text is searched, where the error stands

_CAUSED = "The above exception was the direct cause of the following exception:"
_MEANWHILE = "During handling of the above exception, another exception occurred:"
_SEPARATOR = lazy_pattern(f"^[ |]*(?:{re.escape(_CAUSED)}|{re.escape(_MEANWHILE)})$", re.MULTILINE)
_GROUP = "Exception Group Traceback"
_GROUP_MARGIN = lazy_pattern(r"^(?:  )+[|+] ?", re.MULTILINE)
_NOT_INDENTED = lazy_pattern(r"^[^ \n].*", re.MULTILINE)


class ErrorOrigin(enum.Enum):
    """The process in which an exception began."""

    OWN = "in the process that raised it"
    UNCLEAR = "perhaps in that process"
    OTHER = "in another process"


def find_consequence(text: str) -> Fate | None:
    """Return the fate of the rank according to the first consequence that `text` shows; None if it shows none."""
    text = text[-_MAX_CHARACTERS:].lower()
    if any(fault in text for fault in _OWN_FAULTS):
        return None
    return next((fate for fate, pattern in _PATTERNS.items() if pattern.search(text)), None)


def shows_lost_coordinator(text: str) -> bool:
    """Whether `text` shows that JAX ended a process because it no longer reached the coordinator, in rank 0."""
    return _NO_COORDINATOR.search(text[-_MAX_CHARACTERS:].lower()) is not None


def classify_error(message: str, traceback: str) -> ErrorOrigin:
    """Say where an exception began, by its message and its traceback (with its chain, as Python prints it)."""
    if _GROUP in traceback:
        return ErrorOrigin.UNCLEAR if find_consequence(_messages(traceback)) else ErrorOrigin.OWN
    chain = _SEPARATOR.split(traceback)
    if len(chain) == 1:
        return ErrorOrigin.OTHER if find_consequence(f"{message}\n{_messages(traceback)}") else ErrorOrigin.OWN
    if find_consequence(_messages(chain[0])):
        return ErrorOrigin.OTHER
    if not find_consequence(f"{message}\n{_messages(chain[-1])}"):
        return ErrorOrigin.OWN
    # An error of the program came first: the connection broke while it was handled, or the program had handled it.
    return ErrorOrigin.UNCLEAR if _MEANWHILE in traceback else ErrorOrigin.OWN


def _messages(traceback: str) -> str:
    """Return the lines of a traceback that are not frames: the exceptions' own text."""
    if _GROUP in traceback:
        traceback = _GROUP_MARGIN.sub("", traceback)
    return "\n".join(_NOT_INDENTED.findall(traceback))
