"""How far all ranks of a job had come at one moment, and what they used: the value behind `jaxrun top`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from jaxrun.analysis.diagnosis.straggler import Straggler
from jaxrun.analysis.diagnosis.worker_outcome import WorkerOutcome
from jaxrun.protocol.flight import Flight
from jaxrun.protocol.snapshot_messages import RankVitals
from jaxrun.text import format_signal


@dataclass(frozen=True, slots=True)
class Overview:
    """All mappings are by rank.

    time:       seconds since the epoch
    phase:      of the job: "starting", "running", "ending"
    hosts:      of all ranks, as far as they are known
    live:       the ranks that have a process
    flights:    the last call of each live rank; there is none where its host has not answered
    vitals:     what each of them uses
    ends:       how ranks have ended, in a few words
    calls_per_step:  after how many calls they repeat themselves; 0 where that is not known
    straggler:  the rank or host that holds the others up, if one does
    """

    time: float
    phase: str
    hosts: Mapping[int, str]
    live: tuple[int, ...] = ()
    flights: Mapping[int, Flight] = field(default_factory=dict)
    vitals: Mapping[int, RankVitals] = field(default_factory=dict)
    ends: Mapping[int, str] = field(default_factory=dict)
    calls_per_step: int = 0
    straggler: Straggler | None = None


FINISHED = "finished"
STOPPED_BY_US = "stopped with the others"


def describe_end(worker: WorkerOutcome) -> str:
    """In few words how a worker ended, or that its program has; empty while it works."""
    if worker.failure is not None:
        return f"raised {worker.failure.error}"
    if worker.lost_reason:
        return "lost"
    if worker.killed_by_launcher:
        return STOPPED_BY_US
    if worker.status is not None and worker.status < 0:
        return f"killed by {format_signal(-worker.status)}"
    if worker.status:
        return f"exited with {worker.status}"
    return FINISHED if worker.finished or worker.status == 0 else ""
