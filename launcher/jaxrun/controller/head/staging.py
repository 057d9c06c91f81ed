"""Before the workers start, has each host copy what --stage names: along a tree whose root is the launcher."""

from __future__ import annotations

from jaxrun.controller.head.agent_registry import AgentRegistry
from jaxrun.controller.head.assignment import reachable_address
from jaxrun.errors import UnavailableError
from jaxrun.protocol.addresses import Address
from jaxrun.protocol.stage_messages import CopyStaged, StagedCopied
from jaxrun.records.event_log.actions import Action, PrintLine, Send
from jaxrun.text import format_bytes, plural

FAN_OUT = 2  # hosts that take from one


class StagingRound:
    """The copying of one attempt; `awaited` are the ranks that have not answered, None before they are asked."""

    def __init__(self, registry: AgentRegistry) -> None:
        self._registry = registry
        self._copied: list[int] = []  # bytes, of each host that had not all
        self.awaited: set[int] | None = None

    @property
    def complete(self) -> bool:
        """Whether nothing is to be waited for any more."""
        return self._registry.stage is None or self.awaited == set()

    def begin(self) -> list[Action]:
        """The orders to one agent of each host."""
        leads = self._registry.first_ranks()
        self.awaited = set(leads)
        takers = [len(leads[FAN_OUT * number :][:FAN_OUT]) for number in range(1, len(leads) + 1)]
        return [Send((rank,), CopyStaged(self._giver(leads, rank), takers[at])) for at, rank in enumerate(leads)]

    def _giver(self, leads: tuple[int, ...], rank: int) -> str:
        """Where this one takes from: the launcher, or the agent of another host."""
        assert self._registry.stage is not None
        reports, above = self._registry.reports, leads.index(rank) // FAN_OUT
        if not above:
            return str(Address(reports[rank].head_address, self._registry.stage.port))
        giver = leads[above - 1]
        return str(Address(reachable_address(giver, reports), reports[giver].stage_port))

    def handle(self, event: StagedCopied) -> list[Action]:
        """Raises UnavailableError if a host cannot have a copy."""
        assert self.awaited is not None
        if event.error:
            host = self._registry.reports[event.rank].host
            raise UnavailableError(f"{host} has no copy of what is staged: {event.error}")
        self.awaited.discard(event.rank)
        self._copied += [event.nbytes] if event.nbytes else []
        if self.awaited or not self._copied:
            return []
        had = len(self._registry.first_ranks()) - len(self._copied)
        others = f"; {plural(had, 'host')} had it already" if had else ""
        return [PrintLine(f"staged {format_bytes(max(self._copied))} on {plural(len(self._copied), 'host')}{others}")]
