"""The agents that wait: on spare hosts, or, started by hand, on a host that a smaller job may take back.

Those of an mpirun would count as ranks, for which MPI_Init of the others would wait: each has an mpirun of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from jaxrun.controller.head.agent_registry import AgentRegistry
from jaxrun.controller.supervisor.connections import AgentConnections
from jaxrun.controller.supervisor.launch_process import LaunchProcess
from jaxrun.errors import JaxrunError, NotUniformError, UnavailableError
from jaxrun.protocol.agent_messages import AgentReport
from jaxrun.records.event_log.events import SpareLost, SpareReported

if TYPE_CHECKING:
    from jaxrun.controller.supervisor.attempts import AttemptContext


class SpareAgents:
    """Those of one launch command, by their numbers.

    They report as the others do, and keep a process that has imported jax. They have no rank, and the head knows
    nothing of them: they hold up no start, and the loss of one is no failure.

    hosts:       those of all agents, as the launch command was told to place them; empty where people start them
    registry:    where the ranks of this attempt report
    lost_hosts:  on which one has gone, and why
    reported:    what those on each host have reported, the lost ones too
    launches:    the commands that have started those that have one of their own, by the agent's number
    """

    def __init__(self, hosts: Sequence[str], registry: AgentRegistry) -> None:
        self.hosts = hosts
        self.registry = registry
        self._reports: dict[int, AgentReport] = {}
        self._prepared: set[int] = set()
        self.lost_hosts: dict[str, str] = {}
        self.reported: dict[str, AgentReport] = {}
        self.launches: dict[int, LaunchProcess] = {}

    def attach(self, connections: AgentConnections, context: AttemptContext) -> None:
        """They are served by these connections from now on."""
        self._connections = connections
        self._record = context.dispatcher.record
        self._print_line = context.output.print_line

    @property
    def ready(self) -> set[int]:
        """Those that have reported, and can take a rank."""
        return set(self._reports)

    def start(self, numbers: Sequence[int], run: Callable[[int, str], LaunchProcess]) -> None:
        """Start those that have a command of their own; `run` is called with the number of each, and its host."""
        for number in numbers:
            try:
                self.launches[number] = run(number, self.hosts[number])
            except JaxrunError as error:
                self.on_lost(number, str(error))

    def on_child_exit(self) -> None:
        """Give up those whose command has ended before they have reported."""
        for number, launch in self.launches.items():
            is_known = number in self._reports or self.hosts[number] in self.lost_hosts
            if launch.status is None and launch.reap() and not is_known:
                self.on_lost(number, launch.describe_end() + launch.log_note)

    def host_of(self, number: int) -> str:
        if number < len(self.hosts):
            return self.hosts[number]
        return self._reports[number].host if number in self._reports else "?"

    def on_report(self, report: AgentReport) -> None:
        """Count on an agent that can be used."""
        self._record(SpareReported(report.rank, report.host, report.pid))
        self.reported[self.hosts[report.rank] if self.hosts else report.host] = report
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
            self._reports[report.rank] = report
        self.prepare()

    def on_lost(self, number: int, reason: str) -> None:
        host = self.host_of(number)
        self._reports.pop(number, None)
        self._record(SpareLost(number, host, reason))
        if host not in self.lost_hosts:
            self.lost_hosts[host] = reason
            self._print_line(f"jaxrun: spare host {host} is lost: {reason}")

    def prepare(self) -> None:
        """Tell those that wait what to prepare for, once, and as soon as that is known."""
        waiting = self._connections.waiting
        if not self.registry.complete or not self.hosts:
            return
        for host in {self.host_of(number) for number in self.ready.intersection(waiting) - self._prepared}:
            numbers = sorted(number for number in waiting if self.host_of(number) == host)
            if not all(number in self._reports for number in numbers):
                continue
            self._prepared.update(numbers)
            try:
                starts = self.registry.prepare([self._reports[number] for number in numbers])
            except NotUniformError:  # the attempt in which it takes a rank says why
                continue
            for number, start in zip(numbers, starts, strict=True):
                self._connections.send_to_agent(number, start)
