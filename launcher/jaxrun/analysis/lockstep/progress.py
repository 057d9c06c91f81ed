"""Computes how far ranks have come with their cross-process calls, and who is behind, as values and in a few words."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from jaxrun.protocol.flight import Flight, parse_group
from jaxrun.text import format_ranges, format_seconds

_MAX_STATES = 2  # mentioned in one line


class GroupProgress(Struct, frozen=True):
    """How far the ranks of a group have come: by rank, the number of the last call that it has made or entered."""

    reached: Mapping[int, int]

    @property
    def furthest(self) -> int:
        return max(self.reached.values(), default=0)

    @property
    def next_number(self) -> int:
        """The number of the first call that not all have reached."""
        return min(self.reached.values(), default=0) + 1

    def ahead(self, number: int) -> tuple[int, ...]:
        """The ranks that have come to this call."""
        return tuple(rank for rank, last in self.reached.items() if last >= number)

    def behind(self, number: int) -> tuple[int, ...]:
        """The ranks that have not come to this call."""
        return tuple(rank for rank, last in self.reached.items() if last < number)


def find_progress(flights: Mapping[int, Flight], group: str, size: int) -> GroupProgress:
    """Return the progress of those ranks of a group that have flights; the job has `size` ranks."""
    members = sorted(parse_group(group, size) & flights.keys())
    return GroupProgress({rank: flights[rank].last_number(group) for rank in members})


def format_progress(flights: Mapping[int, Flight], size: int, now: float | None = None) -> str:
    """Write `in call #12 jit(step), 61 s` or `after calls #11-12 jit(step)`; empty if nothing is known.

    flights:  by rank, of a job with `size` ranks
    now:      in seconds since the epoch; if given, the text says for how long
    """
    states: dict[tuple[str, str, str], list[tuple[int, float]]] = {}  # by (verb, name, group): numbers and start times
    for flight in flights.values():
        pending, last = flight.pending, flight.last_call
        if flight.compiling is not None:
            name, since = flight.compiling
            name += f" for call #{flight.compiled_for.number}" if flight.compiled_for else ""
            states.setdefault(("compiling", name, ""), []).append((0, since))
        elif pending is not None:
            states.setdefault(("in", flight.program(pending).name, pending.group), []).append(
                (pending.number, pending.since)
            )
        elif last is not None:
            states.setdefault(("after", flight.program(last).name, last.group), []).append((last.number, last.time))
    ranked = sorted(states.items(), key=lambda state: -len(state[1]))[:_MAX_STATES]
    return " or ".join(_format_state(*state, calls, size, now) for state, calls in ranked)


def _format_state(
    verb: str, name: str, group: str, calls: list[tuple[int, float]], size: int, now: float | None
) -> str:
    since = min(since for _, since in calls)
    ago = f", {format_seconds(now - since)}{' ago' if verb == 'after' else ''}" if now is not None else ""
    if verb == "compiling":
        return f"compiling {name}{ago}"
    numbers = {number for number, _ in calls}
    span = f"call #{min(numbers)}" if len(numbers) == 1 else f"calls #{min(numbers)}-{max(numbers)}"
    ranks = parse_group(group, size)
    of_group = f" of ranks {format_ranges(ranks)}" if len(ranks) < size else ""
    return " ".join(filter(None, (verb, span, name))) + of_group + ago
