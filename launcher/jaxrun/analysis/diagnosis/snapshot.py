"""Where the ranks of a job were at one moment: the value behind `jaxrun stacks`, Ctrl-\\ and a timeout's verdict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from jaxrun.analysis.diagnosis.straggler import Straggler
from jaxrun.protocol.flight import Flight


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All mappings are by rank.

    time:      seconds since the epoch
    dumps:     what the fault handler of each rank wrote; empty for a rank that did not answer
    waits:     the kernel's name for what its main thread sleeps in, or its ProcessState
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
