"""Before a job that asks for it, collects the facts of all hosts, and has an agent of each connect to the others."""

from __future__ import annotations

from collections.abc import Collection

from jaxrun.controller.head.agent_registry import AgentRegistry, reachable_address
from jaxrun.errors import UnavailableError
from jaxrun.protocol.addresses import Address
from jaxrun.protocol.probe_messages import HostFacts, PeerResults, ProbePeers
from jaxrun.records.event_log.actions import Send


class HostProbes:
    """What the agents of `registry` have told of their hosts."""

    def __init__(self, registry: AgentRegistry) -> None:
        self._registry = registry
        self._facts: dict[int, HostFacts] = {}
        self._results: dict[int, PeerResults] = {}

    @property
    def complete(self) -> bool:
        """Whether nothing is to be waited for any more."""
        return not self._registry.spec.job.probe_hosts or (self._knows_all and not self._awaited)

    @property
    def ready(self) -> Collection[int]:
        """The ranks whose agents are not waited for."""
        return self._facts.keys() - self._awaited

    def handle(self, event: HostFacts | PeerResults) -> list[Send]:
        """Returns the order to connect, once the last agent has told its facts.

        Raises UnavailableError once all have tried, if some hosts cannot connect: a job of these would hang.
        """
        if isinstance(event, PeerResults):
            self._results[event.rank] = event
            if not self._awaited and any(results.errors for results in self._results.values()):
                raise UnavailableError("the hosts cannot all connect to each other, so that no job was started")
            return []
        self._facts[event.rank] = event
        return [Send(self._leads, self._order())] if self._knows_all and self._leads else []

    @property
    def _knows_all(self) -> bool:
        return self._registry.complete and len(self._facts) == self._registry.spec.size

    @property
    def _leads(self) -> tuple[int, ...]:
        """The first rank of each host, where there are several."""
        leads = self._registry.first_ranks() if self._registry.complete else ()
        return leads if len(leads) > 1 else ()

    @property
    def _awaited(self) -> set[int]:
        return set(self._leads) - self._results.keys()

    def _order(self) -> ProbePeers:
        facts, reports = {rank: self._facts[rank] for rank in self._leads}, self._registry.reports
        return ProbePeers(
            addresses={rank: str(Address(reachable_address(rank, reports), one.port)) for rank, one in facts.items()},
            hosts={rank: one.host for rank, one in facts.items()},
        )
