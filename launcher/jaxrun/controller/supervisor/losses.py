"""Decides why agents end: whether a host, an agent, or the launch command (mpirun, srun) went first.

mpirun and srun end a whole job when they lose one host or process, and then every agent is signalled or lost at once.
So these events are held for a moment or, once all hosts were asked whether they are alive, until each has answered or
is lost according to --host-timeout (channel/silence.py). Then the cause is passed on first.

After MPI_Abort, MPICH and Intel MPI kill all agents before these can report. Then the end of the rank's stderr tells
which rank it was, if its agent had still read it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from itertools import compress
from operator import not_

from jaxrun.controller.supervisor.agent_connections import AgentConnection, AgentConnections, HostWatches
from jaxrun.controller.supervisor.launch_process import LaunchProcess
from jaxrun.protocol.agent_id import AgentId
from jaxrun.protocol.agent_messages import AgentSignalled, StartFailed, WorkerExited
from jaxrun.records.event_log.events import AgentLost, Event

EXIT_GRACE_S = 0.05  # wait for the launch command's exit status before the agent that vanished is blamed
LONG_EXIT_GRACE_S = 0.5  # the same if it may be ending the processes that it started, before itself
_ASKED_GRACE_S = 1.0  # wait for all that ends together, and for the answers of hosts that are alive
ATTACHED_GRACE_S = 0.15  # an mpirun or srun gives less time to the processes that it started, like this one
_ASK_AGAIN_S = 0.05  # between two checks whether a host has answered
_KILLS_AGENTS = "hydra"  # the engine of MPICH and Intel MPI
# "Abort(5) on node 1 (rank 1 in comm 0): application called MPI_Abort(MPI_COMM_WORLD, 5) - process 1", or MPI's error
_MPI_ABORT = re.compile(r"^Abort\((-?[0-9]{1,11})\) on node [0-9]+ \(rank [0-9]+ in comm [0-9]+\): ", re.MULTILINE)


class LossWatch:
    """Tracks which agents of one attempt, and whether their launch command, have disappeared, and which went first."""

    def __init__(
        self,
        launch: LaunchProcess,
        connections: AgentConnections,
        watches: HostWatches,
        clock: Callable[[], float],
        *,
        attached: bool,
        read_stderr: Callable[[int], str] = lambda rank: "",
    ) -> None:
        """`watches` knows which hosts are alive; `attached`: another program started this process beside the agents.

        read_stderr:       returns the last lines of a rank's stderr that are on disk

        deadline:          when held events are passed on at the latest; None while no event is held
        reported:          the agents with ranks that have reported
        failure_reported:  the ranks whose worker has reported why it fails
        """
        self._clock = clock
        self._launch = launch
        self._needs_launch = launch.status is None  # otherwise agents have already outlived it
        self._connections = connections
        self._watches = watches
        self._read_stderr = read_stderr
        self._asked_grace_s = ATTACHED_GRACE_S if attached else _ASKED_GRACE_S
        self._held: list[Event] = []
        self._lost_agents = 0  # whose loss is held
        self._asked = False
        self._may_ask = True
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
        """Whether it is still starting the agents, or several agents are lost that do not outlive it."""
        if not self.all_reported:
            return True
        return self._lost_agents > 1 and self._launch.status is None and not self._launch.command.survive_host_loss

    @property
    def _reported_ranks(self) -> set[int]:
        return {rank for agent in self.reported for rank in self._connections.agents.get(agent, ())}

    def _has_reported_failure(self, agent: AgentId) -> bool:
        return not self.failure_reported.isdisjoint(self._connections.agents[agent])

    @property
    def held_losses(self) -> set[AgentId]:
        """The agents whose loss is held: the head does not know it yet."""
        return {event.agent for event in self._held if isinstance(event, AgentLost)}

    def hold_if_asking(self, event: Event) -> bool:
        """Hold the end of a worker while hosts are asked whether they live: the launch command may have ended them all.

        Returns whether it is held.
        """
        if self._asked:
            self.hold(event, ask=False)
        return self._asked

    def hold(self, *events: Event, ask: bool) -> None:
        """Hold these events of an agent until its end is explained; `ask`, once, whether all hosts are alive."""
        self._held += events
        self._lost_agents += sum(isinstance(event, AgentLost) for event in events)
        wait = LONG_EXIT_GRACE_S if self._launch_may_be_ending else EXIT_GRACE_S
        if ask and self._may_ask and self.reported and not self._asked:
            self._watches.ask(self._connections)
            self._asked, wait = True, self._asked_grace_s
        self.deadline = max(self.deadline or 0.0, self._clock() + wait)

    def unanswered(self) -> list[tuple[AgentId, AgentConnection]]:
        """Return the agents whose hosts were asked whether they are alive, and have not answered yet."""
        return self._watches.unanswered(self._connections) if self._asked else []

    def stop_asking(self) -> None:
        """Wait for no host from now on: the head is ending the job, and must learn at once which workers it ends."""
        self._may_ask = False
        if self._asked:
            self._asked, self.deadline = False, self._clock()

    def wait_for_hosts(self) -> None:
        """Hold everything for longer: a host has not answered, but is not lost yet."""
        self.deadline = self._clock() + _ASK_AGAIN_S

    def explain(self, hosts: Mapping[int, str], silent: Collection[AgentId]) -> list[Event]:
        """Return all held events, after the likeliest cause; nothing is held then.

        hosts:   the host of each rank
        silent:  agents that were lost because their hosts are silent
        """
        launch, launch_end = self._launch, None
        if launch.command.agents_stay and launch.status is not None and self.all_reported:
            self._needs_launch &= any(isinstance(event, AgentLost) for event in self._held)
        if launch.status is not None and self._needs_launch:
            launch_end = StartFailed(launch.describe_failure(hosts, self._reported_ranks))
        evidence = Evidence(
            silent=silent,
            failure_reported=frozenset(filter(self._has_reported_failure, self._connections.agents)),
            launch_end=launch_end,
            launch_failed=launch.failed and launch_end is not None,
            launch_killed=launch.was_killed and launch_end is not None,
            all_reported=self.all_reported,
            mpi_abort=self._find_mpi_abort() if launch_end is not None else None,
        )
        held, self._held, self._lost_agents = self._held, [], 0
        self.deadline, self._asked = None, False
        return explain_losses(held, evidence)

    def _find_mpi_abort(self) -> WorkerExited | StartFailed | None:
        """Return how the rank ended that called MPI_Abort; without its last words, that some rank did."""
        launch = self._launch
        if not (launch.failed and launch.command.engine == _KILLS_AGENTS and self.all_reported and self._lost_agents):
            return None
        ended = {rank for agent in self.held_losses for rank in self._connections.agents[agent]}
        ended |= {event.rank for event in self._held if isinstance(event, WorkerExited)}
        for rank in sorted(ended):
            text = self._read_stderr(rank)
            if any(int(code) & 0xFF == launch.status for code in _MPI_ABORT.findall(text)):
                return WorkerExited(rank, launch.status or 0, stderr_tail=text)
        if launch.last_lines():  # it says so if it has lost a process
            return None
        return StartFailed(
            f"{launch.describe_end()} and killed all ranks, as it does after MPI_Abort({launch.status}) or an error of "
            "MPI in one of them; that rank's last words were lost"
        )


@dataclass(frozen=True, slots=True)
class Evidence:
    """The known facts when the time is up.

    silent:            the agents that were lost because their hosts are silent
    failure_reported:  the agents with a worker that has reported its failure
    launch_end:        how the launch command ended, if it has
    launch_failed:     it ended of its own accord, with an error
    launch_killed:     it was killed, after which its daemons may end everything that they started, by SIGTERM
    all_reported:      every agent has reported
    mpi_abort:         that a rank called MPI_Abort, for which the launch command has killed all agents
    """

    silent: Collection[AgentId]
    failure_reported: frozenset[AgentId]
    launch_end: StartFailed | None
    launch_failed: bool
    launch_killed: bool
    all_reported: bool
    mpi_abort: WorkerExited | StartFailed | None = None


def _is_exit_of(first: Event | None, event: Event) -> bool:
    """Whether both are the end of the same worker, of which `first` is the one to report."""
    return isinstance(first, WorkerExited) and isinstance(event, WorkerExited) and event.rank == first.rank


def explain_losses(held: list[Event], evidence: Evidence) -> list[Event]:
    """Return all held events, after the likeliest cause."""
    signalled = {event.agent for event in held if isinstance(event, AgentSignalled)}
    launch_end: list[Event] = [evidence.launch_end] if evidence.launch_end else []
    is_silent = [isinstance(event, AgentLost) and event.agent in evidence.silent for event in held]
    if any(is_silent):  # everything else ended because of these hosts
        return [*compress(held, is_silent), *compress(held, map(not_, is_silent))]
    if evidence.launch_failed and not evidence.all_reported and launch_end:
        return [*launch_end, *held]  # it could not start all agents, and ended those that it had started
    if evidence.launch_failed and any(isinstance(event, AgentLost) for event in held):
        # It ended the job because an agent had vanished: the first lost one. The others were lost because of that.
        not_first = evidence.failure_reported | signalled
        lost = (event for event in held if isinstance(event, AgentLost) and event.agent not in not_first)
        first = evidence.mpi_abort or next(lost, None)
        others: list[Event] = [
            replace(event, ended_by_launch_command=True) if isinstance(event, AgentLost) else event
            for event in held
            if event is not first and not _is_exit_of(first, event)
        ]
        if first is not None:
            return [first, *others]
        held = others
    return [*([] if signalled and not evidence.launch_killed else launch_end), *held]
