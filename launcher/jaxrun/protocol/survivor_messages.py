"""The messages between a rank and the head about the ranks that live, with --keep-survivors.

JAX's live_devices is a barrier of the ranks that live. JAX's coordination service learns of a death only when the
heartbeats of a rank stay away; the head knows at once, and answers in its place.

    rank                                  head
    LiveRanksAsked     ──────────▶                       (it has come to live_devices, and waits)
                       ◀──────────    LiveRanks          (to all of them, once all that live have come)
                       ◀──────────    RanksLost          (as soon as a rank has died)

Each process of a rank has a number, its incarnation: 1, and one more each time that the rank is started again. A rank
that was started again lives from its first LiveRanksAsked that is answered: nobody waits for it before.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import field

from jaxrun.protocol.codec import Message


class LiveRanksAsked(Message, frozen=True):
    """Which of these ranks live? The rank waits for the answer, and so do the others of them that ask.

    number:  counts the questions of this process; a new question takes the place of an unanswered one
    calls:   how many cross-process calls this rank has made in each group ("0-3"), as far as they are recorded
    polls:   how many times this rank has called should_stop
    """

    rank: int
    ranks: tuple[int, ...]
    number: int
    calls: Mapping[str, int] = field(default_factory=dict)
    polls: int = 0


class LiveRanks(Message, frozen=True):
    """The ranks that live, each with its incarnation.

    order:         the same ranks in the order in which live_devices yields their devices
    questions:     the numbers of the questions that this answers, by rank
    calls, polls:  the largest numbers of those that have asked: they count on from there together; `calls` has the
                   groups in which they differ
    """

    incarnations: Mapping[int, int]
    order: tuple[int, ...]
    questions: Mapping[int, int]
    calls: Mapping[str, int] = field(default_factory=dict)
    polls: int = 0


class RanksLost(Message, frozen=True):
    """These ranks have died: whatever waits for them must not wait any longer.

    incarnations:  of the processes that have died, by rank; 1 for ranks that are not in it
    """

    ranks: tuple[int, ...]
    incarnations: Mapping[int, int] = field(default_factory=dict)


SurvivorMessageToRank = LiveRanks | RanksLost
