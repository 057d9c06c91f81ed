"""Where all ranks of a job are at one moment: their stacks, and what is needed to tell who waits for whom."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct, field

from jaxrun.analysis.diagnosis.helpers import Helpers
from jaxrun.analysis.lockstep.straggler import Straggler
from jaxrun.protocol.flight import Flight
from jaxrun.protocol.nccl_report import NcclReport


class JobStacks(Struct, frozen=True):
    """The stacks and calls of all ranks at one moment; all mappings are by rank.

    time:      seconds since the epoch
    dumps:     what each rank's fault handler wrote; empty for a rank that did not answer
    waits:     the kernel function in which the rank's main thread sleeps, or its ProcessState
    flights:   what the rank's flight recorder holds
    finished:  the ranks whose program has ended
    natives:   the rank's stack with C frames; None if it was not asked for
    platform:     of the devices: "cpu", "gpu", …; empty if unknown
    straggler:    the rank or host that slows the others down, if there is one
    helpers:      the threads and processes that the rank has started; None if they were not asked for
    nccl:         what NCCL's own service says; None if it was not asked, or has not answered
    raised:       the error that the last call of a gang has raised on these ranks, by the name of its type
    by_signal:    the types of exceptions by which a signal ends these ranks at this moment; they explain no hang
    """

    time: float
    hosts: Mapping[int, str]
    dumps: Mapping[int, str]
    waits: Mapping[int, str]
    flights: Mapping[int, Flight] = field(default_factory=dict)
    finished: tuple[int, ...] = ()
    natives: Mapping[int, str] | None = None
    straggler: Straggler | None = None
    platform: str = ""
    helpers: Mapping[int, Helpers] | None = None
    nccl: NcclReport | None = None
    raised: Mapping[int, str] = field(default_factory=dict)
    by_signal: tuple[str, ...] = ()
