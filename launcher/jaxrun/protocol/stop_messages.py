"""The messages between a rank and the head about checkpoints, and about stopping all ranks at the same step.

A rank counts its polls, the calls of `should_stop`. When it is asked to stop, it reports how many have returned, and
lets the next one wait; the head lets the first poll that no rank has made yet return True.

    rank                                  head
    CheckpointSaved    ──────────▶
    StopPolled         ──────────▶                       (at the first poll)
                       ◀──────────    StopRequested
    PollCount          ──────────▶
                       ◀──────────    StopAt             (once all ranks have reported)
    StopReached        ──────────▶
"""

from __future__ import annotations

from dataclasses import dataclass

NO_STEP = -1  # if the program has given none


@dataclass(frozen=True, slots=True)
class CheckpointSaved:
    """The checkpoint of this step of the program is complete."""

    rank: int
    step: int


@dataclass(frozen=True, slots=True)
class StopPolled:
    """The program polls from now on whether it should stop."""

    rank: int


@dataclass(frozen=True, slots=True)
class StopRequested:
    """The program should stop, for this reason ("SIGTERM"): send your PollCount, and make no poll before StopAt."""

    reason: str


@dataclass(frozen=True, slots=True)
class PollCount:
    """The number of polls of this rank that have returned, all of them False."""

    rank: int
    polls: int


@dataclass(frozen=True, slots=True)
class StopAt:
    """The poll with this number, counted from 1, is the first to return True, on all ranks."""

    poll: int


@dataclass(frozen=True, slots=True)
class StopReached:
    """The program was told to stop, at this step of its own, or NO_STEP."""

    rank: int
    step: int


StopEvent = StopPolled | PollCount | StopReached
StopMessageToHead = CheckpointSaved | StopEvent
StopMessageToRank = StopRequested | StopAt
