"""A rank's helper threads and processes, which may bring its data, and whether they are alive."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jaxrun.protocol.snapshot_messages import ChildProcess, RankReply


@dataclass(frozen=True, slots=True)
class LostThread:
    """A thread of the program that ended with an exception."""

    name: str
    error: str


@dataclass(frozen=True, slots=True)
class Helpers:
    """The threads and processes that a rank has started.

    children:      processes that are alive, and those that have ended and that the rank has not waited for
    lost_threads:  threads that ended with an exception, in the order in which they ended
    """

    children: tuple[ChildProcess, ...] = ()
    lost_threads: tuple[LostThread, ...] = ()

    @property
    def dead_children(self) -> tuple[ChildProcess, ...]:
        return tuple(child for child in self.children if child.status is not None)

    @property
    def live_children(self) -> tuple[ChildProcess, ...]:
        return tuple(child for child in self.children if child.status is None)

    @property
    def any_dead(self) -> bool:
        return bool(self.dead_children or self.lost_threads)


NO_HELPERS = Helpers()


def helpers_of(
    replies: Mapping[int, RankReply], lost_threads: Mapping[int, tuple[LostThread, ...]]
) -> dict[int, Helpers]:
    """Return the helpers of each rank that has any, from the ranks' replies and the lost threads that they reported."""
    found = {rank: Helpers(reply.children, lost_threads.get(rank, ())) for rank, reply in replies.items()}
    return {rank: helpers for rank, helpers in found.items() if helpers != NO_HELPERS}
