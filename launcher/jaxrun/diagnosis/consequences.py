"""Texts that only ever are consequences of another process's end, and what became of the rank with them.

An exception is judged by the first of its chain: a program's own error, raised in the handling of a broken
connection, is a consequence too. Words of the user's own network code ("Connection reset by peer" without
Gloo or NCCL) are no sign.
"""

from __future__ import annotations

import enum
import re

_LOST = "lost its connection"
_ENDED = "was ended by JAX"
_WAITED = "waited in vain"

# In lower case, each with what became of the rank. Seen with JAX 0.8 to 0.12 on CPU; NCCL's from its sources.
_SIGNS = (
    (
        r"gloo\b.{0,300}?(?:closed by peer|reset by peer|broken pipe|refused|no route to host|read error)",
        _LOST,
    ),
    (r"gloo\b.{0,300}?(?:timed out|timeout)", _WAITED),
    (r"gloo context initialization failed", _LOST),
    (r"nccl\b.{0,300}?(?:process exited|network error|remote error|closed by remote peer)", _LOST),
    (r"ncclremoteerror", _LOST),
    (r"remote process exited or there was a network error", _LOST),
    (r"terminating process because the jax distributed service detected fatal errors", _ENDED),
    (r"this most likely indicates that another task died", _ENDED),
    (r"failed to send rpc to coordination service", _ENDED),
    (r"leader task was preempted/died", _ENDED),
    (r"the following tasks are unhealthy", _ENDED),
    (r"stopped sending heartbeats", _ENDED),
    (r"error from coordination service", _ENDED),
    (r"shutdown barrier", _ENDED),
    (r"coordination.{0,20} service.{0,200}?(?:unavailable|socket closed|connection reset)", _ENDED),
    (r"some timed out task names", _WAITED),
    (r"barrier timed out", _WAITED),
    (r"getting local topologies failed.{0,300}?timed out", _WAITED),
)
CONSEQUENCE_PATTERNS = tuple((re.compile(pattern), fate) for pattern, fate in _SIGNS)
# Gloo also says "failed" of a fault of the program itself.
_OWN = ("received data size doesn't match expected size", "collective mismatch")
_LIMIT = 10_000  # characters: an error stands at the end of its text

_CAUSED = "The above exception was the direct cause of the following exception:"
_MEANWHILE = "During handling of the above exception, another exception occurred:"
_SEPARATOR = re.compile(f"^[ |]*(?:{re.escape(_CAUSED)}|{re.escape(_MEANWHILE)})$", re.MULTILINE)
_GROUP = "Exception Group Traceback"
_GROUP_MARGIN = re.compile(r"^(?:  )+[|+] ?", re.MULTILINE)
_NOT_INDENTED = re.compile(r"^[^ \n].*", re.MULTILINE)


class ErrorOrigin(enum.Enum):
    """What an exception says of the process that raised it."""

    OWN = "its own fault"
    UNCLEAR = "perhaps its own"
    OTHER = "another's"


def describe_consequence(text: str) -> str:
    """What the first known sign in `text` says of its rank, after `rank 3 …`; empty if there is none."""
    text = text[-_LIMIT:].lower()
    if any(own in text for own in _OWN):
        return ""
    return next((what for pattern, what in CONSEQUENCE_PATTERNS if pattern.search(text)), "")


def classify_error(message: str, traceback: str) -> ErrorOrigin:
    """Whose fault is an exception with this message and traceback (with its chain, as Python prints it)?"""
    if _GROUP in traceback:
        return ErrorOrigin.UNCLEAR if describe_consequence(_errors(traceback)) else ErrorOrigin.OWN
    chain = _SEPARATOR.split(traceback)
    if len(chain) == 1:
        return ErrorOrigin.OTHER if describe_consequence(f"{message}\n{_errors(traceback)}") else ErrorOrigin.OWN
    if describe_consequence(_errors(chain[0])):
        return ErrorOrigin.OTHER
    if not describe_consequence(f"{message}\n{_errors(chain[-1])}"):
        return ErrorOrigin.OWN
    # An error of its own came first: the connection broke in its handling, or it had been dealt with before.
    return ErrorOrigin.UNCLEAR if _MEANWHILE in traceback else ErrorOrigin.OWN


def _errors(traceback: str) -> str:
    """The lines of a traceback that are no frames: the exceptions' own words."""
    if _GROUP in traceback:
        traceback = _GROUP_MARGIN.sub("", traceback)
    return "\n".join(_NOT_INDENTED.findall(traceback))
