"""Collects the reports of agents, and refuses agents that cannot belong to one job."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from jaxrun.analysis.diagnosis.fabric import check_fabric
from jaxrun.controller.head.consistency import describe_different_devices, describe_unknown_rank, refuse
from jaxrun.controller.roster import Roster
from jaxrun.errors import NotUniformError, UnavailableError
from jaxrun.protocol.agent_id import AgentId
from jaxrun.protocol.agent_messages import AgentReport, NextAttempt, StartWorker
from jaxrun.protocol.names import VERSION
from jaxrun.spec.job.plan import Plan
from jaxrun.spec.job.rank_placement import Placement
from jaxrun.spec.job.worker_assignment import (
    Assignment,
    LauncherSettings,
    assign_on_host,
    assign_workers,
    group_by_host,
)
from jaxrun.text import format_columns, format_ranks, format_ranks_on_hosts


class HostCheckError(UnavailableError):
    """Hosts have failed --host-check; `failed` has the reason by rank."""

    def __init__(self, failed: Mapping[int, str], hosts: Mapping[int, str]) -> None:
        self.failed = failed
        texts = dict.fromkeys(f"{hosts[rank]} failed --host-check: {why}" for rank, why in sorted(failed.items()))
        super().__init__("; ".join(texts))


class SpareHost(Struct, frozen=True):
    """A spare host that can take the place of a lost one at once.

    placement:  of the attempt, with this host in that place
    calls:      to each of its agents, with the agent's ranks
    starts:     what each of its agents starts, once it has checked its host
    """

    host: str
    placement: Placement
    calls: Mapping[AgentId, NextAttempt]
    starts: Mapping[AgentId, tuple[StartWorker, ...]]


class AgentRegistry:
    """Compares the reports of the agents with ranks of one attempt.

    roster:  has the reports
    """

    def __init__(
        self,
        plan: Plan,
        settings: LauncherSettings,
        roster: Roster,
        *,
        directory: str = "",
        listen_addresses: str = "",
    ) -> None:
        """`settings` hold for all workers.

        directory:         where the job was started; empty if the agents may be anywhere
        listen_addresses:  where the head listens, as text for people
        """
        self.job = plan.job
        self.size = len(plan.workers)
        self.roster = roster
        self._plan = plan
        self.listen_addresses = listen_addresses
        self._settings = settings
        self._directory = directory

    @property
    def agents(self) -> Mapping[AgentId, tuple[int, ...]]:
        """The ranks of each agent that has any."""
        return self.roster.agents

    @property
    def reports(self) -> Mapping[AgentId, AgentReport]:
        return self.roster.reports

    @property
    def complete(self) -> bool:
        return self.roster.complete

    @property
    def lacks_environment(self) -> bool:
        """Whether agents report again once they have the environment of the job."""
        return any(report.lacks_environment for report in self.reports.values())

    @property
    def is_started_by_hand(self) -> bool:
        """Whether a lost agent comes back by itself: people, or a cluster, start its command again."""
        return self._plan.is_started_by_hand

    def may_return(self, agent: AgentId) -> bool:
        """Whether a lost agent may come back, or another in its place, while the ranks of others run (--wait-hosts).

        Not with --stage: hosts get their copies only at the start of an attempt.
        """
        return bool(self.job.host_wait) and self.is_started_by_hand and agent != 0 and not self.job.stage

    @property
    def is_first_attempt(self) -> bool:
        return self._plan.attempt == 1

    @property
    def reported_ranks(self) -> set[int]:
        """The ranks whose agents have reported."""
        return {rank for agent in self.reports for rank in self.agents[agent]}

    def add(self, report: AgentReport) -> None:
        """Add a report. Raises NotUniformError or UnavailableError if this agent cannot belong to the job."""
        by_hand, size = self.job.host_rank is not None, self.size
        known = self.reports.get(report.agent)
        is_news = known is None or (known.lacks_environment and known.pid == report.pid)
        if is_news and report.agent in self.agents:
            self.roster.add_report(report)
        self.check_command(report)
        if report.agent not in self.agents:
            raise NotUniformError(describe_unknown_rank(report.agent, size))
        if known is not None and not is_news:
            host_rank = report.agent * (self.job.hosts or 1) // size if by_hand else None
            raise NotUniformError(_describe_duplicate(known, report, host_rank))
        self.check_installation(report)

    def add_late(self, report: AgentReport) -> None:
        """Note a report that changes nothing for this attempt, as that has begun, or ends."""
        if report.agent in self.agents:
            self.roster.add_report(report)

    def check_command(self, report: AgentReport) -> None:
        """Raise NotUniformError if this agent was started for a job of another size, or with another program."""
        by_hand, command = self.job.host_rank is not None, self._plan.launch_command
        size = len(self._plan.placement.whole) if by_hand else self.size
        if report.size != ((command.size if command is not None else 0) or size):
            raise NotUniformError(_describe_other_size(report, size, by_hand=by_hand))
        if report.command and report.command != self.job.program:
            raise NotUniformError(_describe_other_program(report, self.job.program))

    def check_installation(self, report: AgentReport) -> None:
        """Raise UnavailableError if this agent cannot start workers of the job."""
        if report.jaxrun_version != VERSION:
            raise UnavailableError(
                f"{report.host} has jaxrun {report.jaxrun_version}, but the launcher has jaxrun {VERSION}\n"
                "install the same version on every host, or start it from a directory that all share"
            )
        if self._directory and report.directory != self._directory:
            raise UnavailableError(
                f"{self._directory} does not exist on {report.host}; the agent was started in {report.directory}\n"
                "start the job in a directory that all hosts share"
            )

    def refuse_sick_hosts(self) -> None:
        """Raise HostCheckError once all have reported, if some hosts have failed --host-check."""
        if not self.complete:
            return
        sick = {agent: report for agent, report in self.reports.items() if report.check_failure}
        if sick and not self.lacks_environment:
            reports = {rank: report for agent, report in sick.items() for rank in self.agents[agent]}
            failed = {rank: report.check_failure for rank, report in reports.items()}
            raise HostCheckError(failed, {rank: report.host for rank, report in reports.items()})

    def assign(self) -> Assignment:
        """Return what every agent starts, with lines for people that the plan does not have.

        Raises NotUniformError if the hosts differ in their devices, and the exceptions of assign_workers.
        """
        reports = self._reports_by_rank()
        made = assign_workers(self._plan, reports, self._settings)
        refuse(describe_different_devices(made.shapes, {rank: report.host for rank, report in reports.items()}))
        news = (note for note in made.notes if note not in self._plan.notes)
        return replace(made, notes=(*news, *self._notes()))

    def prepare(self, host: Sequence[AgentReport]) -> list[StartWorker]:
        """Return what each agent of a spare host prepares for: the first of the ranks that it may get.

        Raises the exceptions of assign_on_host.
        """
        reports = self._reports_by_rank()
        most = max(len(ranks) for ranks in group_by_host(sorted(reports.items())))
        each = max(1, most // len(host))  # as many share the host's cores
        members = list(enumerate(report for report in host for _ in range(each)))
        return assign_on_host(self._plan, members, reports, self._settings)[::each]

    def find_spare(self, rank: int) -> SpareHost | None:
        """Return a spare host that can take the place of this rank's host, which is lost, at once.

        None also with --stage, as in `may_return`, and if the rank cannot run there: the next attempt says why.
        """
        placed = self.roster.find_spare(rank)
        if placed is None or self.job.stage:
            return None
        taken = {agent: ranks for agent, ranks in placed.agents.items() if ranks and agent not in self.agents}
        found = {agent: self.roster.seats[agent].report for agent in taken}
        members = [(each, report) for agent, report in found.items() if report is not None for each in taken[agent]]
        try:
            starts = assign_on_host(self._plan, members, self._reports_by_rank(), self._settings)
        except NotUniformError:
            return None
        by_rank = {start.worker.rank: start for start in starts}
        of_agents = {agent: tuple(by_rank[each] for each in ranks) for agent, ranks in taken.items()}
        calls = {agent: NextAttempt(self._plan.attempt, ranks) for agent, ranks in taken.items()}
        return SpareHost(members[0][1].host, placed, calls, of_agents)

    def start_on(self, agent: AgentId) -> list[StartWorker]:
        """Return what an agent starts that has come while the ranks of other agents run.

        Raises the exceptions of assign_on_host.
        """
        members = [(rank, self.reports[agent]) for rank in self.agents[agent]]
        return assign_on_host(self._plan, members, self._reports_by_rank(), self._settings)

    def first_of_each_host(self) -> tuple[AgentId, ...]:
        """Return one agent of each host, which answers for its host."""
        hosts = group_by_host(sorted(self.reports.items()))
        return tuple(agent for (agent, _), *_ in hosts)

    def _reports_by_rank(self) -> dict[int, AgentReport]:
        return {rank: report for agent, report in self.reports.items() for rank in self.agents[agent]}

    def _notes(self) -> list[str]:
        notes, run_dir = list[str](), self._settings.run_dir
        reports = self._reports_by_rank()
        without_run_dir = [rank for rank, report in reports.items() if not report.can_write_run_dir]
        if run_dir and without_run_dir:
            where = format_ranks_on_hosts(without_run_dir, {rank: one.host for rank, one in reports.items()})
            notes.append(f"{where} cannot write to the run directory {run_dir}; their logs come by network")
        without_directory = [rank for rank, report in reports.items() if report.lacks_directory]
        if without_directory and self._plan.attempt == 1:
            where = format_ranks_on_hosts(without_directory, {rank: one.host for rank, one in reports.items()})
            notes.append(f"{where} started in a copy of {self._directory}, which is not there; write results elsewhere")
        # The doctor reports the fabric itself.
        if self._plan.attempt == 1 and len(self.first_of_each_host()) > 1 and not self.job.probe_hosts:
            fabrics = [(one.host, one.fabric) for _, one in sorted(self.reports.items()) if one.fabric is not None]
            found = list(check_fabric(fabrics))
            advice = "; jaxrun doctor says what to do" if len(found) > 1 else ""
            notes += [f"fabric: {'; '.join(one.text for one in found)}{advice}"] if found else []
        return notes


def _describe_other_size(report: AgentReport, size: int, *, by_hand: bool) -> str:
    if by_hand:
        return (
            f"{report.host} was started for {report.size} processes in all, host 0 for {size}\n"
            "-n, --hosts, --processes-per-host and -d must be alike on all hosts"
        )
    return (
        f"rank {report.agent} ({report.host}) was started as one of {report.size}, but the job has {size} "
        "processes\nstart as many processes as -n says"
    )


def _describe_other_program(report: AgentReport, program: Sequence[str]) -> str:
    rows = [("rank 0", shlex.join(program)), (format_ranks([report.agent]), shlex.join(report.command))]
    table = "\n".join(f"  {line}" for line in format_columns(rows, gap="   "))
    return f"{report.host} was started with another program than rank 0\n{table}\ntype the same on every host"


def _describe_duplicate(known: AgentReport, other: AgentReport, host_rank: int | None) -> str:
    if host_rank is not None:
        where = f"{known.host} and {other.host}" if known.host != other.host else f"twice on {known.host}"
        return (
            f"--host-rank {host_rank} was given {'on ' if known.host != other.host else ''}{where}\n"
            f"each host needs a number of its own, from 0 to one less than --hosts"
        )
    return (
        f"two agents say that they are rank {other.agent}: process {known.pid} on {known.host} and process {other.pid} "
        f"on {other.host}\nis one of them left over from an earlier job, or is this two jobs in one place?"
    )
