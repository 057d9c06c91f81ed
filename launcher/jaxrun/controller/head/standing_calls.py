"""Finds ranks that stand in a call of JAX's C++ dispatch, which their flight recorders show only once it is made.

A rank's stacks say where it is at one moment. It stands in a call if it is there twice, has made no other call
meanwhile, and sleeps; without the last condition, it might be computing with its own devices.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from msgspec import Struct

from jaxrun.analysis.lockstep.compare import Compilation
from jaxrun.controller.head.queries import Replies
from jaxrun.controller.head.stall_detector import IDLE_CPU_FRACTION
from jaxrun.protocol.query_messages import RankReply

_MIN_GAP_S = 0.5  # between the two times; the kernel counts CPU time in steps of 10 ms
_MAX_RANKS = 64  # asked for stacks at once


class _Standing(Struct):
    """When a rank was first seen at a site, and from when on it counts as standing there."""

    site: int
    first: RankReply
    is_certain: bool = False


class StandingCalls:
    """Sites seen in the stacks of ranks so far; times are on the clocks of the ranks' hosts."""

    def __init__(self) -> None:
        self._seen: dict[int, _Standing] = {}

    def choose(self, compilations: Iterable[Compilation]) -> tuple[int, ...]:
        """Return the ranks whose stacks are useful: before a call for which others compile."""
        ranks = dict.fromkeys(rank for compilation in compilations for rank in compilation.before)
        return tuple(ranks)[:_MAX_RANKS]

    def add(self, replies: Replies) -> None:
        """Add replies with stacks."""
        for rank, reply in replies.items():
            site = _site(reply)
            seen = self._seen.get(rank)
            if site is None:
                self._seen.pop(rank, None)
            elif seen is None or not _has_stood(seen, site, reply):
                self._seen[rank] = _Standing(site, reply)
            else:
                seen.is_certain = reply.time - seen.first.time >= _MIN_GAP_S

    def sites(self, ranks: Collection[int]) -> Mapping[int, int]:
        """Return the sites of those of these ranks that stand in a call."""
        return {rank: self._seen[rank].site for rank in ranks if rank in self._seen and self._seen[rank].is_certain}

    def clear(self) -> None:
        self._seen.clear()


def _site(reply: RankReply) -> int | None:
    standing = reply.flight.standing
    if not reply.number or standing is None or "futex" not in reply.kernel_wait:
        return None
    site, at = standing
    return site if at >= reply.time else None  # otherwise these stacks were written without it


def _has_stood(seen: _Standing, site: int, reply: RankReply) -> bool:
    first = seen.first
    cpu_s, gap_s = reply.cpu_seconds - first.cpu_seconds, reply.time - first.time
    is_same = site == seen.site and reply.call_counters == first.call_counters
    return is_same and cpu_s <= IDLE_CPU_FRACTION * max(gap_s, _MIN_GAP_S)
