"""The state of a rank, for all that shows it: `jaxrun top`, metrics, pages, documents and sentences.

What keeps a rank from going on in particular, by its stack and the kernel, is its Activity (rank_state.py).
"""

from __future__ import annotations

import enum


class Doing(enum.StrEnum):
    """The kind of state that a rank is in; documents and metrics have its value, and people see its words."""

    STARTING = "starting"
    WORKING = "working"
    COMPILING = "compiling"
    WAITING = "waiting"  # for other ranks
    IDLE = "idle"  # waits for something else, or nothing is known
    STOPPED = "stopped"  # by a signal or a debugger
    DEBUGGED = "debugged"
    FINISHED = "finished"
    ENDED = "ended"  # by jaxrun, or because of another rank
    FAILED = "failed"

    @property
    def words(self) -> str:
        """Return what completes "the rank …"."""
        return _WORDS.get(self, str(self.value))

    @property
    def is_over(self) -> bool:
        return self in (Doing.FINISHED, Doing.ENDED, Doing.FAILED)


_WORDS = {
    Doing.STARTING: "starts",
    Doing.WORKING: "works",
    Doing.COMPILING: "compiles",
    Doing.WAITING: "waits for other ranks",
    Doing.IDLE: "is idle, or waits for something else",
    Doing.STOPPED: "is stopped",
    Doing.DEBUGGED: "is debugged",
    Doing.FINISHED: "has finished",
    Doing.ENDED: "was ended",
    Doing.FAILED: "has failed, or does not answer",
}


class StandingOut(enum.IntEnum):
    """How much a rank needs to be looked at, the least first; documents have its words."""

    LIKE_OTHERS = 0
    SLOW = enum.auto()
    LATE = enum.auto()
    STOPPED = enum.auto()
    FAILED = enum.auto()

    @property
    def words(self) -> str:
        return self.name.lower().replace("_", " ")
