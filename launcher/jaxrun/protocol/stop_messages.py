"""What a rank and the head send each other about checkpoints, and to have all ranks stop at the same step.

A rank counts its polls, the calls of `should_stop`. Asked to stop, it tells how many have returned, and lets the next
one wait; the head lets the first poll that no rank has made yet return True.

    rank                                  head
    CheckpointSaved    ──────────▶
    StopPolled         ──────────▶                       (at the first poll)
                       ◀──────────    StopRequested
    PollCount          ──────────▶
                       ◀──────────    StopAt             (once all ranks have told)
    StopReached        ──────────▶
"""

from __future__ import annotations

from dataclasses import dataclass

NO_STEP = -1  # where the program has given none


@dataclass(frozen=True, slots=True)
class CheckpointSaved:
    """The checkpoint of this step of the program is complete."""

    rank: int
    step: int


@dataclass(frozen=True, slots=True)
class StopPolled:
    """The program polls whether it should stop, from now on."""

    rank: int


@dataclass(frozen=True, slots=True)
class StopRequested:
    """The program should stop, for this reason ("SIGTERM"): tell your PollCount, and make no poll before StopAt."""

    reason: str


@dataclass(frozen=True, slots=True)
class PollCount:
    """So many polls of this rank have returned, all of them False."""

    rank: int
    polls: int


@dataclass(frozen=True, slots=True)
class StopAt:
    """The poll with this number, counted from 1, is the first to return True, on all ranks."""

    poll: int


@dataclass(frozen=True, slots=True)
class StopReached:
    """The program has been told to stop, at this step of its own, or NO_STEP."""

    rank: int
    step: int


StopEvent = StopPolled | PollCount | StopReached
StopMessageToHead = CheckpointSaved | StopEvent
StopMessageToRank = StopRequested | StopAt
