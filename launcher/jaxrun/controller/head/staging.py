"""Before the workers start, has each host copy what --stage names: along a tree whose root is the launcher."""

from __future__ import annotations

from jaxrun.controller.head.agent_registry import AgentRegistry
from jaxrun.errors import UnavailableError
from jaxrun.protocol.addresses import Address
from jaxrun.protocol.stage_messages import CopyStaged, StagedCopied
from jaxrun.records.event_log.actions import Action, PrintLine, Send
from jaxrun.text import format_bytes, plural

FAN_OUT = 2  # hosts that take from one
_NAMED = 4  # hosts at most, in a line


class StagingRound:
    """The copying of one attempt; `registry` is that of the agents."""

    def __init__(self, registry: AgentRegistry) -> None:
        self._registry = registry
        self._copied: dict[int, StagedCopied] = {}
        self._leads: tuple[int, ...] = ()

    @property
    def is_running(self) -> bool:
        return bool(set(self._leads) - self._copied.keys())

    @property
    def complete(self) -> bool:
        """Whether nothing is to be waited for any more."""
        return self._registry.stage is None or (bool(self._leads) and not self.is_running)

    def begin(self) -> list[Action]:
        """The orders, once all agents have reported; nothing if they were given."""
        if self._leads:
            return []
        self._leads = self._registry.first_ranks()
        return [Send((rank,), CopyStaged(givers)) for rank, givers in self._tree().items()]

    def handle(self, event: StagedCopied) -> list[Action]:
        """Raises UnavailableError if a host cannot have a copy."""
        if event.error:
            host = self._registry.reports[event.rank].host
            raise UnavailableError(f"{host} has no copy of what is staged: {event.error}")
        self._copied[event.rank] = event
        took = [one.nbytes for one in self._copied.values() if one.nbytes]
        if self.is_running or not took:
            return []
        had = len(self._leads) - len(took)
        others = f"; {plural(had, 'host')} had it already" if had else ""
        return [PrintLine(f"staged {format_bytes(max(took))} on {plural(len(took), 'host')}{others}")]

    def describe_progress(self, seconds: float) -> str:
        """How far it has come after so many seconds, in one line."""
        assert self._registry.stage is not None
        size = format_bytes(sum(content.nbytes for content in self._registry.stage.contents))
        waiting = [self._registry.reports[rank].host for rank in self._leads if rank not in self._copied]
        named = ", ".join(waiting[:_NAMED]) + (f" and {len(waiting) - _NAMED} more" if len(waiting) > _NAMED else "")
        done = f"{len(self._copied)} done after {seconds:.0f} s, waiting for {named}"
        return f"staging {size} to {plural(len(self._leads), 'host')}: {done}"

    def _tree(self) -> dict[int, tuple[str, ...]]:
        """From whom each takes, by rank: its parent in the tree, and the launcher where that one gives nothing.

        Those that nobody can take from, as they are on the launcher's host, have no place in the tree.
        """
        reports = {rank: self._registry.reports[rank] for rank in self._leads}
        inner = [rank for rank, report in reports.items() if report.stage_port]
        tree = {}
        for rank, report in reports.items():
            root = str(Address(report.head_address, self._registry.stage_port))
            above = inner.index(rank) // FAN_OUT if rank in inner else 0
            parents = [reports[inner[above - 1]]] if above else []
            tree[rank] = (*(str(Address(parent.address, parent.stage_port)) for parent in parents), root)
        return tree
