"""Finds out whether one rank, or one host, holds the others up, and where in its program it is meanwhile.

The flight recorders say when each rank entered each call; they are read now and then for divergence_detector.py, and at
the end. Only where they show a straggler are stacks taken, a few, at moments at which the others wait for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from jaxrun.analysis.diagnosis.stacks import is_waiting_in_jax, main_stack
from jaxrun.analysis.diagnosis.straggler import Straggler
from jaxrun.analysis.lockstep.call_waits import Party, find_waits
from jaxrun.analysis.lockstep.wait_totals import WaitTotals
from jaxrun.controller.head.clock_offsets import ClockOffsets
from jaxrun.protocol.flight import Flight, parse_group
from jaxrun.protocol.snapshot_messages import CallAim, RecorderSnapshot, SnapshotPurpose, SnapshotReply
from jaxrun.records.event_log.actions import Action, RecordStraggler, TakeSnapshot

_SAMPLES, _MAX_TRIES = 4, 16  # of the straggler's stack, while others wait for it
_WAITER_SAMPLES, _MIN_HITS = 24, 3  # of another rank's, at any moment; so many of them show it waiting
_CORE_SHARE = 0.5  # of what the straggler costs: as much is explained by its host's lack of cores


class StragglerDetector:
    """Times are seconds since the epoch."""

    def __init__(self, hosts: Mapping[int, str], clocks: ClockOffsets | None) -> None:
        """`hosts` may be filled in later; `clocks` are those of other hosts, None where there are none."""
        self._hosts = hosts
        self._clocks = clocks
        self._by_rank, self._by_host = WaitTotals(), WaitTotals()
        self._core_waits: dict[int, _CoreWait] = {}
        self._started_at = 0.0
        self._samples = _Samples()
        self._now = 0.0
        self._recorded: Straggler | None = None

    @property
    def straggler(self) -> Straggler | None:
        """The straggler, if there is one and the others surely wait for it."""
        found = self._find()
        if found is None:
            return None
        frame = self._samples.frame(found.ranks)
        if found.is_proven:
            return replace(found, frame=frame)
        share = self._samples.waiting_share(found.ranks, found.share)
        return replace(found, frame=frame, share=min(share, found.share)) if share else None

    def start(self, now: float) -> None:
        """The program begins."""
        self._started_at = now

    def add(self, flights: Mapping[int, Flight], core_waits: Mapping[int, float], now: float) -> list[Action]:
        """Flight recorders were read; `core_waits`: for how many seconds threads of ranks have waited for a core."""
        for rank, seconds in core_waits.items():
            self._add_core_wait(rank, seconds, now)
        self._compare(flights, now)
        return [*self._record(), *self._sample(flights)]

    def conclude(self, flights: Mapping[int, Flight], now: float) -> list[Action]:
        """All ranks have ended."""
        self._compare(flights, now)
        return self._record()

    def handle_recorder(self, snapshot: RecorderSnapshot, now: float) -> None:
        """The program of a rank has ended."""
        if snapshot.core_wait_s:
            self._add_core_wait(snapshot.rank, snapshot.core_wait_s, now)

    def handle_sample(self, reply: SnapshotReply, flights: Mapping[int, Flight]) -> list[Action]:
        """A stack was taken at the moment that was asked for, or an empty one that was not."""
        self._samples.add(reply)
        return [*self._record(), *self._sample(flights)]

    # ---- the calls

    def _compare(self, flights: Mapping[int, Flight], now: float) -> None:
        self._now = now
        offsets = self._offsets(flights, now)
        if offsets is None:
            return
        parties: dict[int, Party] = {rank: (rank,) for rank in self._hosts}
        self._by_rank.add(find_waits(flights, offsets, parties, self._by_rank.last_numbers))
        by_host = _ranks_by_host(self._hosts)
        if 1 < len(by_host) < len(self._hosts):
            parties = {rank: by_host[host] for rank, host in self._hosts.items()}
            self._by_host.add(find_waits(flights, offsets, parties, self._by_host.last_numbers))

    def _find(self) -> Straggler | None:
        errors = self._clock_errors()
        error_s = lambda party: errors.get(self._hosts[party[0]], 0.0)  # noqa: E731
        found = self._by_rank.find_straggler(error_s) or self._by_host.find_straggler(error_s)
        return found if found is not None and not self._lacks_cores(found) else None

    def _add_core_wait(self, rank: int, seconds: float, now: float) -> None:
        known = self._core_waits.get(rank)
        if known is None:
            self._core_waits[rank] = _CoreWait(now, seconds, now, seconds)
        else:
            known.last_at, known.last_s = now, seconds

    def _offsets(self, flights: Mapping[int, Flight], now: float) -> dict[int, float] | None:
        """Return what is to be added to the times of each rank; None as long as some clock is unknown."""
        if self._clocks is None:
            return {}
        known = {rank: self._clocks.offset(rank, now) for rank in flights}
        found = {rank: offset.offset_s for rank, offset in known.items() if offset is not None}
        return found if len(found) == len(known) else None

    def _clock_errors(self) -> dict[str, float]:
        """Return by host how wrong its times may be, compared with those of other hosts."""
        if self._clocks is None:
            return {}
        known = {host: self._clocks.offset(ranks[0], self._now) for host, ranks in _ranks_by_host(self._hosts).items()}
        errors = {host: offset.error_at(self._now) for host, offset in known.items() if offset is not None}
        largest = sorted(errors, key=lambda host: -errors[host])[:2]
        return {host: errors[host] + sum(errors[other] for other in largest if other != host) for host in errors}

    def _lacks_cores(self, found: Straggler) -> bool:
        """Whether the straggler only has waited longer than others for a core of its host."""
        shares = {rank: wait.share(self._started_at) for rank, wait in self._core_waits.items()}
        own = [share for rank, share in shares.items() if rank in found.ranks]
        others = [share for rank, share in shares.items() if rank not in found.ranks]
        return bool(own and others) and _mean(own) - _mean(others) >= _CORE_SHARE * found.net_share

    # ---- where it is

    def _record(self) -> list[Action]:
        """Log the straggler once it is known, and again with its place."""
        straggler, last = self.straggler, self._recorded
        if straggler is None or (last is not None and (last.ranks, last.frame) == (straggler.ranks, straggler.frame)):
            return []
        self._recorded = straggler
        return [RecordStraggler(straggler)]

    def _sample(self, flights: Mapping[int, Flight]) -> list[Action]:
        """Ask where the straggler is while others wait; where they may not wait, ask first where one of these is."""
        found = self._find()
        if found is None or len(found.ranks) > 1:
            return []
        others = sorted(parse_group(found.group, len(self._hosts)).difference(found.ranks))
        rank, aim = others[0], CallAim(0, 0.0)
        if found.is_proven or self._samples.waiting_share(found.ranks, found.share):
            (rank,) = found.ranks
            timings = (timing for timing in flights.get(rank, Flight()).timings if timing.group == found.group)
            site = next((timing.site for timing in timings if timing.number == found.number), 0)
            if not site:
                return []
            aim = CallAim(site, found.late_s / 2)
        if not self._samples.may_ask(found.ranks, rank):
            return []
        return [TakeSnapshot((rank,), SnapshotPurpose.STRAGGLER, aim)]


@dataclass(slots=True)
class _CoreWait:
    """For how many seconds threads of a rank had waited for a core at two times."""

    first_at: float
    first_s: float
    last_at: float
    last_s: float

    def share(self, started_at: float) -> float:
        """Return seconds a second; where it was read only once, since the program's start, and what was before."""
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


