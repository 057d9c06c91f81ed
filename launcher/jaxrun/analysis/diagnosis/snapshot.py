"""Where the ranks of a job were at one moment: the value behind `jaxrun stacks`, Ctrl-\\ and a timeout's verdict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from jaxrun.analysis.diagnosis.straggler import Straggler
from jaxrun.protocol.flight import Flight

_BY_RANK = ("hosts", "dumps", "waits", "natives")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All mappings are by rank.

    time:      seconds since the epoch
    dumps:     what the fault handler of each rank wrote; empty for a rank that did not answer
    waits:     the kernel's name for what its main thread sleeps in
    flights:   what its flight recorder holds
    finished:  the ranks whose program has ended
    natives:   its stack with C frames; None where they were not asked for
    fork_places:  where its program has forked, "loader.py:12 make_pool"
    straggler:    the rank or host that holds the others up, if one does
    """

    time: float
    hosts: Mapping[int, str]
    dumps: Mapping[int, str]
    waits: Mapping[int, str]
    flights: Mapping[int, Flight] = field(default_factory=dict)
    finished: tuple[int, ...] = ()
    natives: Mapping[int, str] | None = None
    fork_places: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    straggler: Straggler | None = None

    def to_content(self) -> dict[str, Any]:
        """Return what an answer carries."""
        content = {field.name: getattr(self, field.name) for field in fields(self)}
        flights = {rank: flight.to_content() for rank, flight in self.flights.items()}
        straggler = self.straggler.to_content() if self.straggler is not None else None
        return {**content, "flights": flights, "straggler": straggler}

    @classmethod
    def from_content(cls, content: Any) -> Snapshot:
        """Build a snapshot from what `to_content` returned, after JSON. Raises ValueError if it is anything else."""
        try:
            tables: dict[str, Any] = {
                name: {int(rank): str(item) for rank, item in content[name].items()}
                for name in _BY_RANK
                if content[name] is not None
            }
            flights = {int(rank): Flight.from_content(item) for rank, item in content["flights"].items()}
            finished = tuple(map(int, content["finished"]))
            forks = {int(rank): tuple(map(str, places)) for rank, places in content["fork_places"].items()}
            known = content["straggler"]
            straggler = Straggler.from_content(known) if known is not None else None
            tables |= {"finished": finished, "flights": flights, "fork_places": forks, "straggler": straggler}
            return cls(float(content["time"]), **tables)
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"not a snapshot of ranks: {error!r}") from None
