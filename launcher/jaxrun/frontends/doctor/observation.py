"""The results of a doctor's job, read from its run directory."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from jaxrun.analysis.verdict.verdict import Verdict
from jaxrun.job_events.actions import RecordClock
from jaxrun.job_events.events import AttemptStarted
from jaxrun.protocol.agent_id import AgentId
from jaxrun.protocol.probe_messages import HostFacts, PeerResults
from jaxrun.protocol.worker_messages import DeviceReport
from jaxrun.records.document_types import CollectiveTiming
from jaxrun.records.rundir.recorded_files import read_job_events, read_text, read_verdict
from jaxrun.spec.backends.slurm_allocation import Allocation

Pair = tuple[str, str]  # of hosts: from, to
_TIMINGS_LOG = "rank-0000.out"
_ONE_WAY_S = 0.1  # error of a clock offset that comes from a single message


class Observation(Struct, frozen=True):
    """Everything that the checks know.

    started_by:      "Open MPI 5.0.11"; empty for this machine alone
    expected_hosts:  as planned, if the plan names them
    agents:          the ranks of each agent
    facts, peers:    by agent; missing for a host on which nothing has started
    devices, clocks: by rank, once it has joined
    verdict:         None if the job has left none
    unreachable:     why hosts on which nothing has started cannot be reached from here
    output:          the job's output
    in_directory:    whether the job's files were in the current directory, which the hosts may share
    """

    started_by: str = ""
    expected_hosts: tuple[str, ...] = ()
    agents: Mapping[AgentId, tuple[int, ...]] = field(default_factory=dict)
    facts: Mapping[AgentId, HostFacts] = field(default_factory=dict)
    peers: Mapping[AgentId, PeerResults] = field(default_factory=dict)
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
        """The facts of each host, from its first agent."""
        hosts: dict[str, HostFacts] = {}
        for _, facts in sorted(self.facts.items()):
            hosts.setdefault(facts.host, facts)
        return hosts

    @property
    def silent_hosts(self) -> list[str]:
        """The hosts of the job on which nothing has started; empty if it has started."""
        return [host for host in self.expected_hosts if host not in self.hosts]

    def ranks_on(self, host: str) -> list[int]:
        of_host = [agent for agent, facts in self.facts.items() if facts.host == host]
        return sorted(rank for agent in of_host for rank in self.agents.get(agent, ()))

    def devices_on(self, host: str) -> list[DeviceReport]:
        return [self.devices[rank] for rank in self.ranks_on(host) if rank in self.devices]

    @property
    def interfaces(self) -> dict[Pair, str]:
        """The network interface by which a host has reached another."""
        return self._by_hosts({agent: results.interfaces for agent, results in self.peers.items()})

    @property
    def errors(self) -> dict[Pair, str]:
        """The reason why a host cannot connect to another."""
        return self._by_hosts({agent: results.errors for agent, results in self.peers.items()})

    def _by_hosts(self, values: Mapping[AgentId, Mapping[AgentId, str]]) -> dict[Pair, str]:
        name = self.host_of
        return {(name(one), name(other)): value for one, to in values.items() for other, value in to.items()}

    def host_of(self, agent: AgentId) -> str:
        return self.facts[agent].host if agent in self.facts else f"agent {agent}"

    def host_of_rank(self, rank: int) -> str:
        agents = [agent for agent, ranks in self.agents.items() if rank in ranks]
        return self.host_of(agents[0]) if agents else f"rank {rank}"


def read_run_dir(path: Path) -> dict[str, Any]:
    """Return the fields of an Observation that a job's files contain; fields from missing files are left out."""
    found: dict[str, Any] = {"agents": {}, "facts": {}, "peers": {}, "devices": {}, "clocks": {}}
    for event in read_job_events(path):
        match message := event.message:
            case AttemptStarted():
                found["agents"] = message.agents
            case HostFacts():
                found["facts"][message.agent] = message
            case PeerResults():
                found["peers"][message.agent] = message
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
