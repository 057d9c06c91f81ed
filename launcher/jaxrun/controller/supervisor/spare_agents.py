"""The agents that wait: on spare hosts or, if started by hand, on a host that a smaller job may take back.

They report like the others, and keep a process that has imported jax. They have no rank, and the head does not know
them: they delay no start, and the loss of a spare agent does not count as a failure.

Each spare agent of an mpirun gets its own mpirun: started by the job's mpirun it would count as an MPI rank, and
MPI_Init in the real ranks would wait for it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from jaxrun.controller.head.agent_registry import AgentRegistry
from jaxrun.controller.supervisor.launch_process import LaunchProcess
from jaxrun.errors import NotUniformError, UnavailableError
from jaxrun.protocol.agent_id import AgentId
from jaxrun.protocol.agent_messages import AgentReport, StartWorker


class SpareAgents:
    """The waiting agents of one launch command.

    hosts:       the host of each agent, as the launch command was told to place it; empty if people start them
    launches:    the commands of agents that have a command of their own
    restarted:   the commands that have started agents with ranks again, on hosts that came back
    lost_hosts:  spare hosts whose agent has gone, with reasons
    reported:    the reports of the agents on each host, including lost ones
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        self.hosts = hosts
        self.launches: dict[AgentId, LaunchProcess] = {}
        self.restarted: list[LaunchProcess] = []
        self.lost_hosts: dict[str, str] = {}
        self.reported: dict[str, AgentReport] = {}
        self._reports: dict[AgentId, AgentReport] = {}
        self._prepared: set[AgentId] = set()

    @property
    def ready(self) -> set[AgentId]:
        """The agents that have reported, and can take a rank."""
        return set(self._reports)

    def host_of(self, agent: AgentId) -> str:
        if agent < len(self.hosts):
            return self.hosts[agent]
        return self._reports[agent].host if agent in self._reports else "?"

    def reap(self) -> dict[AgentId, str]:
        """Agents of hosts that are lost since the last call, as their command ended before they reported, and how."""
        lost: dict[AgentId, str] = {}
        hosts = {*self.lost_hosts}
        for agent, launch in self.launches.items():
            is_known = agent in self._reports or self.hosts[agent] in hosts
            if launch.status is None and launch.reap() and not is_known:
                lost[agent] = launch.describe_end() + launch.log_note
                hosts.add(self.hosts[agent])
        return lost

    def add_report(self, report: AgentReport, registry: AgentRegistry) -> str:
        """Accept an agent that the job of the `registry` can use; returns why it cannot, else an empty text."""
        self.reported[self.hosts[report.agent] if self.hosts else report.host] = report
        reason = report.check_failure and f"failed --host-check: {report.check_failure}"
        try:
            registry.check_installation(report)
            if not self.hosts:
                registry.check_command(report)
        except (UnavailableError, NotUniformError) as error:
            reason = reason or str(error)
        if not reason:
            self._reports[report.agent] = report
        return reason

    def lose(self, agent: AgentId, reason: str) -> bool:
        """Remove an agent; returns whether its host is lost by that."""
        host = self.host_of(agent)
        self._reports.pop(agent, None)
        is_news = host not in self.lost_hosts
        self.lost_hosts.setdefault(host, reason)
        return is_news

    def take_starts(self, waiting: Collection[AgentId], registry: AgentRegistry) -> list[tuple[AgentId, StartWorker]]:
        """Return what waiting agents have to prepare for, each once, as soon as it is known."""
        starts: list[tuple[AgentId, StartWorker]] = []
        if not registry.complete or not self.hosts:
            return starts
        for host in {self.host_of(agent) for agent in self.ready.intersection(waiting) - self._prepared}:
            agents = sorted(agent for agent in waiting if self.host_of(agent) == host)
            if not all(agent in self._reports for agent in agents):
                continue
            self._prepared.update(agents)
            try:
                prepared = registry.prepare([self._reports[agent] for agent in agents])
            except NotUniformError:  # the attempt in which it gets a rank reports why
                continue
            starts += zip(agents, prepared, strict=True)
        return starts
