"""Lets a pod go away while the ranks in other pods go on (--keep-survivors), after Kubernetes has sent it SIGTERM.

    SIGTERM ──▶ SIGTERM to its ranks that handle it ──they have ended, or the grace is over──▶ its agent ends

The agent kills the other ranks, and its end is the loss of a host. The pod of the head cannot go away alone. JAX does
not handle this SIGTERM in place of the program: its notice of preemption would reach the ranks of all pods.
"""

from __future__ import annotations

import signal
from functools import partial

from jaxrun.analysis.verdict.phrasing import describe_others
from jaxrun.controller.head.head_state import REPEATED_SIGNAL_S, HeadState, JobPhase
from jaxrun.controller.head.survivors import Survivors
from jaxrun.controller.head.timers import Timer
from jaxrun.controller.roster import Roster
from jaxrun.errors import EXIT_PREEMPTED
from jaxrun.job_events.actions import Action, PrintLine, SendToAgents, SignalRanks
from jaxrun.protocol.agent_id import AgentId
from jaxrun.protocol.agent_messages import Shutdown
from jaxrun.text import format_ranks

LOST_REASON = "its pod went away"


class LeavingPods:
    """The pods that go away without which the others go on; `state.leaving` has their agents."""

    def __init__(self, state: HeadState, survivors: Survivors, roster: Roster, *, in_pods: bool) -> None:
        """`in_pods`: whether the job runs in pods, with --keep-survivors."""
        self._state = state
        self._survivors = survivors
        self._roster = roster
        self._in_pods = in_pods
        self._signalled_at: dict[AgentId, float] = {}

    def may_leave(self, agent: AgentId) -> bool:
        """Whether the others go on if the pod of this agent goes away now, or does so already."""
        is_running = self._state.phase is JobPhase.RUNNING and not self._state.stop_requested
        if not self._in_pods or not is_running or agent == 0:
            return False
        own = self._roster.ranks_of(agent)
        needed = self._state.workers.working_of(own) if agent not in self._state.leaving else ()
        return bool(own) and not any(self._survivors.why_all_end(rank, leaves=True) for rank in needed)

    def let_leave(self, agent: AgentId, now: float) -> list[Action]:
        """Ask the ranks of a pod to end, and end its agent; at once if none handles SIGTERM, or at the second one."""
        workers, own = self._state.workers, self._roster.ranks_of(agent)
        if agent in self._state.leaving:
            return [] if now - self._signalled_at[agent] < REPEATED_SIGNAL_S else self._end_agent(agent, now)
        self._state.leaving.add(agent)
        self._signalled_at[agent] = now
        others = [rank for rank in workers.working if rank not in own]
        text = f"the pod of {workers.hosts[own[0]]} goes away; {describe_others(others)}"
        handling = tuple(rank for rank in workers.handling_sigterm if rank in own)
        if not handling:
            return [PrintLine(text), *self._end_agent(agent, now)]
        grace = self._state.limits.signal_grace
        self._state.timers.set(Timer.DRAIN, now + grace, partial(self._end_agent, agent), of=agent)
        asked = f"asked {format_ranks(handling)} to end (SIGTERM); SIGKILL follows in {grace:g} s"
        return [PrintLine(f"{text}; {asked}"), SignalRanks(handling, signal.SIGTERM)]

    def _end_agent(self, agent: AgentId, now: float) -> list[Action]:
        self._state.timers.cancel_one(Timer.DRAIN, agent)
        return [SendToAgents((agent,), Shutdown(EXIT_PREEMPTED, leaves=True))]

    def on_ended(self, rank: int, now: float) -> list[Action]:
        """End the agent of a pod that goes away once all of its ranks have ended."""
        for agent in self._state.leaving:
            own = self._roster.ranks_of(agent)
            is_asked = self._state.timers.at(Timer.DRAIN, of=agent) is not None
            if rank in own and is_asked and all(map(self._state.workers.has_ended, own)):
                return self._end_agent(agent, now)
        return []
