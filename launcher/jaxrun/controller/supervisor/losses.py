"""Decides why agents end: whether a host, an agent, or the launch command (mpirun, srun) went first.

mpirun and srun end a whole job when they lose one host or process, and then every agent is signalled or lost at once.
So these events are held for a moment or, once all hosts were asked whether they are alive, until each has answered or
is lost according to --host-timeout (channel/silence.py). Then the cause is passed on first.

After MPI_Abort, some engines (MPICH, Intel MPI) kill all agents before these can report. Then the end of the rank's
stderr tells which rank it was, if its agent had still read it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import compress
from operator import not_
from typing import Protocol

from msgspec import Struct
from msgspec.structs import replace

from jaxrun.controller.roster import Roster
from jaxrun.controller.seat import LinkId
from jaxrun.controller.supervisor.launch_process import LaunchProcess
from jaxrun.job_events.events import AgentLost, Event
from jaxrun.protocol.agent_messages import AgentSignalled, StartFailed, WorkerExited

EXIT_GRACE_S = 0.05  # wait for the launch command's exit status before the agent that vanished is blamed
LONG_EXIT_GRACE_S = 0.5  # the same if it may be ending the processes that it started, before itself
_ASKED_GRACE_S = 1.0  # wait for all that ends together, and for the answers of hosts that are alive
ATTACHED_GRACE_S = 0.15  # an mpirun or srun gives less time to the processes that it started, like this one
_ASK_AGAIN_S = 0.05  # between two checks whether a host has answered


class HostAnswers(Protocol):
    """Finds out which hosts are alive."""

    def ask(self) -> None:
        """Ask whether all hosts are alive now."""

    def unanswered(self) -> list[LinkId]:
        """Return the connections to hosts that have not answered since then, and are not lost yet."""


class LossWatch:
    """Holds the losses of one attempt, and what may explain them, until it is known what went first."""

    def __init__(
        self,
        launch: LaunchProcess,
        roster: Roster,
        answers: HostAnswers,
        clock: Callable[[], float],
        *,
        attached: bool,
        read_stderr: Callable[[int], str] = lambda rank: "",
    ) -> None:
        """`attached`: another program started this process beside the agents.

        read_stderr:  returns the last lines of a rank's stderr that are on disk

        deadline:     when held events are passed on at the latest; None while no event is held
        """
        self._clock = clock
        self._launch = launch
        self._needs_launch = launch.status is None  # otherwise agents have already outlived it
        self._roster = roster
        self._answers = answers
        self._read_stderr = read_stderr
        self._asked_grace_s = ATTACHED_GRACE_S if attached else _ASKED_GRACE_S
        self._held: list[Event] = []
        self._asked = False
        self._may_ask = True
        self.deadline: float | None = None

    @property
    def _launch_may_be_ending(self) -> bool:
        """Whether it is still starting the agents, or several agents are lost that do not outlive it."""
        if not self._roster.all_reported:
            return True
        several = len(self._roster.suspected) > 1
        return several and self._launch.status is None and not self._launch.command.survive_host_loss

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
        wait = LONG_EXIT_GRACE_S if self._launch_may_be_ending else EXIT_GRACE_S
        if ask and self._may_ask and self._roster.any_reported and not self._asked:
            self._answers.ask()
            self._asked, wait = True, self._asked_grace_s
        self.deadline = max(self.deadline or 0.0, self._clock() + wait)

    def unanswered(self) -> list[LinkId]:
        """Return the connections of agents with ranks whose hosts were asked, and have not answered yet."""
        if not self._asked:
            return []
        silent = {*self._answers.unanswered()}
        return [seat.link for seat in self._roster.with_ranks() if seat.link in silent] if silent else []

    def stop_asking(self) -> None:
        """Wait for no host from now on: the head is ending the job, and must learn at once which workers it ends."""
        self._may_ask = False
        if self._asked:
            self._asked, self.deadline = False, self._clock()

    def wait_for_hosts(self) -> None:
        """Hold everything for longer: a host has not answered, but is not lost yet."""
        self.deadline = self._clock() + _ASK_AGAIN_S

    def explain(self, hosts: Mapping[int, str]) -> list[Event]:
        """Return all held events, after the likeliest cause; nothing is held then. `hosts`: the host of each rank."""
        launch, roster, end = self._launch, self._roster, None
        if launch.command.agents_stay and launch.status is not None and roster.all_reported:
            self._needs_launch &= any(isinstance(event, AgentLost) for event in self._held)
        if launch.status is not None and self._needs_launch:
            reported = {rank for seat in roster.with_ranks() if seat.has_reported for rank in seat.ranks}
            text = StartFailed(launch.describe_failure(hosts, reported))
            end = LaunchEnd(text, launch.failed, launch.was_killed, self._find_mpi_abort())
        elif launch.status is None and launch.failed_agents() & roster.not_started():
            # It ends the agents that it has started by a signal, and waits for them.
            end = LaunchEnd(StartFailed(launch.describe_failed_start()), failed=True)
        held, self._held = self._held, []
        self.deadline, self._asked = None, False
        explained = explain_losses(held, roster, end)
        for agent in tuple(roster.suspected):
            roster.explain(agent)
        return explained

    def _find_mpi_abort(self) -> WorkerExited | StartFailed | None:
        """Return how the rank ended that called MPI_Abort; without its last words, that some rank did."""
        launch, roster, words = self._launch, self._roster, self._launch.command.engine.abort_words
        if words is None or not (launch.failed and roster.all_reported and roster.suspected):
            return None
        ended = {rank for agent in roster.suspected for rank in roster.ranks_of(agent)}
        ended |= {event.rank for event in self._held if isinstance(event, WorkerExited)}
        for rank in sorted(ended):
            text = self._read_stderr(rank)
            if any(int(code) & 0xFF == launch.status for code in words.findall(text)):
                return WorkerExited(rank, launch.status or 0, stderr_tail=text)
        if launch.last_lines():  # it says so if it has lost a process
            return None
        return StartFailed(
            f"{launch.describe_end()} and killed all ranks, as it does after MPI_Abort({launch.status}) or an error of "
            "MPI in one of them; that rank's last words were lost"
        )


class LaunchEnd(Struct, frozen=True):
    """How the launch command ended.

    event:       tells it to the head
    failed:      it ended of its own accord, with an error, or is about to
    was_killed:  after that its daemons may end everything that they started, by SIGTERM
    mpi_abort:   that a rank called MPI_Abort, for which the launch command has killed all agents
    """

    event: StartFailed
    failed: bool = False
    was_killed: bool = False
    mpi_abort: WorkerExited | StartFailed | None = None


def _is_exit_of(first: Event | None, event: Event) -> bool:
    """Whether both are the end of the same worker, of which `first` is the one to report."""
    return isinstance(first, WorkerExited) and isinstance(event, WorkerExited) and event.rank == first.rank


def explain_losses(held: list[Event], roster: Roster, end: LaunchEnd | None) -> list[Event]:
    """Return all held events, after the likeliest cause. `end`: how the launch command ended, if that may be it."""
    signalled = {event.agent for event in held if isinstance(event, AgentSignalled)}
    lost = [event for event in held if isinstance(event, AgentLost)]
    silent = {event.agent for event in lost if event.agent in roster.seats and roster.seats[event.agent].is_silent}
    is_silent = [isinstance(event, AgentLost) and event.agent in silent for event in held]
    if silent:  # everything else ended because of these hosts
        return [*compress(held, is_silent), *compress(held, map(not_, is_silent))]
    if end is None:
        return held
    if end.failed and not roster.all_reported:
        return [end.event, *held]  # it could not start all agents, and ended those that it had started
    if end.failed and lost:
        # It ended the job because an agent had vanished: the first lost one. The others were lost because of that.
        failed = {event.agent for event in lost if event.agent in roster.seats and roster.seats[event.agent].has_failed}
        first = end.mpi_abort or next((event for event in lost if event.agent not in failed | signalled), None)
        others: list[Event] = [
            replace(event, ended_by_launch_command=True) if isinstance(event, AgentLost) else event
            for event in held
            if event is not first and not _is_exit_of(first, event)
        ]
        if first is not None:
            return [first, *others]
        held = others
    return held if signalled and not end.was_killed else [end.event, *held]
