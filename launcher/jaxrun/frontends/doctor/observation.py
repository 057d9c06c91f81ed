"""What the job of a doctor has shown, read from its run directory."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jaxrun.analysis.verdict.verdict import Verdict
from jaxrun.protocol.probe_messages import HostFacts, PeerResults
from jaxrun.protocol.worker_messages import DeviceReport
from jaxrun.records.event_log.actions import RecordClock
from jaxrun.records.rundir.recorded_files import read_job_events, read_text, read_verdict
from jaxrun.spec.backends.slurm_allocation import Allocation

Pair = tuple[str, str]  # of hosts: from, to
_TIMINGS_LOG = "rank-0000.out"
_ONE_WAY_S = 0.1  # how wrong a clock may be that was measured by one message


@dataclass(frozen=True, slots=True)
class CollectiveTiming:
    """As jaxrun_runtime.programs.collectives prints it."""

    collective: str
    size: int
    seconds: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Observation:
    """All that the checks know.

    started_by:      "Open MPI 5.0.11"; empty for this machine alone
    expected_hosts:  as the job was planned, where that names them
    facts, peers:    by rank; of a host on which nothing has started there are none
    devices, clocks: by rank, once it has joined
    verdict:         None where the job has left none
    unreachable:     why hosts on which nothing has started cannot be reached from here
    output:          what the job has printed
    in_directory:    whether the job's files were in the current directory, which the hosts may share
    """

    started_by: str = ""
    expected_hosts: tuple[str, ...] = ()
    facts: Mapping[int, HostFacts] = field(default_factory=dict)
    peers: Mapping[int, PeerResults] = field(default_factory=dict)
    devices: Mapping[int, DeviceReport] = field(default_factory=dict)
    clocks: Mapping[int, RecordClock] = field(default_factory=dict)
    timings: tuple[CollectiveTiming, ...] = ()
    verdict: Verdict | None = None
    unreachable: Mapping[str, str] = field(default_factory=dict)
    output: str = ""
    allocation: Allocation | None = None
    in_directory: bool = True

    @property
    def hosts(self) -> dict[str, HostFacts]:
        """The facts of each host, as its first rank has told them."""
        hosts: dict[str, HostFacts] = {}
        for _, facts in sorted(self.facts.items()):
            hosts.setdefault(facts.host, facts)
        return hosts

    @property
    def silent_hosts(self) -> list[str]:
        """The hosts of the job on which nothing has started, where it has not."""
        return [host for host in self.expected_hosts if host not in self.hosts]

    def ranks_on(self, host: str) -> list[int]:
        """The ranks of a host; this machine alone has told its facts once, for all of them."""
        if len(self.facts) == 1 < len(self.devices):
            return sorted(self.devices)
        return sorted(rank for rank, facts in self.facts.items() if facts.host == host)

    def devices_on(self, host: str) -> list[DeviceReport]:
        return [self.devices[rank] for rank in self.ranks_on(host) if rank in self.devices]

    @property
    def interfaces(self) -> dict[Pair, str]:
        """By which network interface a host has reached another."""
        return self._by_hosts({rank: results.interfaces for rank, results in self.peers.items()})

    @property
    def errors(self) -> dict[Pair, str]:
        """Why a host cannot connect to another."""
        return self._by_hosts({rank: results.errors for rank, results in self.peers.items()})

    def _by_hosts(self, values: Mapping[int, Mapping[int, str]]) -> dict[Pair, str]:
        name = self.host_of
        return {(name(one), name(other)): value for one, to in values.items() for other, value in to.items()}

    def host_of(self, rank: int) -> str:
        return self.facts[rank].host if rank in self.facts else f"rank {rank}"


def read_run_dir(path: Path) -> dict[str, Any]:
    """Return the fields of an Observation that the files of a job say; those of files that are missing are left out."""
    found: dict[str, Any] = {"facts": {}, "peers": {}, "devices": {}, "clocks": {}}
    for event in read_job_events(path).events:
        match message := event.message:
            case HostFacts():
                found["facts"][message.rank] = message
            case PeerResults():
                found["peers"][message.rank] = message
            case RecordClock():
                found["clocks"][message.rank] = replace(message, error_s=message.error_s or _ONE_WAY_S)
            case DeviceReport():
                found["devices"][message.rank] = message
    return {**found, "verdict": read_verdict(path), "timings": _read_timings(path / _TIMINGS_LOG)}


def _read_timings(log: Path) -> tuple[CollectiveTiming, ...]:
    with contextlib.suppress(OSError):
        for line in read_text(log).splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError):
                rows: Sequence[Mapping[str, Any]] = json.loads(line)["timings"]
                return tuple(CollectiveTiming(**row) for row in rows)
    return ()
