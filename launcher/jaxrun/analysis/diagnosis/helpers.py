"""The threads and processes with which a rank works, as far as it matters whether they live: do they bring its data?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jaxrun.protocol.snapshot_messages import ChildProcess, RankReply


@dataclass(frozen=True, slots=True)
class LostThread:
    """A thread of the program that an exception has ended."""

    name: str
    error: str


@dataclass(frozen=True, slots=True)
class Helpers:
    """What a rank has started.

    children:      processes that live, and those that have ended without the rank's having waited for them
    lost_threads:  in the order of their ends
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
    """The helpers of the ranks that have any, by their replies and the threads that they have reported as lost."""
    found = {rank: Helpers(reply.children, lost_threads.get(rank, ())) for rank, reply in replies.items()}
    return {rank: helpers for rank, helpers in found.items() if helpers != NO_HELPERS}
