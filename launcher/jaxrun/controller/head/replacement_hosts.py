"""Decides on which other host the ranks of a lost one are started again while the others run (--keep-survivors).

--spares      a spare host takes the place of the lost one, once the loss of its last rank is known: the agents
              there get the ranks, and report that their host has passed --host-check
--wait-hosts  where people or a cluster start a lost host's command again, that host or another in its place is
              awaited, for as long as the job runs
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from jaxrun.controller.head.agent_registry import AgentRegistry
from jaxrun.controller.head.head_state import HeadState
from jaxrun.controller.seat import SeatState
from jaxrun.job_events.actions import Action, RecordReplacement, SendToAgents
from jaxrun.protocol.agent_id import AgentId
from jaxrun.protocol.agent_messages import AgentReport, StartWorker


class ReplacementHosts:
    def __init__(self, state: HeadState, registry: AgentRegistry) -> None:
        """`registry` knows the spare hosts."""
        self._state = state
        self._registry = registry
        self._roster = registry.roster
        self._starts: dict[AgentId, Sequence[StartWorker]] = {}  # on spare hosts, until their agents report

    # ---- where a rank can be started again

    def is_gone(self, rank: int) -> bool:
        """Whether the rank's host is lost, or is a pod that goes away."""
        seat = self._roster.of_rank(rank)  # of a rank that had ended before its host was lost
        is_lost = self._state.workers.is_agent_lost(rank) or seat.state is SeatState.LOST
        return is_lost or self.is_leaving(rank)

    def is_leaving(self, rank: int) -> bool:
        leaving = self._state.leaving
        return bool(leaving) and self._roster.of_rank(rank).agent in leaving

    def is_awaited(self, rank: int) -> bool:
        """Whether a rank is started again once its host, which is gone, is back, or another is in its place."""
        return self.is_gone(rank) and self._may_return(rank)

    def spare_for(self, rank: int) -> str:
        """Return the spare host for a rank whose own host is lost; empty if no spare host is ready."""
        if not self.is_gone(rank) or self._state.workers.uses_mpi:
            return ""
        spare = self._registry.find_spare(rank)
        return spare.host if spare is not None else ""

    def why_none(self, rank: int, *, leaves: bool = False) -> str:
        """Explain why a rank that fails has no host to start on; empty if another host, or its own, is available.

        leaves:  it does not fail yet, but its pod goes away
        """
        if leaves and not self._may_return(rank):
            return "its pod goes away"
        if not self.is_gone(rank) or self.is_awaited(rank) or self.spare_for(rank):
            return ""
        if self._roster.is_host_there(rank):
            return "its agent is lost"
        is_lost = f"{self._state.workers.hosts[rank]} is lost"
        return is_lost + (", and no spare host is ready" if self._registry.job.spares else "")

    def _may_return(self, rank: int) -> bool:
        return not self._state.workers.uses_mpi and self._registry.may_return(self._roster.of_rank(rank).agent)

    # ---- another host

    def expect(self, ranks: Iterable[int]) -> None:
        """Await the agents of these ranks, or others in their places."""
        for rank in ranks:
            self._roster.expect(self._roster.of_rank(rank).agent)

    def use_spare(self, ranks: Sequence[int]) -> list[Action]:
        """Let the spare host take the place of the lost one that these ranks had, and call its agents.

        Each of them starts its own of these ranks once it reports.
        """
        spare = self._registry.find_spare(ranks[0])
        assert spare is not None
        self._roster.seat_spare(spare.placement)
        for agent, starts in spare.starts.items():
            self._starts[agent] = [start for start in starts if start.worker.rank in ranks]
        calls = [SendToAgents((agent,), call) for agent, call in spare.calls.items()]
        return [*self._move(ranks, spare.host, {agent: call.ranks for agent, call in spare.calls.items()}), *calls]

    def take_starts(self, report: AgentReport, awaited: Collection[int]) -> list[StartWorker]:
        """Return what an agent starts that has reported: its ranks on a spare host, or those that are `awaited`.

        Raises NotUniformError if these cannot run on its host.
        """
        if awaited:
            return [start for start in self._registry.start_on(report.agent) if start.worker.rank in awaited]
        return list(self._starts.pop(report.agent, ()))

    def use_host(self, ranks: Collection[int], report: AgentReport) -> list[Action]:
        """Note that these ranks, which were awaited, are on the host of this agent now."""
        return self._move(ranks, report.host, {report.agent: self._roster.ranks_of(report.agent)}) if ranks else []

    def _move(self, ranks: Collection[int], host: str, agents: Mapping[AgentId, tuple[int, ...]]) -> list[Action]:
        hosts = self._state.workers.hosts
        lost = hosts[min(ranks)]
        hosts.update(dict.fromkeys(ranks, host))  # others there have ended well
        return [RecordReplacement(lost, host, agents)] if lost != host else []
