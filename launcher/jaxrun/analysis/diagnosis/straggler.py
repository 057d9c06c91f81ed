"""A rank that comes to calls later than the others, as a value."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Straggler:
    """What a party, a rank or all ranks of a host, cost the others.

    ranks:      of the party
    group:      the ranks that make the calls together, as text
    place:      of the calls, `train.py:88 main`; empty where all calls of the group are at one place
    number:     of the last call that was compared
    calls:      how many were compared
    last:       in what share of them it came last
    late_s:     by how much, on average
    share:      of the time, in which the others waited for it
    net_share:  the same, less the time in which others were waited for
    is_proven:  whether they surely waited: most of that time they were inside the call
    frame:      where it was meanwhile, `data.py:10 load`; empty where that is not known
    """

    ranks: tuple[int, ...]
    group: str
    place: str
    number: int
    calls: int
    last: float
    late_s: float
    share: float
    net_share: float
    is_proven: bool
    frame: str = ""
