"""Collects the answers of many agents to one request for a snapshot, until all have come or time is up."""

from __future__ import annotations

from jaxrun.diagnosis.stacks import NATIVE_STACKS_TIMEOUT_S
from jaxrun.head.actions import TakeSnapshot
from jaxrun.protocol.agent_messages import SnapshotPurpose, SnapshotReply
from jaxrun.protocol.flight import Flight

_COLLECT_TIMEOUT_S = 1.5  # an agent waits for its fault handlers for a tenth of a second


class SnapshotCollection:
    """Answers to one TakeSnapshot; a rank that gives none has empty ones. Times are seconds since the epoch."""

    def __init__(self, request: TakeSnapshot, now: float) -> None:
        native = request.purpose is SnapshotPurpose.NATIVE
        self.deadline = now + _COLLECT_TIMEOUT_S + (NATIVE_STACKS_TIMEOUT_S if native else 0.0)
        self._request = request
        self._stacks: dict[int, str] = {}
        self._kernel_waits: dict[int, str] = {}
        self._cpu_seconds: dict[int, float] = {}
        self._bytes_written: dict[int, int] = {}
        self._flights: dict[int, Flight] = {}
        self._native_stacks: dict[int, str] = {}

    @property
    def complete(self) -> bool:
        return len(self._flights) >= len(self._request.ranks)

    def add(self, reply: SnapshotReply) -> bool:
        """Add the answer of one agent; returns whether all have come. An answer to an earlier request is ignored."""
        if reply.purpose == self._request.purpose:
            self._stacks.update(reply.stacks)
            self._kernel_waits.update(reply.kernel_waits)
            self._cpu_seconds.update(reply.cpu_seconds)
            self._bytes_written.update(reply.bytes_written)
            self._flights.update(reply.flights)
            self._native_stacks.update(reply.native_stacks)
        return self.complete

    def result(self) -> SnapshotReply:
        """All answers as one."""
        ranks = () if self._request.purpose.recorders_only else self._request.ranks
        return SnapshotReply(
            self._request.purpose,
            stacks={rank: self._stacks.get(rank, "") for rank in ranks},
            kernel_waits={rank: self._kernel_waits.get(rank, "") for rank in ranks},
            cpu_seconds={rank: self._cpu_seconds.get(rank, 0.0) for rank in ranks},
            bytes_written=dict(self._bytes_written),
            flights=dict(self._flights),
            native_stacks=dict(self._native_stacks),
        )
