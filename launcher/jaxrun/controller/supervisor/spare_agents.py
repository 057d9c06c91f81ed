"""The agents that wait on spare hosts: they report as the others do, and keep a process that has imported jax.

They have no rank, and the head knows nothing of them: they hold up no start, and the loss of one is no failure.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from jaxrun.controller.head.agent_registry import AgentRegistry
from jaxrun.errors import NotUniformError, UnavailableError
from jaxrun.protocol.agent_messages import AgentReport, StartWorker


class SpareAgents:
    """Those of one launch command, by their numbers.

    hosts:       those of all agents, as the launch command was told to place them
    lost_hosts:  on which one has gone
    """

    def __init__(self, hosts: Sequence[str], registry: AgentRegistry) -> None:
        """`registry` is that of the ranks."""
        self.hosts = hosts
        self._registry = registry
        self._reports: dict[int, AgentReport] = {}
        self._prepared: set[int] = set()
        self.lost_hosts: set[str] = set()

    @property
    def ready(self) -> set[int]:
        """Those that have reported, and can take a rank."""
        return set(self._reports)

    def begin_attempt(self, registry: AgentRegistry) -> None:
        """The ranks report to this registry from now on."""
        self._registry = registry

    def add(self, report: AgentReport) -> str:
        """Count on an agent; returns why it cannot be used, if so."""
        try:
            self._registry.check_installation(report)
        except UnavailableError as error:
            return str(error)
        self._reports[report.rank] = report
        return ""

    def lose(self, number: int) -> bool:
        """The agent has gone; returns whether it is the first of its host."""
        self._reports.pop(number, None)
        is_first = self.host_of(number) not in self.lost_hosts
        self.lost_hosts.add(self.host_of(number))
        return is_first

    def host_of(self, number: int) -> str:
        return self.hosts[number] if number < len(self.hosts) else "?"

    def preparations(self, waiting: Collection[int]) -> list[tuple[int, StartWorker]]:
        """What those that wait prepare for, where that is known by now, and they were not told before."""
        if not self._registry.complete:
            return []
        told: list[tuple[int, StartWorker]] = []
        for host in {self.host_of(number) for number in self.ready.intersection(waiting) - self._prepared}:
            numbers = sorted(number for number in waiting if self.host_of(number) == host)
            if not all(number in self._reports for number in numbers):
                continue
            self._prepared.update(numbers)
            try:
                starts = self._registry.prepare([self._reports[number] for number in numbers])
            except NotUniformError:  # the attempt in which it takes a rank says why
                continue
            told += zip(numbers, starts, strict=True)
        return told
