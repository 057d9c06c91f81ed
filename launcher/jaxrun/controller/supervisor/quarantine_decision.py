"""Decides which hosts a job adds to the file of --quarantine, those with evidence against them; and writes the file.

A silent host may be healthy while the way to it is not: mpirun, ssh, or the network of the launcher's own host. So a
host counts as lost only if its own agent, or an agent on another host, has reported before. If all other hosts are
silent at once, none of them is blamed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from jaxrun.analysis.diagnosis.job_outcome import JobOutcome
from jaxrun.analysis.diagnosis.root_cause import find_culprits
from jaxrun.spec.backends.quarantine import add_to_quarantine


@dataclass(frozen=True, slots=True)
class Quarantine:
    """The hosts to avoid, with reasons; `spared` has hosts that were lost without being blamed, with reasons."""

    hosts: Mapping[str, str]
    spared: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class HostsHeard:
    """What was received in one attempt, and from which hosts, including spare hosts.

    reported:  the hosts whose agents have reported
    far:       those of them that are reached over a network, so not the launcher's own
    silent:    the hosts from which nothing more was received; a closed connection is not silence
    """

    reported: Collection[str] = ()
    far: Collection[str] = ()
    silent: Collection[str] = ()


def decide_quarantine(
    hosts: Mapping[int, str], outcome: JobOutcome, lost_spares: Mapping[str, str], heard: HostsHeard
) -> Quarantine:
    """`hosts` are the ranks' hosts; `lost_spares` are spare hosts that were lost while they waited, with reasons."""
    failed = {hosts[rank]: f"failed --host-check: {why}" for rank, why in outcome.failed_checks.items()}
    lost = {host: f"lost while it waited as a spare host: {why}" for host, why in lost_spares.items()}
    culprits = find_culprits(outcome.workers) if outcome.workers else []  # without victims of mpirun's end
    lost |= {hosts[worker.rank]: f"lost: {worker.lost_reason}" for worker in culprits if worker.lost_reason}
    lost |= {hosts[rank]: f"lost: {why}" for rank, why in outcome.lost_early.items()}
    far = {*heard.far}
    spared = {
        host: "no agent on another host has reported, so it may be that none can be reached from here"
        for host in lost
        if host not in heard.reported and not far - {host}
    }
    if len(far) > 1 and far <= {*heard.silent}:
        spared |= dict.fromkeys(
            far & lost.keys(), "all other hosts are silent as well, so it may be this host's network"
        )
    blamed = {host: why for host, why in lost.items() if host not in spared}
    return Quarantine({**blamed, **failed}, {host: why for host, why in spared.items() if host not in failed})


class QuarantineFile:
    """Adds the hosts to avoid to the file of --quarantine, each once per job."""

    def __init__(self, path: Path | None) -> None:
        """`path`: None without the option."""
        self._path = path
        self._quarantined: set[str] = set()
        self._spared: set[str] = set()  # lost hosts for which a line already says that they are not added

    def update(
        self, hosts: Mapping[int, str], outcome: JobOutcome, lost_spares: Mapping[str, str], heard: HostsHeard
    ) -> list[str]:
        """Add the hosts that an attempt has lost; returns lines for people."""
        if self._path is None:
            return []
        decided = decide_quarantine(hosts, outcome, lost_spares, heard)
        spared = {host: why for host, why in decided.spared.items() if host not in self._spared}
        self._spared.update(spared)
        lines = []
        for why in dict.fromkeys(spared.values()):
            named = ", ".join(host for host, each in spared.items() if each == why)
            lines.append(f"{named} not added to {self._path} (--quarantine): {why}")
        found = {host: why for host, why in decided.hosts.items() if host not in self._quarantined}
        self._quarantined.update(found)
        if found:
            lines.append(self._add(self._path, found))
        return lines

    @staticmethod
    def _add(path: Path, found: Mapping[str, str]) -> str:
        try:
            add_to_quarantine(path, found)
        except OSError as error:
            return f"{', '.join(found)} could not be added to {path} (--quarantine): {error.strerror}"
        return f"{', '.join(found)} added to {path} (--quarantine); to use a host again, delete its line there"
