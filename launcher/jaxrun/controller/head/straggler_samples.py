"""Finds where a straggler is while others wait for it, from stacks taken at arbitrary moments."""

from __future__ import annotations

from collections.abc import Mapping

from jaxrun.analysis.diagnosis.stacks import is_waiting_in_jax, main_stack
from jaxrun.analysis.lockstep.call_waits import Party
from jaxrun.analysis.lockstep.straggler import Straggler
from jaxrun.protocol.flight import Flight, strip_directory
from jaxrun.protocol.query_messages import RankReply

_SAMPLES, _MAX_TRIES = 4, 64  # samples of the straggler's stack: while others wait for it, and in all
_WAITER_SAMPLES, _MIN_HITS = 24, 3  # samples of another rank's stack; at least this many must show it waiting


class StragglerSamples:
    """The stacks that were taken because of one straggler: its own, and those of another rank that may wait for it."""

    def __init__(self) -> None:
        self._reset(())

    def _reset(self, straggler: Party) -> None:
        self.straggler = straggler
        self._own: list[RankReply] = []  # may have been taken while others waited
        self._tries = 0
        self._frames: list[str] = []  # where the straggler was while others waited
        self._is_waiting: list[bool] = []  # whether the other rank waited, each time it was asked

    @property
    def count(self) -> int:
        return self._tries + len(self._is_waiting)

    def may_add(self, found: Straggler, rank: int) -> bool:
        if found.ranks != self.straggler:
            self._reset(found.ranks)
        if rank in found.ranks:
            return self._tries < _MAX_TRIES and len(self._frames) < _SAMPLES
        return len(self._is_waiting) < _WAITER_SAMPLES

    def add(self, reply: RankReply) -> None:
        if reply.rank in self.straggler:
            self._tries += 1
            self._own += [reply] if reply.stacks else []
        else:
            self._is_waiting.append(is_waiting_in_jax(reply.stacks, reply.kernel_wait, reply.flight.places))

    def judge(self, flights: Mapping[int, Flight], found: Straggler) -> None:
        """Keep the stacks that were taken while others waited, once the recorder shows when the next call came."""
        for reply in tuple(self._own):
            is_hit = _was_late(flights.get(reply.rank, Flight()), reply.time, found)
            if is_hit is not None:
                self._own.remove(reply)
            if is_hit and (users := main_stack(reply.stacks).users):
                self._frames.append(str(users[0]))

    def frame(self, straggler: Party) -> str:
        """Return the line at which the straggler was most often, `data.py:10 load`."""
        frames = self._frames if straggler == self.straggler else []
        return max(frames, key=frames.count, default="")

    def waiting_share(self, straggler: Party, share: float) -> float:
        """Return the share of the other rank's stacks in which it waited in JAX; 0.0 if less than half of `share`."""
        hits, count = sum(self._is_waiting), len(self._is_waiting)
        if straggler != self.straggler or count < _WAITER_SAMPLES or hits < max(_MIN_HITS, share / 2 * count):
            return 0.0
        return hits / count


def _was_late(flight: Flight, moment: float, found: Straggler) -> bool | None:
    """Whether the straggler was about to come to a call for which others waited; None if not known yet."""
    after = [timing for timing in flight.timings if timing.entered > moment]
    if not after:
        return False if 0.0 < flight.entered <= moment else None
    before = [timing for timing in flight.timings if timing.entered <= moment]
    if not before or moment < before[-1].dispatched:  # it was inside a call
        return False
    site = flight.sites.get(after[0].site, ("",))[0]
    is_its_call = after[0].group == found.group and found.place in ("", strip_directory(site))
    return is_its_call and after[0].entered - moment <= found.late_s
