"""Makes each host copy the directories of --stage before the workers start, along a tree whose root is the launcher."""

from __future__ import annotations

from collections.abc import Collection

from jaxrun.controller.head.agent_registry import AgentRegistry
from jaxrun.controller.head.round import Round
from jaxrun.errors import UnavailableError
from jaxrun.job_events.actions import Action, PrintLine, SendToAgents
from jaxrun.protocol.addresses import Address
from jaxrun.protocol.agent_id import AgentId
from jaxrun.protocol.agent_messages import AgentReport
from jaxrun.protocol.staging_messages import CopyStaged, StagedCopied
from jaxrun.spec.job.worker_assignment import reachable_address
from jaxrun.text import format_bytes, plural

FAN_OUT = 2  # hosts that copy from one host


class StagingRound:
    """The copying for one attempt."""

    def __init__(self, registry: AgentRegistry) -> None:
        self._registry = registry
        self._copied: list[int] = []  # bytes copied to each host that did not have everything
        self._asked: set[AgentId] = set()  # that have answered
        self._round: Round[AgentId, StagedCopied] | None = None  # None before the first

    @property
    def complete(self) -> bool:
        """Whether there is nothing to wait for any more."""
        return not self._registry.job.stage or (self._round is not None and self._round.is_over)

    @property
    def awaited(self) -> Collection[AgentId]:
        """The agents that have been asked, and have not answered."""
        return self._round.missing if self._round is not None else ()

    def begin(self) -> list[SendToAgents]:
        """Return the orders to one agent of each host."""
        takers, reports, givers = self._registry.first_of_each_host(), self._registry.reports, [""] * FAN_OUT
        self._round = Round(takers)
        for agent in takers:
            address = reachable_address(reports[agent], reports.values())
            givers += [str(Address(address, reports[agent].stage_port))] * FAN_OUT
        givers = givers[: len(takers)]
        return [
            SendToAgents((agent,), CopyStaged(givers[at], len(givers[FAN_OUT * (at + 1) :][:FAN_OUT])))
            for at, agent in enumerate(takers)
        ]

    def handle(self, event: StagedCopied) -> list[Action]:
        """Handle an answer. Raises UnavailableError if a host cannot have a copy."""
        assert self._round is not None
        if event.error:
            host = self._registry.reports[event.agent].host
            raise UnavailableError(f"{host} has no copy of what is staged: {event.error}")
        self._asked.add(event.agent)
        self._copied += [event.nbytes] if event.nbytes else []
        if not self._round.add(event.agent, event):
            return []
        if others := [agent for agent, one in self._registry.reports.items() if self._still_lacks(agent, one)]:
            self._round = Round(others)
            return [SendToAgents((agent,), CopyStaged("", 0)) for agent in others]
        if not self._copied:
            return []
        had = len(self._registry.first_of_each_host()) - len(self._copied)
        rest = f"; {plural(had, 'host')} had it already" if had else ""
        return [PrintLine(f"staged {format_bytes(max(self._copied))} on {plural(len(self._copied), 'host')}{rest}")]

    def _still_lacks(self, agent: AgentId, report: AgentReport) -> bool:
        """Whether this agent has not looked for the environment, which another one has brought to its host."""
        return report.lacks_environment and agent not in self._asked
