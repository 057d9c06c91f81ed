"""Collects the answers of many agents to requests for snapshots, each until all have come or its time is up."""

from __future__ import annotations

from collections.abc import Callable

from jaxrun.analysis.diagnosis.stacks import AIM_TIMEOUT_S, NATIVE_STACKS_TIMEOUT_S
from jaxrun.protocol.flight import Flight
from jaxrun.protocol.snapshot_messages import RankVitals, SnapshotPurpose, SnapshotReply
from jaxrun.records.event_log.actions import TakeSnapshot

_COLLECT_TIMEOUT_S = 1.5  # an agent waits for its fault handlers for a tenth of a second
_MORE_TIME_S = {SnapshotPurpose.NATIVE: NATIVE_STACKS_TIMEOUT_S, SnapshotPurpose.STRAGGLER: AIM_TIMEOUT_S}


class SnapshotCollection:
    """Answers to one TakeSnapshot; a rank that gives none has empty ones. Times are seconds since the epoch."""

    def __init__(self, request: TakeSnapshot, now: float) -> None:
        self.deadline = now + _COLLECT_TIMEOUT_S + _MORE_TIME_S.get(request.purpose, 0.0)
        self._request = request
        self._stacks: dict[int, str] = {}
        self._kernel_waits: dict[int, str] = {}
        self._cpu_seconds: dict[int, float] = {}
        self._bytes_written: dict[int, int] = {}
        self._file_bytes: dict[int, int] = {}
        self._call_counters: dict[int, tuple[int, ...]] = {}
        self._flights: dict[int, Flight] = {}
        self._native_stacks: dict[int, str] = {}
        self._core_waits: dict[int, float] = {}
        self._vitals: dict[int, RankVitals] = {}

    @property
    def complete(self) -> bool:
        return max(len(self._flights), len(self._call_counters)) >= len(self._request.ranks)

    def add(self, reply: SnapshotReply) -> None:
        """Add the answer of one agent."""
        self._stacks.update(reply.stacks)
        self._kernel_waits.update(reply.kernel_waits)
        self._cpu_seconds.update(reply.cpu_seconds)
        self._bytes_written.update(reply.bytes_written)
        self._file_bytes.update(reply.file_bytes)
        self._call_counters.update(reply.call_counters)
        self._flights.update(reply.flights)
        self._native_stacks.update(reply.native_stacks)
        self._core_waits.update(reply.core_waits)
        self._vitals.update(reply.vitals)

    def result(self) -> SnapshotReply:
        """All answers as one."""
        purpose = self._request.purpose
        ranks = () if purpose.recorders_only or purpose is SnapshotPurpose.OVERVIEW else self._request.ranks
        stacked = () if purpose is SnapshotPurpose.PROGRESS else ranks
        return SnapshotReply(
            purpose,
            stacks={rank: self._stacks.get(rank, "") for rank in stacked},
            kernel_waits={rank: self._kernel_waits.get(rank, "") for rank in stacked},
            cpu_seconds={rank: self._cpu_seconds.get(rank, 0.0) for rank in ranks},
            bytes_written=dict(self._bytes_written),
            file_bytes=dict(self._file_bytes),
            call_counters=dict(self._call_counters),
            flights=dict(self._flights),
            native_stacks=dict(self._native_stacks),
            core_waits=dict(self._core_waits),
            vitals=dict(self._vitals),
        )


class SnapshotCollections:
    """The collections that are not complete, one for each purpose. Each method returns the results that are."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._by_purpose: dict[SnapshotPurpose, SnapshotCollection] = {}

    def start(self, request: TakeSnapshot) -> list[SnapshotReply]:
        """Wait for the answers to this request, and no longer for those to an earlier one of the same purpose."""
        self._by_purpose[request.purpose] = SnapshotCollection(request, self._clock())
        return self._pop(lambda collection: collection.complete)

    def add(self, reply: SnapshotReply) -> list[SnapshotReply]:
        """Add the answer of one agent, if it is still waited for."""
        if reply.purpose in self._by_purpose:
            self._by_purpose[reply.purpose].add(reply)
        return self._pop(lambda collection: collection.complete)

    def deadline(self) -> float | None:
        """When `expire` is to be called."""
        return min((collection.deadline for collection in self._by_purpose.values()), default=None)

    def expire(self) -> list[SnapshotReply]:
        """Give up waiting where time is up."""
        now = self._clock()
        return self._pop(lambda collection: collection.deadline <= now)

    def _pop(self, ended: Callable[[SnapshotCollection], bool]) -> list[SnapshotReply]:
        purposes = [purpose for purpose, collection in self._by_purpose.items() if ended(collection)]
        return [self._by_purpose.pop(purpose).result() for purpose in purposes]
