"""How far the ranks of a job have come at one moment, and which resources they use: for `top`, metrics and the page."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct, field

from jaxrun.analysis.diagnosis.doing import Doing
from jaxrun.analysis.diagnosis.error_choice import error_name
from jaxrun.analysis.diagnosis.job_outcome import WorkerOutcome
from jaxrun.analysis.lockstep.straggler import Straggler
from jaxrun.protocol.flight import Flight
from jaxrun.protocol.flight_file import NOTHING
from jaxrun.protocol.query_messages import RankReply
from jaxrun.text import format_status


class RankEnd(Struct, frozen=True):
    """How a rank ended, in a few words; `has_finished`: its program ended well, by itself."""

    text: str
    is_failure: bool = True
    has_finished: bool = False

    @property
    def doing(self) -> Doing:
        if self.is_failure:
            return Doing.FAILED
        return Doing.FINISHED if self.has_finished else Doing.ENDED


class HostMemoryUse(Struct, frozen=True):
    """The memory of a host, or of the ranks' cgroup on it if that is fuller, in bytes: used, and how much there is."""

    host: str
    used_bytes: int
    limit_bytes: int


class Overview(Struct, frozen=True):
    """The progress of all ranks at one moment; all mappings are by rank.

    time:       seconds since the epoch
    phase:      of the job: "starting", "running", "ending"
    hosts:      of all ranks, as far as they are known
    live:       the ranks that have a process
    flights:    the last call of each live rank; missing if its host has not answered
    vitals:     the resources that each live rank uses
    ends:       how ranks have ended
    calls_per_step:  number of calls after which the sequence of calls repeats itself; 0 if unknown
    straggler:  the rank or host that slows the others down, if there is one
    stall:      for how long the job has made no progress, and who waits for whom, in words; empty before a notice
    awaited:    the lost hosts for which the job waits, and how long it still will, in words; empty if there are none
    debugged:   the ranks that a person debugs
    returning:  the lost ranks that were started again, and do not take part yet
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
    stall: str = ""
    awaited: str = ""
    debugged: tuple[int, ...] = ()
    returning: tuple[int, ...] = ()

    @property
    def calls_made(self) -> float | None:
        """How many cross-process calls the median rank has made; None if no calls are recorded."""
        made = [sum(flight.call_counts.values()) for flight in self.flights.values() if flight.level != NOTHING]
        from statistics import median  # takes 5 ms

        return median(made) if made else None

    @property
    def idle_s(self) -> float | None:
        """For how many seconds no rank has come to a cross-process call; None if none has made any."""
        ages = [
            self.vitals[rank].time - came_at
            for rank, flight in self.flights.items()
            if rank in self.vitals and (came_at := flight.came_at)
        ]
        return max(0.0, min(ages)) if ages else None

    @property
    def host_memory(self) -> tuple[HostMemoryUse, ...]:
        """The memory of each host that is known, in the order of its ranks: the fullest that its agents report."""
        found: dict[str, HostMemoryUse] = {}
        for rank, vitals in sorted(self.vitals.items()):
            host = self.hosts.get(rank, "")
            seen = HostMemoryUse(host, vitals.host_memory_bytes, vitals.host_memory_limit_bytes)
            if seen.limit_bytes and (host not in found or _fullness(seen) > _fullness(found[host])):
                found[host] = seen
        return tuple(found.values())


def _fullness(memory: HostMemoryUse) -> float:
    return memory.used_bytes / memory.limit_bytes


def find_end(worker: WorkerOutcome) -> RankEnd | None:
    """Return how a worker, or its program, ended; None while the program runs."""
    if worker.failure is not None:
        return RankEnd(f"raised {error_name(worker.failure)}")
    if worker.lost_reason:
        return RankEnd("lost")
    if worker.killed_by_launcher:
        return RankEnd("stopped with the others", is_failure=False)
    if worker.status:
        return RankEnd(format_status(worker.status))
    return RankEnd("finished", is_failure=False, has_finished=True) if worker.ended_well else None
