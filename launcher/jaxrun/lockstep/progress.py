"""How far ranks have come with their cross-process calls, in a few words for a line about them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jaxrun.lockstep.flight import AnyCall, Flight, members
from jaxrun.ranks import compact
from jaxrun.wording import plural, seconds

_KINDS = 2  # that one line tells of


@dataclass(frozen=True, slots=True)
class _Doing:
    """What a rank is at: "in" or "after" a call of the group, or "compiling" something."""

    verb: str
    name: str
    group: str = ""


def progress(flights: Mapping[int, Flight], size: int, now: float | None = None) -> str:
    """`in call #12 jit(step), 61 s`, `after calls #11-12 jit(step)`; empty where nothing is known.

    `flights` by rank, of a job of `size` ranks; `now`, in seconds since the epoch, to say for how long.
    """
    kinds: dict[_Doing, list[tuple[int, float]]] = {}
    for flight in flights.values():
        found = _doing(flight)
        if found is not None:
            doing, number, since = found
            kinds.setdefault(doing, []).append((number, since))
    ranked = sorted(kinds.items(), key=lambda kind: -len(kind[1]))[:_KINDS]
    return " or ".join(_spell(doing, calls, size, now) for doing, calls in ranked)


def price(flights: Mapping[int, Flight]) -> str:
    """What it cost to agree on each call first; empty if nobody did."""
    slowest = max(flights, key=lambda rank: flights[rank].agreed[1], default=None)
    if slowest is None or not flights[slowest].agreed[0]:
        return ""
    count, took = flights[slowest].agreed
    each = f"{1000 * took / count:.2f} ms each, waiting for slower ranks included"
    which = f"which took rank {slowest} {seconds(took)}, {each}"
    return f"--lockstep strict: {plural(count, 'call')} agreed on first, {which}."


def _doing(flight: Flight) -> tuple[_Doing, int, float] | None:
    """(what, number of the call, since when) of one rank."""
    if flight.compiling is not None:
        name, since = flight.compiling
        return _Doing("compiling", name), 0, since
    if flight.pending is not None:
        return _of_call("in", flight, flight.pending, flight.pending.since)
    if flight.last is not None:
        return _of_call("after", flight, flight.last, flight.last.time)
    return None


def _of_call(verb: str, flight: Flight, call: AnyCall, since: float) -> tuple[_Doing, int, float]:
    return _Doing(verb, flight.program(call).name, call.group), call.number, since


def _spell(doing: _Doing, calls: list[tuple[int, float]], size: int, now: float | None) -> str:
    since = min(since for _, since in calls)
    ago = f", {seconds(now - since)}{' ago' if doing.verb == 'after' else ''}" if now is not None else ""
    if doing.verb == "compiling":
        return f"compiling {doing.name}{ago}"
    numbers = {number for number, _ in calls}
    span = f"call #{min(numbers)}" if len(numbers) == 1 else f"calls #{min(numbers)}-{max(numbers)}"
    ranks = members(doing.group)
    of_group = f" of ranks {compact(ranks)}" if len(ranks) < size else ""
    return " ".join(filter(None, (doing.verb, span, doing.name))) + of_group + ago
