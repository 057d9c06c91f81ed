"""Waits for lost hosts while an attempt starts (--wait-hosts): which are awaited, for how long still, and what is said.

    AgentLost, or the attempt begins without the agent ──▶ awaited ──AgentReport──▶ back
                                                              │
                                                     --wait-hosts is over ──▶ the attempt ends, and names the host

An engine such as mpirun starts no agent by itself on a host that is back, so it is asked to look for the host.
A person or a cluster starts the command of a host again, and its agent connects.
"""

from __future__ import annotations

from collections.abc import Mapping

from jaxrun.analysis.diagnosis.job_end import HostsNotBack
from jaxrun.controller.head.agent_registry import AgentRegistry
from jaxrun.controller.head.head_state import HeadState, JobPhase
from jaxrun.controller.head.job_shutdown import JobShutdown
from jaxrun.controller.head.timers import Timer
from jaxrun.controller.seat import Wait
from jaxrun.job_events.actions import Action, LookForHosts, PrintLine
from jaxrun.job_events.events import AgentLost, HostsFound
from jaxrun.protocol.agent_id import AgentId
from jaxrun.protocol.agent_messages import AgentReport
from jaxrun.text import format_ranks, format_seconds

SAID_AFTER_S = 0.5  # an agent that comes back sooner is not worth a line
LOOK_INTERVAL_S = 2.0  # from the end of one look for hosts to the next one
_NO_WAIT_WITH_MPI = (
    "the program imports mpi4py.MPI, so a lost host is not waited for (--wait-hosts): MPI needs all ranks started anew"
)
_START_S = 10.0  # for the agent that is started on a host that was found


class HostWait:
    """The hosts that one attempt waits for."""

    def __init__(
        self,
        state: HeadState,
        shutdown: JobShutdown,
        registry: AgentRegistry,
        now: float,
    ) -> None:
        """Wait for the agents that the roster of the registry misses when the attempt begins."""
        self._state = state
        self._shutdown = shutdown
        self._registry = registry
        for agent, name in registry.roster.missing().items():
            self._add(agent, name, now)

    @property
    def is_waiting(self) -> bool:
        return bool(self._awaited)

    @property
    def _awaited(self) -> Mapping[AgentId, Wait]:
        return self._registry.roster.awaited

    def describe(self, now: float) -> str:
        """`waiting for h2 (rank 1), 9 min 50 s more`; empty if no host is awaited."""
        if not self._awaited:
            return ""
        return f"waiting for {self._names(self._awaited)}, {format_seconds(self._until - now)} more (--wait-hosts)"

    def handle_lost(self, event: AgentLost, now: float) -> bool:
        """Wait for an agent that was lost before the workers start; returns whether the attempt waits for it."""
        registry = self._registry
        if not registry.job.host_wait or self._state.phase is not JobPhase.STARTING:
            return False
        if registry.complete or (registry.is_started_by_hand and event.agent == 0):
            return False
        self._add(event.agent, self._state.workers.hosts[registry.agents[event.agent][0]], now)
        return True

    def handle_report(self, report: AgentReport, now: float) -> list[Action]:
        """Handle an agent's report: the agent may have been awaited, on the same host or another one."""
        wait = self._registry.roster.stop_waiting(report.agent)
        if wait is None:
            return []
        if not self._awaited:
            self._state.timers.cancel(Timer.HOST_WAIT, Timer.HOST_LOOK)
        ranks = self._format_ranks([report.agent])
        after = f"after {format_seconds(now - wait.since)}"
        if report.host == wait.host and now < wait.since + SAID_AFTER_S:
            return []
        if report.host == wait.host:
            return [PrintLine(f"{wait.host} ({ranks}) is back {after}")]
        return [PrintLine(f"{report.host} takes the place of {wait.host} ({ranks}) {after}")]

    def handle_found(self, event: HostsFound, now: float) -> list[Action]:
        """A look for hosts is over. The agents on those that were found are being started."""
        if self._awaited:
            wait = _START_S if event.hosts else LOOK_INTERVAL_S
            self._state.timers.set(Timer.HOST_LOOK, now + wait, self._look)
        return []

    def handle_mpi(self) -> list[Action]:
        """The program uses the MPI that started its ranks, which was not known before: no lost host is waited for."""
        registry = self._registry
        if not (registry.job.host_wait and registry.is_first_attempt):
            return []
        return [] if registry.is_started_by_hand else [PrintLine(_NO_WAIT_WITH_MPI)]

    # ---- time

    @property
    def _until(self) -> float:
        return min(wait.until for wait in self._awaited.values())

    def _add(self, agent: AgentId, name: str, now: float) -> None:
        self._registry.roster.wait_for(agent, Wait(name, now, now + self._registry.job.host_wait))
        self._state.timers.set(Timer.HOST_WAIT, now + SAID_AFTER_S, self._on_timer)
        if not self._registry.is_started_by_hand:
            self._state.timers.set(Timer.HOST_LOOK, now, self._look)

    def _on_timer(self, now: float) -> list[Action]:
        if now >= self._until:
            return self._give_up(now)
        self._state.timers.set(Timer.HOST_WAIT, self._until, self._on_timer)
        return [PrintLine(self.describe(now))]

    def _look(self, now: float) -> list[Action]:
        return [LookForHosts(tuple(self._awaited))]

    def _give_up(self, now: float) -> list[Action]:
        over = {agent: wait for agent, wait in self._awaited.items() if wait.until <= now}
        ranks = tuple(rank for agent in over for rank in self._registry.agents[agent])
        was = "was" if len({wait.host for wait in over.values()}) == 1 else "were"
        waited = format_seconds(self._registry.job.host_wait)
        text = f"{self._names(over)} {was} not back within {waited} (--wait-hosts)"
        return self._shutdown.abort(HostsNotBack(text, ranks=ranks), now)

    # ---- words

    def _names(self, waits: Mapping[AgentId, Wait]) -> str:
        by_name: dict[str, list[AgentId]] = {}
        for agent, wait in waits.items():
            by_name.setdefault(wait.host, []).append(agent)
        return ", ".join(f"{name} ({self._format_ranks(agents)})" for name, agents in by_name.items())

    def _format_ranks(self, agents: list[AgentId]) -> str:
        return format_ranks([rank for agent in agents for rank in self._registry.agents[agent]])
