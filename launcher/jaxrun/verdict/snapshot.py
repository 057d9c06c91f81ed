"""What one look at the ranks of a job has shown, as a value: on the screen, in stacks.json and in the verdict."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from jaxrun.diagnosis import stacks
from jaxrun.lockstep.progress import format_progress
from jaxrun.protocol.flight import Flight, strip_directory
from jaxrun.text import format_ranks_on_hosts
from jaxrun.verdict import deadlocks

_WIDTH = 100
_BY_RANK = ("hosts", "dumps", "waits", "natives")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """By rank: its host, what its fault handler wrote, what the kernel says that it waits in, what its flight recorder
    holds, and its stack with C frames, where that was asked for.

    time:      seconds since the epoch
    finished:  the ranks whose program has ended
    """

    time: float
    hosts: Mapping[int, str]
    dumps: Mapping[int, str]
    waits: Mapping[int, str]
    flights: Mapping[int, Flight] = field(default_factory=dict)
    finished: tuple[int, ...] = ()
    natives: Mapping[int, str] | None = None

    def format(self) -> str:
        """Who is where, in groups, how far each has come, and what that says; empty if no rank has stacks."""

        def calls(ranks: Iterable[int]) -> str:
            return format_progress(
                {rank: self.flights[rank] for rank in ranks if rank in self.flights}, len(self.hosts), self.time
            )

        groups = stacks.format_groups(self.dumps, self.hosts, self.waits, calls)
        if not groups:
            return ""
        return "\n".join([groups, *self._finished(calls(self.finished)), *self._sentences()])

    def _finished(self, calls: str) -> Iterator[str]:
        if self.finished:
            have = "has" if len(self.finished) == 1 else "have"
            yield f"{format_ranks_on_hosts(self.finished, self.hosts)} {have} finished{f', {calls}' if calls else ''}."

    def _sentences(self) -> Iterator[str]:
        places = {rank: [strip_directory(s[0]) for s in flight.sites.values()] for rank, flight in self.flights.items()}
        for sentence in deadlocks.explain_deadlock(self.dumps, self.waits, self.hosts, self.finished, places):
            yield textwrap.fill(sentence, _WIDTH, break_long_words=False, break_on_hyphens=False)

    def to_json(self) -> str:
        flights = {rank: flight.to_content() for rank, flight in self.flights.items()}
        content = {field.name: getattr(self, field.name) for field in fields(self)}
        return json.dumps({**content, "flights": flights}) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Snapshot:
        """What `to_json` wrote. ValueError if it is none."""
        content = json.loads(text)
        try:
            tables: dict[str, Any] = {
                name: {int(rank): str(item) for rank, item in content[name].items()}
                for name in _BY_RANK
                if content[name] is not None
            }
            flights = {int(rank): Flight.from_content(item) for rank, item in content["flights"].items()}
            return cls(
                time=float(content["time"]), finished=tuple(map(int, content["finished"])), flights=flights, **tables
            )
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"no look at ranks: {error!r}") from None
