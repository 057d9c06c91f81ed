"""The stacks of ranks on many hosts, until all have come or it has taken too long."""

from __future__ import annotations

from jaxrun.head.events import FLIGHTS_ONLY, StacksTaken, TakeStacks
from jaxrun.verdict.stacks import NATIVE_LIMIT

_PATIENCE = 1.5  # seconds; an agent asks for a tenth of one


class StacksCollection:
    """The answers to one TakeStacks; a rank that gives none has empty ones. Times are seconds since the epoch."""

    def __init__(self, order: TakeStacks, now: float) -> None:
        self.due = now + _PATIENCE + (NATIVE_LIMIT if order.purpose == "native" else 0.0)
        self._order = order
        self._dumps: dict[int, str] = {}
        self._waits: dict[int, str] = {}
        self._cpu: dict[int, float] = {}
        self._written: dict[int, int] = {}
        self._flights: dict[int, str] = {}
        self._natives: dict[int, str] = {}

    @property
    def complete(self) -> bool:
        return len(self._flights) >= len(self._order.ranks)

    def add(self, taken: StacksTaken) -> bool:
        """One agent's answer; whether it was the last. An answer to an earlier question is left out."""
        if taken.purpose == self._order.purpose:
            self._dumps.update(taken.dumps)
            self._waits.update(taken.waits)
            self._cpu.update(taken.cpu)
            self._written.update(taken.written)
            self._flights.update(taken.flights)
            self._natives.update(taken.natives)
        return self.complete

    def result(self) -> StacksTaken:
        ranks = () if self._order.purpose in FLIGHTS_ONLY else self._order.ranks
        return StacksTaken(
            self._order.purpose,
            dumps={rank: self._dumps.get(rank, "") for rank in ranks},
            waits={rank: self._waits.get(rank, "") for rank in ranks},
            cpu={rank: self._cpu.get(rank, 0.0) for rank in ranks},
            written=dict(self._written),
            flights=dict(self._flights),
            natives=dict(self._natives),
        )
