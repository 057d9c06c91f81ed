"""Decides why agents end: whether a host, an agent, or the launch command (mpirun, srun) went first.

mpirun and srun end a whole job when they lose one host or process, and then every agent is signalled or lost at once.
So these events are held for a moment, or, once all hosts were probed, for the time in which a live host answers;
then the cause is passed on first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from jaxrun.controller.supervisor.connections import AgentConnections
from jaxrun.controller.supervisor.launch_process import LaunchProcess
from jaxrun.protocol.agent_id import AgentId
from jaxrun.protocol.agent_messages import AgentSignalled, StartFailed
from jaxrun.records.event_log.events import AgentLost, Event

EXIT_GRACE_S = 0.05  # wait for the launch command's exit status before the agent that vanished is blamed
LONG_EXIT_GRACE_S = 0.5  # the same where it may be ending those that it has started, before itself
_PROBE_TIMEOUT_S = 1.0  # in which a live host answers
_ATTACHED_PROBE_TIMEOUT_S = 0.15  # an mpirun or srun leaves the processes that it started, as this one, less time


class LossWatch:
    """Tracks which agents of one attempt, and whether their launch command, have disappeared, and which went first."""

    def __init__(
        self, launch: LaunchProcess, connections: AgentConnections, clock: Callable[[], float], *, attached: bool
    ) -> None:
        """`attached`: another program started this process beside the agents.

        deadline:          when held events are passed on at the latest; None while no event is held
        reported:          the agents with ranks that have reported
        failure_reported:  the ranks whose worker has reported why it fails
        """
        self._clock = clock
        self._launch = launch
        self._needs_launch = launch.status is None  # else agents have outlived it already
        self._connections = connections
        self._probe_timeout_s = _ATTACHED_PROBE_TIMEOUT_S if attached else _PROBE_TIMEOUT_S
        self._held: list[Event] = []
        self._lost_agents = 0  # whose loss is held
        self._probed = False
        self.deadline: float | None = None
        self.reported: set[AgentId] = set()
        self.failure_reported: set[int] = set()

    @property
    def all_reported(self) -> bool:
        return len(self.reported) == len(self._connections.agents) - len(self._connections.waiting)

    @property
    def unreported_agents(self) -> set[AgentId]:
        """The agents with ranks that have not reported."""
        return self._connections.agents.keys() - self._connections.waiting - self.reported

    @property
    def _launch_may_be_ending(self) -> bool:
        """Whether it starts the agents still, or several of them are lost that do not outlive it."""
        if not self.all_reported:
            return True
        return self._lost_agents > 1 and self._launch.status is None and not self._launch.command.agent_hosts

    @property
    def _reported_ranks(self) -> set[int]:
        return {rank for agent in self.reported for rank in self._connections.agents.get(agent, ())}

    def _has_reported_failure(self, agent: AgentId) -> bool:
        return not self.failure_reported.isdisjoint(self._connections.agents[agent])

    def hold_if_asking(self, event: Event) -> bool:
        """Hold the end of a worker while hosts are asked whether they live: the launch command may have ended them all.

        Returns whether it is held.
        """
        if self._probed:
            self.hold(event, probe=False)
        return self._probed

    def hold(self, *events: Event, probe: bool) -> None:
        """Hold these events of an agent until its end is explained; `probe`, once, whether all hosts still answer."""
        self._held += events
        self._lost_agents += sum(isinstance(event, AgentLost) for event in events)
        wait = LONG_EXIT_GRACE_S if self._launch_may_be_ending else EXIT_GRACE_S
        if probe and self.reported and not self._probed:
            self._connections.probe()
            self._probed, wait = True, self._probe_timeout_s
        self.deadline = max(self.deadline or 0.0, self._clock() + wait)

    def explain(self, hosts: Mapping[int, str]) -> list[Event]:
        """Return all that was held, after its likeliest cause; nothing is held then. `hosts` are the ranks' hosts."""
        unanswered = self._connections.unanswered_agents() if self._probed else []
        launch, launch_end = self._launch, None
        if launch.command.agents_stay and launch.status is not None and self.all_reported:
            self._needs_launch &= bool(unanswered) or any(isinstance(event, AgentLost) for event in self._held)
        if launch.status is not None and self._needs_launch:
            launch_end = StartFailed(launch.describe_failure(hosts, self._reported_ranks))
        evidence = Evidence(
            unanswered=unanswered,
            failure_reported=frozenset(filter(self._has_reported_failure, self._connections.agents)),
            launch_end=launch_end,
            launch_failed=launch.failed and launch_end is not None,
            launch_killed=launch.was_killed and launch_end is not None,
            all_reported=self.all_reported,
        )
        held, self._held, self._lost_agents = self._held, [], 0
        self.deadline, self._probed = None, False
        return explain_losses(held, evidence, f"its host has not answered for {self._probe_timeout_s:g} s")


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known when the time is up.

    unanswered:        the agents whose hosts have not answered the probe; empty where none was sent
    failure_reported:  the agents of which a worker has reported its failure
    launch_end:        how the launch command ended, if it has
    launch_failed:     it ended of its own accord, with an error
    launch_killed:     it was killed, by which its daemons may end all that they have started, by SIGTERM
    all_reported:      every agent has reported
    """

    unanswered: Sequence[AgentId]
    failure_reported: frozenset[AgentId]
    launch_end: StartFailed | None
    launch_failed: bool
    launch_killed: bool
    all_reported: bool


def explain_losses(held: list[Event], evidence: Evidence, no_answer: str) -> list[Event]:
    """Return all that was held, after its likeliest cause; `no_answer`: why a host that was probed in vain is lost."""
    signalled = {event.agent for event in held if isinstance(event, AgentSignalled)}
    launch_end: list[Event] = [evidence.launch_end] if evidence.launch_end else []
    if evidence.unanswered:
        return [*(AgentLost(agent, no_answer) for agent in evidence.unanswered), *held]
    if evidence.launch_failed and not evidence.all_reported and launch_end:
        return [*launch_end, *held]  # it could not start all agents, and ended those that it had started
    if evidence.launch_failed and any(isinstance(event, AgentLost) for event in held):
        # It ended the job because an agent had vanished, the first of those lost; the others went with it.
        not_first = evidence.failure_reported | signalled
        lost = (event for event in held if isinstance(event, AgentLost) and event.agent not in not_first)
        first = next(lost, None)
        others: list[Event] = [
            replace(event, ended_by_launch_command=True) if isinstance(event, AgentLost) else event
            for event in held
            if event is not first
        ]
        if first is not None:
            return [first, *others]
        held = others
    return [*([] if signalled and not evidence.launch_killed else launch_end), *held]