class _Samples:
    """The stacks that were taken because of one straggler: its own, and those of another rank that may wait for it."""

    def __init__(self) -> None:
        self._is_pending = False
        self._reset(())

    def _reset(self, straggler: Party) -> None:
        self._straggler = straggler
        self._tries = 0
        self._dumps: list[str] = []  # of the straggler
        self._is_waiting: list[bool] = []  # whether the other did, each time it was asked

    def may_ask(self, straggler: Party, rank: int) -> bool:
        """Whether one more stack of this rank is needed; it is then taken."""
        if self._is_pending:
            return False
        if straggler != self._straggler:
            self._reset(straggler)
        if rank in straggler:
            self._tries += 1
            self._is_pending = self._tries <= _MAX_TRIES and len(self._dumps) < _SAMPLES
        else:
            self._is_pending = len(self._is_waiting) < _WAITER_SAMPLES
        return self._is_pending

    def add(self, reply: SnapshotReply) -> None:
        self._is_pending = False
        for rank, dump in reply.stacks.items():
            if rank not in self._straggler:
                self._is_waiting.append(is_waiting_in_jax(dump, reply.kernel_waits.get(rank, "")))
            elif dump:
                self._dumps.append(dump)

    def frame(self, straggler: Party) -> str:
        """Return the line at which the straggler was most often, `data.py:10 load`."""
        dumps = self._dumps if straggler == self._straggler else []
        frames = [str(users[0]) for dump in dumps if (users := main_stack(dump).users)]
        return max(frames, key=frames.count, default="")

    def waiting_share(self, straggler: Party, share: float) -> float:
        """Return in what share of its stacks the other rank waited in JAX; 0.0 if in less than half of `share`."""
        hits, count = sum(self._is_waiting), len(self._is_waiting)
        if straggler != self._straggler or count < _WAITER_SAMPLES or hits < max(_MIN_HITS, share / 2 * count):
            return 0.0
        return hits / count
