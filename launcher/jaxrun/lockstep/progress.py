"""How far ranks have come with their cross-process calls, in a few words for a line about them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jaxrun.protocol.flight import AnyCall, Flight, parse_group
from jaxrun.text import format_ranges, format_seconds, plural

_KINDS = 2  # that one line tells of


@dataclass(frozen=True, slots=True)
class _CallState:
    """What a rank is at: "in" or "after" a call of the group, or "compiling" something."""

    verb: str
    name: str
    group: str = ""


def format_progress(flights: Mapping[int, Flight], size: int, now: float | None = None) -> str:
    """`in call #12 jit(step), 61 s`, `after calls #11-12 jit(step)`; empty where nothing is known.

    `flights` by rank, of a job of `size` ranks; `now`, in seconds since the epoch, to say for how long.
    """
    kinds: dict[_CallState, list[tuple[int, float]]] = {}
    for flight in flights.values():
        found = _doing(flight)
        if found is not None:
            doing, number, since = found
            kinds.setdefault(doing, []).append((number, since))
    ranked = sorted(kinds.items(), key=lambda kind: -len(kind[1]))[:_KINDS]
    return " or ".join(_spell(doing, calls, size, now) for doing, calls in ranked)


def format_strict_cost(flights: Mapping[int, Flight]) -> str:
    """What it cost to agree on each call first; empty if nobody did."""
    slowest = max(flights, key=lambda rank: flights[rank].agreement_cost[1], default=None)
    if slowest is None or not flights[slowest].agreement_cost[0]:
        return ""
    count, took = flights[slowest].agreement_cost
    each = f"{1000 * took / count:.2f} ms each, waiting for slower ranks included"
    which = f"which took rank {slowest} {format_seconds(took)}, {each}"
    return f"--lockstep strict: {plural(count, 'call')} agreed on first, {which}."


def _doing(flight: Flight) -> tuple[_CallState, int, float] | None:
    """(what, number of the call, since when) of one rank."""
    if flight.compiling is not None:
        name, since = flight.compiling
        return _CallState("compiling", name), 0, since
    if flight.pending is not None:
        return _of_call("in", flight, flight.pending, flight.pending.since)
    if flight.last_call is not None:
        return _of_call("after", flight, flight.last_call, flight.last_call.time)
    return None


def _of_call(verb: str, flight: Flight, call: AnyCall, since: float) -> tuple[_CallState, int, float]:
    return _CallState(verb, flight.program(call).name, call.group), call.number, since


def _spell(doing: _CallState, calls: list[tuple[int, float]], size: int, now: float | None) -> str:
    since = min(since for _, since in calls)
    ago = f", {format_seconds(now - since)}{' ago' if doing.verb == 'after' else ''}" if now is not None else ""
    if doing.verb == "compiling":
        return f"compiling {doing.name}{ago}"
    numbers = {number for number, _ in calls}
    span = f"call #{min(numbers)}" if len(numbers) == 1 else f"calls #{min(numbers)}-{max(numbers)}"
    ranks = parse_group(doing.group)
    of_group = f" of ranks {format_ranges(ranks)}" if len(ranks) < size else ""
    return " ".join(filter(None, (doing.verb, span, doing.name))) + of_group + ago
