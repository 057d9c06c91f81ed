"""The stacks of ranks on many hosts, until all have come or it has taken too long."""

from __future__ import annotations

from jaxrun.diagnosis.stacks import NATIVE_STACKS_TIMEOUT_S
from jaxrun.head.actions import TakeSnapshot
from jaxrun.protocol.agent_messages import SnapshotPurpose, SnapshotReply
from jaxrun.protocol.flight import Flight

_COLLECT_S = 1.5  # seconds; an agent asks for a tenth of one


class StacksCollection:
    """The answers to one TakeStacks; a rank that gives none has empty ones. Times are seconds since the epoch."""

    def __init__(self, order: TakeSnapshot, now: float) -> None:
        self.deadline = now + _COLLECT_S + (NATIVE_STACKS_TIMEOUT_S if order.purpose is SnapshotPurpose.NATIVE else 0.0)
        self._request = order
        self._dumps: dict[int, str] = {}
        self._waits: dict[int, str] = {}
        self._cpu: dict[int, float] = {}
        self._written: dict[int, int] = {}
        self._flights: dict[int, Flight] = {}
        self._natives: dict[int, str] = {}

    @property
    def complete(self) -> bool:
        return len(self._flights) >= len(self._request.ranks)

    def add(self, taken: SnapshotReply) -> bool:
        """One agent's answer; whether it was the last. An answer to an earlier question is left out."""
        if taken.purpose == self._request.purpose:
            self._dumps.update(taken.stacks)
            self._waits.update(taken.kernel_waits)
            self._cpu.update(taken.cpu_seconds)
            self._written.update(taken.bytes_written)
            self._flights.update(taken.flights)
            self._natives.update(taken.native_stacks)
        return self.complete

    def result(self) -> SnapshotReply:
        ranks = () if self._request.purpose.recorders_only else self._request.ranks
        return SnapshotReply(
            self._request.purpose,
            stacks={rank: self._dumps.get(rank, "") for rank in ranks},
            kernel_waits={rank: self._waits.get(rank, "") for rank in ranks},
            cpu_seconds={rank: self._cpu.get(rank, 0.0) for rank in ranks},
            bytes_written=dict(self._written),
            flights=dict(self._flights),
            native_stacks=dict(self._natives),
        )
