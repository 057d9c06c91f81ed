"""At which moment a rank is on its way to its next call: from the times of its last ones. No I/O.

Times are seconds since the epoch on the rank's own clock.
"""

from __future__ import annotations

from itertools import pairwise
from math import ceil

from jaxrun.protocol.flight import Flight


def next_moment(flight: Flight, site: int, lead_s: float, now: float) -> float:
    """Return when the rank will probably be `lead_s` seconds before its next call at this site; now if nothing says."""
    entered = [timing.entered for timing in flight.timings if timing.site == site]
    if len(entered) < 2:
        return now
    periods = sorted(later - earlier for earlier, later in pairwise(entered))
    period = periods[len(periods) // 2]
    moment = entered[-1] - lead_s
    return moment + max(0, ceil((now - moment) / period)) * period if period > 0 else now


def was_at(flight: Flight, site: int, lead_s: float, moment: float) -> bool:
    """Whether the rank was about `lead_s` seconds before a call at this site, and not inside one before it."""
    before = [timing for timing in flight.timings if timing.entered <= moment]
    if not before or moment < before[-1].dispatched or 0.0 < flight.entered <= moment:
        return False
    after = [timing for timing in flight.timings if timing.entered > moment]
    return not after or (after[0].site == site and after[0].entered - moment <= 2 * lead_s)
