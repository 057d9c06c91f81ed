"""What the ranks of a job do at one moment: where they are (stacks, a timeout's verdict), how far they are (`top`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from jaxrun.analysis.diagnosis.helpers import Helpers
from jaxrun.analysis.diagnosis.job_outcome import WorkerOutcome
from jaxrun.analysis.lockstep.straggler import Straggler
from jaxrun.protocol.flight import Flight
from jaxrun.protocol.nccl_report import NcclReport
from jaxrun.protocol.snapshot_messages import RankReply
from jaxrun.text import format_status


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All mappings are by rank.

    time:      seconds since the epoch
    dumps:     what the fault handler of each rank wrote; empty for a rank that did not answer
    waits:     the kernel's name for what its main thread sleeps in, or its ProcessState
    flights:   what its flight recorder holds
    finished:  the ranks whose program has ended
    natives:   its stack with C frames; None where they were not asked for
    platform:     of the devices: "cpu", "gpu", …; empty where it is not known
    straggler:    the rank or host that holds the others up, if one does
    helpers:      the threads and processes that ranks have started; None where these were not asked for
    nccl:         what NCCL's own service says; None where it was not asked, or has not answered
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


@dataclass(frozen=True, slots=True)
class RankEnd:
    """How a rank has ended, in few words."""

    text: str
    is_failure: bool = True


@dataclass(frozen=True, slots=True)
class Overview:
    """All mappings are by rank.

    time:       seconds since the epoch
    phase:      of the job: "starting", "running", "ending"
    hosts:      of all ranks, as far as they are known
    live:       the ranks that have a process
    flights:    the last call of each live rank; there is none where its host has not answered
    vitals:     what each of them uses
    ends:       how ranks have ended
    calls_per_step:  after how many calls they repeat themselves; 0 where that is not known
    straggler:  the rank or host that holds the others up, if one does
    awaited:    the lost hosts for which the job waits, and how long still, in words; empty if there are none
    """

    time: float
    phase: str
    hosts: Mapping[int, str]
    live: tuple[int, ...] = ()
    flights: Mapping[int, Flight] = field(default_factory=dict)
    vitals: Mapping[int, RankReply] = field(default_factory=dict)
    ends: Mapping[int, RankEnd] = field(default_factory=dict)
    calls_per_step: int = 0
    straggler: Straggler | None = None
    awaited: str = ""


def find_end(worker: WorkerOutcome) -> RankEnd | None:
    """How a worker ended, or that its program has; None while it works."""
    if worker.failure is not None:
        return RankEnd(f"raised {worker.failure.error}")
    if worker.lost_reason:
        return RankEnd("lost")
    if worker.killed_by_launcher:
        return RankEnd("stopped with the others", is_failure=False)
    if worker.status:
        return RankEnd(format_status(worker.status))
    return RankEnd("finished", is_failure=False) if worker.ended_well else None
