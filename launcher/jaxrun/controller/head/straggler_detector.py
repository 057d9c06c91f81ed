"""Finds out whether one rank, or one host, slows the others down, and where in its program it is meanwhile.

The flight recorders say when each rank entered each call; they are read now and then for divergence_detector.py, and at
the end. Only if they show a straggler, stacks are taken, at arbitrary moments. The stacks that count are those taken
while others waited, shortly before the straggler came to a call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from jaxrun.analysis.lockstep.call_waits import CallWait, Party, find_waits
from jaxrun.analysis.lockstep.straggler import Straggler, WaitTotals
from jaxrun.controller.head.clock_offsets import ClockOffsets
from jaxrun.controller.head.head_state import HeadState
from jaxrun.controller.head.queries import RankQueries, Replies, flights_of
from jaxrun.controller.head.straggler_samples import StragglerSamples
from jaxrun.controller.head.timers import Timer
from jaxrun.job_events.actions import Action, RecordStraggler
from jaxrun.protocol.agent_messages import ClockReply
from jaxrun.protocol.flight import Flight, parse_group
from jaxrun.protocol.query_messages import FlightAtEnd, RankDetail

_MAX_PAUSE_S = 0.1  # between two samples; the lengths differ, so samples fall on all moments of a step
_GOLDEN_RATIO = 0.618
_CORE_SHARE = 0.5  # of the straggler's cost: if waiting for cores explains this much, the lack of cores is reported


class StragglerDetector:
    def __init__(self, state: HeadState, queries: RankQueries, clocks: ClockOffsets | None) -> None:
        """`clocks` are the clocks of other hosts, None if there are none."""
        self._state = state
        self._queries = queries
        self._hosts = state.workers.hosts
        self._clocks = clocks
        self._by_rank, self._by_host = WaitTotals(), WaitTotals()
        self._core_waits: dict[int, _CoreWait] = {}
        self._started_at = 0.0
        self._samples = StragglerSamples()
        self._is_asking = False
        self._now = 0.0
        self._recorded: Straggler | None = None
        self.new_waits: dict[str, list[CallWait]] = {}  # in the calls that were compared last, by group

    def _judge(self) -> Straggler | None:
        """Return the straggler, if there is one and the others certainly wait for it."""
        found = self._find()
        if found is None:
            return None
        frame = self._samples.frame(found.ranks)
        if found.is_proven:
            return replace(found, frame=frame)
        share = self._samples.waiting_share(found.ranks, found.share)
        return replace(found, frame=frame, share=min(share, found.share)) if share else None

    def start(self, now: float) -> list[Action]:
        self._started_at = now
        return self.probe_clocks(now)

    def probe_clocks(self, now: float) -> list[Action]:
        """Measure the clocks of other hosts, with which calls are compared."""
        return self._clocks.probe(self._state.workers.live, now) if self._clocks is not None else []

    def handle_clock(self, reply: ClockReply, now: float) -> list[Action]:
        return self._clocks.handle(reply, now) if self._clocks is not None else []

    def add(self, replies: Replies, now: float) -> list[Action]:
        for rank, reply in replies.items():
            if reply.core_wait_s:
                self._add_core_wait(rank, reply.core_wait_s, now)
        self._compare(flights_of(replies), now)
        self._schedule_sample(now)
        return self._record()

    def conclude(self, now: float) -> list[Action]:
        self._compare(self._state.flights, now)
        return self._record()

    def handle_recorder(self, event: FlightAtEnd, now: float) -> None:
        if event.core_wait_s:
            self._add_core_wait(event.rank, event.core_wait_s, now)

    def _take_sample(self, now: float) -> list[Action]:
        """Ask where the straggler is; if the others may not wait for it, first ask where one of them is."""
        found = self._find()
        if found is None or not self._state.is_healthy:
            return []
        self._is_asking = True
        return self._queries.ask((self._sampled_rank(found),), RankDetail.STACKS, self._add_sample, now)

    def _add_sample(self, replies: Replies, now: float) -> list[Action]:
        self._is_asking = False
        found = self._find()
        if found is not None and self._samples.straggler == found.ranks:
            for reply in replies.values():
                self._samples.add(reply)
            self._samples.judge(flights_of(replies), found)
        self._schedule_sample(now)
        return self._record()

    def _schedule_sample(self, now: float) -> None:
        is_due = self._state.timers.at(Timer.SAMPLE) is not None
        found = self._find() if not is_due and not self._is_asking else None
        if found is not None and len(found.ranks) == 1 and self._samples.may_add(found, self._sampled_rank(found)):
            pause = _MAX_PAUSE_S * (self._samples.count * _GOLDEN_RATIO % 1)
            self._state.timers.set(Timer.SAMPLE, now + pause, self._take_sample)

    def _sampled_rank(self, found: Straggler) -> int:
        if found.is_proven or self._samples.waiting_share(found.ranks, found.share):
            return found.ranks[0]
        return min(parse_group(found.group, len(self._hosts)).difference(found.ranks))

    # ---- the calls

    def _compare(self, flights: Mapping[int, Flight], now: float) -> None:
        self._now = now
        self.new_waits = {}
        offsets = self._offsets(flights, now)
        if offsets is None:
            return
        parties: dict[int, Party] = {rank: (rank,) for rank in self._hosts}
        self.new_waits = find_waits(flights, offsets, parties, self._by_rank.last_numbers)
        self._by_rank.add(self.new_waits)
        by_host = _ranks_by_host(self._hosts)
        if 1 < len(by_host) < len(self._hosts):
            parties = {rank: by_host[host] for rank, host in self._hosts.items()}
            self._by_host.add(find_waits(flights, offsets, parties, self._by_host.last_numbers))

    def _find(self) -> Straggler | None:
        errors = self._clock_errors()

        def error_s(party: Party) -> float:
            return errors.get(self._hosts[party[0]], 0.0)

        found = self._by_rank.find_straggler(error_s) or self._by_host.find_straggler(error_s)
        return found if found is not None and not self._lacks_cores(found) else None

    def _add_core_wait(self, rank: int, seconds: float, now: float) -> None:
        known = self._core_waits.get(rank)
        if known is None:
            self._core_waits[rank] = _CoreWait(now, seconds, now, seconds)
        else:
            known.last_at, known.last_s = now, seconds

    def core_waits(self) -> dict[int, float]:
        """Return by rank how long its threads wait for a core, in seconds per second."""
        return {rank: wait.share(self._started_at) for rank, wait in self._core_waits.items()}

    def clock_offset(self, now: float) -> float:
        """Return the offset to add to times of the rank 0; 0.0 if unknown, or on this host."""
        found = self._clocks.offset(0, now) if self._clocks is not None else None
        return found.offset_s if found is not None else 0.0

    def _offsets(self, flights: Mapping[int, Flight], now: float) -> dict[int, float] | None:
        """Return the offset to add to the times of each rank; None as long as some clock is unknown."""
        if self._clocks is None:
            return {}
        known = {rank: self._clocks.offset(rank, now) for rank in flights}
        found = {rank: offset.offset_s for rank, offset in known.items() if offset is not None}
        return found if len(found) == len(known) else None

    def _clock_errors(self) -> dict[str, float]:
        """Return by host the error of its times, relative to other hosts."""
        if self._clocks is None:
            return {}
        known = {host: self._clocks.offset(ranks[0], self._now) for host, ranks in _ranks_by_host(self._hosts).items()}
        errors = {host: offset.error_at(self._now) for host, offset in known.items() if offset is not None}
        largest = sorted(errors, key=lambda host: -errors[host])[:2]
        return {host: errors[host] + sum(errors[other] for other in largest if other != host) for host in errors}

    def _lacks_cores(self, found: Straggler) -> bool:
        """Whether the straggler has only waited longer than others for a core of its host."""
        shares = self.core_waits()
        own = [share for rank, share in shares.items() if rank in found.ranks]
        others = [share for rank, share in shares.items() if rank not in found.ranks]
        return bool(own and others) and _mean(own) - _mean(others) >= _CORE_SHARE * found.net_share

    # ---- where it is

    def _record(self) -> list[Action]:
        """Keep the straggler, and log it once it is known, and again with its place."""
        straggler, last = self._judge(), self._recorded
        self._state.straggler = straggler
        if straggler is None or (last is not None and (last.ranks, last.frame) == (straggler.ranks, straggler.frame)):
            return []
        self._recorded = straggler
        return [RecordStraggler(straggler)]


class _CoreWait(Struct):
    """Seconds that threads of a rank had waited for a core at two times."""

    first_at: float
    first_s: float
    last_at: float
    last_s: float

    def share(self, started_at: float) -> float:
        """Return seconds per second; with a single reading, since the program's start, including earlier waits."""
        if self.last_at > self.first_at:
            return (self.last_s - self.first_s) / (self.last_at - self.first_at)
        return self.last_s / (self.last_at - started_at) if self.last_at > started_at else 0.0


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _ranks_by_host(hosts: Mapping[int, str]) -> dict[str, Party]:
    found: dict[str, list[int]] = {}
    for rank in sorted(hosts):
        found.setdefault(hosts[rank], []).append(rank)
    return {host: tuple(ranks) for host, ranks in found.items()}
