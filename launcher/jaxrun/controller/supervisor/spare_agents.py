"""The agents that wait: on spare hosts, or, started by hand, on a host that a smaller job may take back.

Each spare agent of an mpirun gets its own mpirun: started by the job's mpirun it would count as an MPI rank, and
MPI_Init in the real ranks would wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jaxrun.controller.head.agent_registry import AgentRegistry
from jaxrun.controller.supervisor.attempt_context import AttemptContext
from jaxrun.controller.supervisor.connections import AgentConnections
from jaxrun.controller.supervisor.launch_process import LaunchProcess
from jaxrun.errors import JaxrunError, NotUniformError, UnavailableError
from jaxrun.protocol.agent_id import AgentId
from jaxrun.protocol.agent_messages import AgentReport, StartWorkers
from jaxrun.records.event_log.events import SpareLost, SpareReported


class SpareAgents:
    """The agents of one launch command that wait.

    They report as the others do, and keep a process that has imported jax. They have no rank, and the head knows
    nothing of them: they hold up no start, and the loss of a spare agent does not count as a failure.

    hosts:       the host of each agent, as the launch command was told to place it; empty where people start them
    registry:    where the agents with ranks report
    lost_hosts:  spare hosts whose agent has gone, and why
    reported:    what the agents on each host have reported, the lost ones too
    launches:    the commands that have started the agents that have a command of their own
    """

    def __init__(self, hosts: Sequence[str], registry: AgentRegistry) -> None:
        self.hosts = hosts
        self.registry = registry
        self._reports: dict[AgentId, AgentReport] = {}
        self._prepared: set[AgentId] = set()
        self.lost_hosts: dict[str, str] = {}
        self.reported: dict[str, AgentReport] = {}
        self.launches: dict[AgentId, LaunchProcess] = {}

    def attach(self, connections: AgentConnections, context: AttemptContext) -> None:
        """They are served by these connections from now on."""
        self._connections = connections
        self._record = context.dispatcher.record
        self._print_line = context.output.print_line

    @property
    def ready(self) -> set[AgentId]:
        """The agents that have reported, and can take a rank."""
        return set(self._reports)

    def start(self, agents: Sequence[AgentId], run: Callable[[AgentId, str], LaunchProcess]) -> None:
        """Start the agents that have a command of their own; `run` is called with each agent and its host."""
        for agent in agents:
            try:
                self.launches[agent] = run(agent, self.hosts[agent])
            except JaxrunError as error:
                self.on_lost(agent, str(error))

    def on_child_exit(self) -> None:
        """Give up those whose command has ended before they have reported."""
        for agent, launch in self.launches.items():
            is_known = agent in self._reports or self.hosts[agent] in self.lost_hosts
            if launch.status is None and launch.reap() and not is_known:
                self.on_lost(agent, launch.describe_end() + launch.log_note)

    def host_of(self, agent: AgentId) -> str:
        if agent < len(self.hosts):
            return self.hosts[agent]
        return self._reports[agent].host if agent in self._reports else "?"

    def on_report(self, report: AgentReport) -> None:
        """Count on an agent that can be used."""
        self._record(SpareReported(report.agent, report.host, report.pid))
        self.reported[self.hosts[report.agent] if self.hosts else report.host] = report
        reason = report.check_failure and f"failed --host-check: {report.check_failure}"
        try:
            self.registry.check_installation(report)
            if not self.hosts:
                self.registry.check_command(report)
        except (UnavailableError, NotUniformError) as error:
            reason = reason or str(error)
        if reason:
            self._print_line(f"jaxrun: spare host {report.host} cannot be used: {reason}")
        else:
            self._reports[report.agent] = report
        self.prepare()

    def on_lost(self, agent: AgentId, reason: str) -> None:
        host = self.host_of(agent)
        self._reports.pop(agent, None)
        self._record(SpareLost(agent, host, reason))
        if host not in self.lost_hosts:
            self.lost_hosts[host] = reason
            self._print_line(f"jaxrun: spare host {host} is lost: {reason}")

    def prepare(self) -> None:
        """Tell those that wait what to prepare for, once, and as soon as that is known."""
        waiting = self._connections.waiting
        if not self.registry.complete or not self.hosts:
            return
        for host in {self.host_of(agent) for agent in self.ready.intersection(waiting) - self._prepared}:
            agents = sorted(agent for agent in waiting if self.host_of(agent) == host)
            if not all(agent in self._reports for agent in agents):
                continue
            self._prepared.update(agents)
            try:
                starts = self.registry.prepare([self._reports[agent] for agent in agents])
            except NotUniformError:  # the attempt in which it takes a rank says why
                continue
            for agent, start in zip(agents, starts, strict=True):
                self._connections.send_to_agents((agent,), StartWorkers((start,), waits=True))
