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

from jaxrun.protocol.codec import Message

NO_STEP = -1  # if the program has given none


class CheckpointSaved(Message, frozen=True):
    """The checkpoint of this step of the program is complete."""

    rank: int
    step: int


class StopPolled(Message, frozen=True):
    """The program polls from now on whether it should stop."""

    rank: int


class StopRequested(Message, frozen=True):
    """The program should stop, for this reason ("SIGTERM"): send your PollCount, and make no poll before StopAt."""

    reason: str


class PollCount(Message, frozen=True):
    """The number of polls of this rank that have returned, all of them False."""

    rank: int
    polls: int


class StopAt(Message, frozen=True):
    """The poll with this number, counted from 1, is the first to return True, on all ranks."""

    poll: int


class StopReached(Message, frozen=True):
    """The program was told to stop, at this step of its own, or NO_STEP."""

    rank: int
    step: int


StopEvent = StopPolled | PollCount | StopReached
StopMessageToHead = CheckpointSaved | StopEvent
StopMessageToRank = StopRequested | StopAt
