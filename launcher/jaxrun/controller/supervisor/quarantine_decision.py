"""Decides which hosts a job adds to the file of --quarantine, those with evidence against them; and writes the file.

A silent host may be healthy while the way to it is not: mpirun, ssh, or the network of the launcher's own host. So a
host counts as lost only if its own agent, or an agent on another host, has reported before. If all other hosts are
silent at once, none of them is blamed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from jaxrun.analysis.diagnosis.job_end import HostCheckFailed, LostAtStart
from jaxrun.analysis.diagnosis.job_outcome import JobOutcome
from jaxrun.analysis.diagnosis.root_cause import find_culprits
from jaxrun.controller.roster import Roster
from jaxrun.spec.backends.quarantine import add_to_quarantine
from jaxrun.spec.job.plan import Plan


class Quarantine(Struct, frozen=True):
    """The hosts to avoid, with reasons; `spared` has hosts that were lost without being blamed, with reasons."""

    hosts: Mapping[str, str]
    spared: Mapping[str, str]


def decide_quarantine(plan: Plan, roster: Roster, outcome: JobOutcome) -> Quarantine:
    """Decide after an attempt. The roster knows which hosts were heard, and how."""
    hosts = plan.host_of
    reports = {seat.host: seat.report for seat in roster.seats.values() if seat.report is not None}
    # Both ends of the connection of an agent on the launcher's own host have one address.
    far = {host for host, report in reports.items() if report.address != report.head_address}
    silent = {seat.host for seat in roster.seats.values() if seat.is_silent}  # a closed connection is not silence
    lost_spares = roster.lost_spares()
    failed = {}
    if isinstance(outcome.end, HostCheckFailed):
        failed = {hosts[rank]: f"failed --host-check: {why}" for rank, why in outcome.end.failed.items()}
    lost = {host: f"lost while it waited as a spare host: {why}" for host, why in lost_spares.items()}
    culprits = find_culprits(outcome.workers) if outcome.workers else []  # without victims of mpirun's end
    where_lost = [worker for worker in culprits if worker.lost_reason and not outcome.is_host_replaced(worker)]
    lost |= {hosts[worker.rank]: f"lost: {worker.lost_reason}" for worker in where_lost}
    lost |= {host: f"lost: {why}" for host, why in roster.replaced_hosts().items()}
    if isinstance(outcome.end, LostAtStart):
        lost |= {hosts[rank]: f"lost: {why}" for rank, why in outcome.end.lost.items()}
    spared = {
        host: "no agent on another host has reported, so it may be that none can be reached from here"
        for host in lost
        if host not in reports and not far - {host}
    }
    if len(far) > 1 and far <= silent:
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

    def update(self, plan: Plan, roster: Roster, outcome: JobOutcome) -> list[str]:
        """Add the hosts that an attempt has lost; returns lines for people."""
        if self._path is None:
            return []
        decided = decide_quarantine(plan, roster, outcome)
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
