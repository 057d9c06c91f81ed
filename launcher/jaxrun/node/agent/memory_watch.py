"""Forecasts when the memory of this host, or of the ranks' memory cgroup, will be full, from one reading a second.

A forecast needs growth that lasts: the rate is the lower one of the whole window and of its last two seconds. A program
that loads its data and stops growing is not mentioned, nor is anything before two thirds of the memory are used.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from msgspec import Struct

from jaxrun.files import procfs
from jaxrun.protocol.agent_messages import MemoryShortage
from jaxrun.text import format_bytes

INTERVAL_S = 1.0  # between readings
_WINDOW = 11  # readings
_RECENT = 3
_MIN_READINGS = 4
_HORIZON_S = 60.0  # what is full later is not mentioned
_MIN_USED = 2 / 3  # of the memory
_MIN_PART = 0.2  # of the growth, to count among the ranks that grow
_RECOVERED_S = 30.0  # after so long without a forecast the next one is reported again


class MemoryReading(Struct, frozen=True):
    """The memory in use at one moment, in bytes.

    time:     in seconds
    limit:    how much there is
    by_rank:  what each rank's process holds
    """

    time: float
    used: int
    limit: int
    by_rank: Mapping[int, int]


class MemoryWatch:
    """Watches the memory that the ranks of this agent share; it is full when either the host's or the cgroup's is.

    cgroup:   the directory of the ranks' memory cgroup, None if there is none
    meminfo:  the host's memory, as the kernel describes it
    """

    def __init__(self, cgroup: str | None, meminfo: str = procfs.MEMINFO) -> None:
        self._cgroup = cgroup
        self._meminfo = meminfo
        self._host: deque[MemoryReading] = deque(maxlen=_WINDOW)
        self._group: deque[MemoryReading] = deque(maxlen=_WINDOW)
        self._quiet_since: float | None = None  # without a forecast, since one was reported
        self._is_reported = False

    def read(self, by_rank: Mapping[int, int], now: float) -> MemoryShortage | None:
        """Take a reading, with the bytes that each rank holds; return a forecast that was not reported yet."""
        if (host := procfs.read_host_memory(self._meminfo)) is not None:
            self._host.append(MemoryReading(now, *host, by_rank))
        if (group := procfs.read_cgroup_memory(self._cgroup)) is not None:
            self._group.append(MemoryReading(now, *group, by_rank))
        found = [one for readings in (self._host, self._group) if (one := forecast(readings)) is not None]
        first = min(found, key=lambda one: one.full_in_s, default=None)
        if first is None:
            self._quiet_since = self._quiet_since or now
            if now - self._quiet_since >= _RECOVERED_S:
                self._is_reported = False
            return None
        self._quiet_since = None
        is_news, self._is_reported = not self._is_reported, True
        return first if is_news else None

    def last(self) -> tuple[int, int]:
        """Return the bytes in use at the last reading, and how many there are, of what is fuller; zeros if unknown."""
        readings = [kept[-1] for kept in (self._host, self._group) if kept]
        fullest = max(readings, key=lambda one: one.used / max(1, one.limit), default=None)
        return (fullest.used, fullest.limit) if fullest is not None else (0, 0)

    def describe_last(self, rank: int) -> str:
        """The last figures before the kernel killed this rank: `63.2 of 64 GiB were used, rank 3 held 20.1 GiB`."""
        # A process that the kernel is killing holds nothing any more, and is not gone yet.
        readings = [one for one in self._group or self._host if one.by_rank.get(rank)]
        if not readings:
            return ""
        last, first = readings[-1], readings[0]
        used = f"{format_bytes(last.used)} of {format_bytes(last.limit)} were used, rank {rank} held "
        held = last.by_rank[rank]
        seconds = last.time - first.time
        grown = held - first.by_rank[rank]
        rate = f" and grew by {format_bytes(grown / seconds)}/s" if seconds > 0 and grown > 0 else ""
        return f"{used}{format_bytes(held)}{rate}"


def forecast(readings: Sequence[MemoryReading]) -> MemoryShortage | None:
    """Return when the memory will be full, if that is within a minute at the present growth; else None."""
    if len(readings) < _MIN_READINGS:
        return None
    last = readings[-1]
    growth = min(_growth(readings[0], last), _growth(readings[-_RECENT], last))
    if growth <= 0 or last.used < _MIN_USED * last.limit:
        return None
    full_in_s = (last.limit - last.used) / growth
    if full_in_s >= _HORIZON_S:
        return None
    rates = {rank: _rank_growth(readings[0], last, rank) for rank in last.by_rank}
    growing = {rank: rate for rank, rate in rates.items() if rate >= _MIN_PART * growth}
    return MemoryShortage(
        rank=max(rates, key=lambda rank: rates[rank]) if rates else 0,
        used=last.used,
        limit=last.limit,
        full_in_s=full_in_s,
        growth=growth,
        growing=tuple(sorted(growing)),
    )


def _growth(first: MemoryReading, last: MemoryReading) -> float:
    """Return the growth in bytes per second."""
    return (last.used - first.used) / (last.time - first.time) if last.time > first.time else 0.0


def _rank_growth(first: MemoryReading, last: MemoryReading, rank: int) -> float:
    grown = last.by_rank[rank] - first.by_rank.get(rank, last.by_rank[rank])
    return grown / (last.time - first.time)
