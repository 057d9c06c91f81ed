"""How far the program says it has come (jaxrun_runtime.progress), over all ranks, as a value and in a few words."""

from __future__ import annotations

from collections.abc import Mapping

from jaxrun.protocol.flight import Flight, ToldStep
from jaxrun.text import format_seconds


def find_told_step(flights: Mapping[int, Flight]) -> ToldStep | None:
    """Return what the rank has told that is behind the others; None if none has told a step."""
    told = [flight.told_step for flight in flights.values() if flight.told_step is not None]
    return min(told, key=lambda one: (one.step, one.at), default=None)


def seconds_left(told: ToldStep) -> float | None:
    """Return how long the rest takes at the pace so far; None if that is unknown."""
    if not told.total or told.per_second <= 0.0:
        return None
    return max(0, told.total - told.step) / told.per_second


def format_step(told: ToldStep) -> str:
    """Write `step 340 of 1,000 (34 %)`."""
    share = f" of {told.total:,} ({min(1.0, told.step / told.total):.0%})" if told.total else ""
    return f"step {told.step:,}{share.replace('%', ' %')}"


def format_told_step(told: ToldStep) -> str:
    """Write `step 340 of 1,000 (34 %), 2.1 steps/s, 5 min 14 s left`."""
    parts = [format_step(told)]
    if told.per_second > 0.0:
        parts.append(f"{told.per_second:.3g} steps/s")
    left = seconds_left(told)
    if left is not None:
        parts.append(f"{format_seconds(left)} left")
    return ", ".join(parts)
