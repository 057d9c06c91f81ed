"""The agents of one attempt that are on other hosts: passes on what they report, and sends them orders.

It decides nothing: the head does, to which all events go; the roster (controller/roster.py) knows which agent has which
place, and whose messages count. A lost host shows here first: as a connection that the kernel gives up
(channel/connection.py), or as probes that are not answered (channel/silence.py); losses.py says which loss came first.

    transport ── Arrived, Said, Gone ──▶ Roster ── actions ──▶ execute: transport, head
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct, field
from msgspec.structs import replace

from jaxrun.analysis.diagnosis.job_end import Unavailable
from jaxrun.analysis.diagnosis.job_outcome import JobOutcome
from jaxrun.controller.head.agent_registry import AgentRegistry
from jaxrun.controller.roster import Roster
from jaxrun.controller.seat import (
    Action,
    Admit,
    AskHost,
    Close,
    Dismiss,
    LinkId,
    Lose,
    Name,
    Recall,
    Refuse,
    Seat,
    SeatState,
    Take,
)
from jaxrun.controller.supervisor.attempt_head import AttemptHead
from jaxrun.controller.supervisor.engine_commands import EngineCommands, HostSearch
from jaxrun.controller.supervisor.host_watches import HostWatches
from jaxrun.controller.supervisor.kept_record import KeptRecord
from jaxrun.controller.supervisor.launch_process import LaunchProcess
from jaxrun.controller.supervisor.losses import ATTACHED_GRACE_S, LossWatch
from jaxrun.controller.supervisor.remote_output import RemoteOutput
from jaxrun.controller.supervisor.spare_agents import SpareAgents
from jaxrun.controller.supervisor.supervision import Supervision
from jaxrun.controller.supervisor.transport import (
    AgentConnection,
    ConnectedAgent,
    DroppedPeers,
    LinkHandler,
    Transport,
)
from jaxrun.errors import (
    EXIT_PREEMPTED,
    EXIT_SIGNAL_BASE,
    JaxrunError,
    NotUniformError,
    ProtocolError,
    UnavailableError,
)
from jaxrun.job_events.actions import RecordClock
from jaxrun.job_events.events import (
    AgentLost,
    AgentTurnedAway,
    BadMessage,
    HostsFound,
    LaunchCommandEnded,
    LauncherSignalled,
    SpareLost,
    SpareReported,
    check_event,
)
from jaxrun.node.agent.agent import OUTPUT
from jaxrun.node.channel.connection import AGENT_TO_HEAD
from jaxrun.node.channel.listener import Peer
from jaxrun.protocol.agent_id import AgentId
from jaxrun.protocol.agent_messages import (
    AgentConnected,
    AgentEvent,
    AgentMessage,
    AgentOrder,
    AgentRefused,
    AgentReport,
    AgentSignalled,
    AgentToHead,
    JobInfo,
    NextAttempt,
    OutputChunk,
    RankOrder,
    Shutdown,
    SignalWorker,
    StartFailed,
    StartWorkers,
    StreamEnded,
    ToRanks,
    WorkerExited,
)
from jaxrun.protocol.auth import Purpose
from jaxrun.protocol.codec import encode
from jaxrun.protocol.job_record import JobRecord
from jaxrun.protocol.stop_messages import CheckpointSaved
from jaxrun.protocol.worker_messages import Failed, Run
from jaxrun.spec.job.plan import Plan
from jaxrun.text import format_ranks

if TYPE_CHECKING:
    from jaxrun.controller.supervisor.launcher_staging import Staged

_SHUTDOWN_SEND_S = 1.0  # for the last messages to leave
_BLAMED_EXIT_S = 0.2  # for a process to end after its connection, so that mpirun sees its status first
_AGENT_EXIT_S = 1.0  # for the agents that answer to end, before the engine ends those that do not
_CONFIRM_INTERVAL_S = 0.05  # between two looks at whether an agent whose place is claimed is alive
_RankEnd = Failed | WorkerExited  # how a rank has ended


class JobAgents(Struct, frozen=True):
    """What all attempts of a job share of its agents.

    transport:  their connections
    watches:    whether their hosts live
    roster:     who has which place
    job_info:   the first message to each agent
    commands:   runs the commands of the engine
    staged:     copies for those that come to take them
    """

    transport: Transport
    watches: HostWatches
    roster: Roster
    job_info: JobInfo
    commands: EngineCommands
    staged: Staged | None = None


class LaunchedAgents(Struct):
    """The commands that have started agents.

    launch:     the launch command
    spares:     the commands of agents that have a command of their own
    restarted:  the commands that have started agents with ranks again, on hosts that came back

    Each spare agent of an mpirun gets its own mpirun: started by the job's mpirun it would count as an MPI rank, and
    MPI_Init in the real ranks would wait for it.
    """

    launch: LaunchProcess
    spares: dict[AgentId, LaunchProcess] = field(default_factory=dict)
    restarted: list[LaunchProcess] = field(default_factory=list)


class RemoteAgents:
    """AgentLink to the agents on other hosts."""

    def __init__(
        self,
        shared: Supervision,
        head: AttemptHead,
        plan: Plan,
        agents: JobAgents,
        launched: LaunchedAgents,
        registry: AgentRegistry,
        record: JobRecord | None = None,
    ) -> None:
        """Serve agents in the loop of the attempt from now on, and hand what happens to its `head`.

        registry:  compares the reports of agents with ranks
        record:    what agents keep for another head; None where no head takes the place of this one
        """
        clock = shared.clock
        self._head = head
        self._loop = shared.loop
        self._plan = plan
        self._agents = agents
        self._roster, self._transport = agents.roster, agents.transport
        self._registry = registry
        self._output = shared.output
        self._clock = clock
        self.launched = launched
        self._launch = launched.launch
        # Someone else started this process beside the agents, and sends it the signals that they get.
        self._attached = self._launch.command.attached
        self._spares = SpareAgents(
            self._roster,
            self._transport,
            registry,
            self._launch.command,
            shared.output.print_line,
            by_hand=plan.is_started_by_hand,
        )
        self._search = None
        if not plan.is_started_by_hand:
            self._search = HostSearch(head.loop, clock, plan, shared.environ, agents.commands, shared.guard)
        self._watches = agents.watches
        self._remote_output = RemoteOutput(shared.output, self._transport)
        self._losses = LossWatch(
            self._launch,
            self._roster,
            self._watches,
            clock,
            attached=self._attached,
            read_stderr=lambda rank: shared.output.logs.read_stderr(rank),
        )
        self._dropped_peers = DroppedPeers(clock)
        self._record = KeptRecord(record, self._transport, clock)
        self._confirm_at: float | None = None  # when to look whether an agent whose place is claimed is alive
        self._signalled = False  # whether this process was asked to end, where the agents are as well
        self._outcome: JobOutcome | None = None
        self._serve()

    def _serve(self) -> None:
        loop, dropped = self._head.loop, self._dropped_peers
        loop.add_timer(lambda: self._watches.next_check, self._drop_silent)
        loop.add_reader(self._launch.fileno(), OUTPUT, self._on_launch_output)
        loop.add_timer(dropped.deadline, self._log_dropped_peers)
        loop.add_poller(self._remote_output.acknowledge)
        loop.add_timer(lambda: self._losses.deadline, self._explain_losses)
        loop.add_timer(lambda: self._confirm_at, self._confirm_claimed)
        loop.add_timer(lambda: self._record.due, lambda: self._record.send_all(self._head.hosts))
        handler = LinkHandler(self._on_peer, dropped.add, self._on_messages, self._on_link_lost, self._on_nonsense)
        self._transport.serve(handler)

    # ---- the end of the attempt, and of the job

    def complete(self, outcome: JobOutcome) -> JobOutcome:
        """Note how the attempt ended; returns the outcome with what the launch command said, where that may be why."""
        self._log_dropped_peers()
        end = outcome.end
        if isinstance(end, Unavailable) and not self._roster.all_reported:
            outcome = replace(outcome, end=replace(end, text=self._launch.add_last_lines(end.text)))
        self._outcome = outcome
        self._roster.drain(outcome.drained | outcome.leaving)
        for link, connection in self._transport:
            if connection.lost_reason:  # noticed while something was sent; the head is over
                self._transport.drop(link)
                self._roster.go(link, connection.lost_reason, is_silent=connection.is_silent)
        self._transport.hold()
        self._head.loop.close()
        return outcome

    def end_search(self) -> list[LaunchProcess]:
        """Give up a search for hosts; returns its commands that still run, and have been told to end."""
        return self._search.close() if self._search is not None else []

    @property
    def found(self) -> tuple[str, ...]:
        """The hosts that the last search has found."""
        return self._search.found if self._search is not None else ()

    @property
    def silent_ranks(self) -> set[int]:
        """The ranks whose agents were silent at the end of the job: they are stopped, or have not come in time."""
        unanswered = self._outcome.unanswered if self._outcome is not None else ()
        return {*unanswered, *(rank for seat in self._roster.unreported() for rank in seat.ranks)}

    def shut_down(
        self, status: int, *, job_goes_on: bool = False, headline: str = "", blamed: Collection[int] = ()
    ) -> None:
        """Tell all agents to end with `status`, and note what is known of them; `headline`: why the job failed.

        blamed:  the ranks whose agents alone end with `status`, the others with 0; empty for all agents
        """
        launch, roster, transport = self._launch, self._roster, self._transport
        launch.all_reported = roster.all_reported
        started = len(launch.command.agents or launch.command.agent_hosts)
        is_lost = launch.command.survive_host_loss and len(roster.links_of(roster.seats)) < started
        launch.has_silent = bool(self.silent_ranks) or is_lost
        if self._outcome is not None and self._outcome.head_leaves:  # the others look for the head of another pod
            self._record.send_all(self._head.hosts, head_left=True)
            leaving = roster.links_of({*self._outcome.drained, *self._outcome.leaving, AgentId(0)})
            transport.send(leaving, Shutdown(status, headline=headline, leaves=True))
            transport.flush(_SHUTDOWN_SEND_S)
        elif blamed:
            of_blamed = {agent for agent, ranks in roster.agents.items() if not set(blamed).isdisjoint(ranks)}
            others = roster.links_of(roster.seats.keys() - of_blamed)
            transport.send(roster.links_of(of_blamed), Shutdown(status, job_goes_on, headline))
            transport.send(others, Shutdown(0, job_goes_on, headline))
            transport.flush(_SHUTDOWN_SEND_S)
            if AgentId(0) not in of_blamed:  # whose status is this process's own
                transport.wait_for_end(_AGENT_EXIT_S, roster.links_of(of_blamed))
                self._loop.run_until(lambda: False, _BLAMED_EXIT_S)
        else:
            transport.send_all(Shutdown(status, job_goes_on, headline))
            transport.flush(_SHUTDOWN_SEND_S)
            transport.end_sending()

    def close(self, *, wait: bool = True) -> None:
        """Close all connections; `wait` for agents that answer to end, where others do not."""
        self._transport.wait_for_end(_AGENT_EXIT_S if wait and self.silent_ranks else 0)
        self._transport.close()

    # ---- orders of the head

    def send(self, ranks: tuple[int, ...], order: RankOrder) -> None:
        if isinstance(order, Run):
            self._roster.run()
            self._record.send_all(self._head.hosts)  # all are known now; agents have them before a rank runs
        ends_rank = isinstance(order, SignalWorker) and order.signum in (signal.SIGTERM, signal.SIGKILL)
        if ends_rank and not self._head.is_healthy:  # with --keep-survivors the job may go on without one rank
            self._losses.stop_asking()
        frame = encode(order)
        for link, some in self._roster.split(ranks):
            self._transport.send_frame((link,), frame if some is None else encode(ToRanks(some, order)))

    def send_to_agents(self, agents: tuple[AgentId, ...], order: AgentOrder) -> None:
        if isinstance(order, StartWorkers):
            self._remote_output.handle_start(order)
        self._transport.send(self._roster.links_of(agents), order)

    def look_for_hosts(self, agents: tuple[AgentId, ...]) -> None:
        if self._search is None:
            there = self._roster.usable(()) - self._roster.agents.keys()
            hosts = dict.fromkeys(self._roster.seats[agent].host for agent in sorted(there))
            self._head.handle(HostsFound(tuple(hosts)))
        elif self._search.begin([self._roster.seats[agent].host for agent in agents]):
            self._on_hosts_found(self._search)

    def _on_hosts_found(self, search: HostSearch) -> None:
        """A look for hosts is over: start the agents that are awaited there."""
        for agent in self._roster.awaited:
            seat = self._roster.seats[agent]
            if seat.host in search.found and seat.link is None:
                with contextlib.suppress(JaxrunError):  # the next look tries it again
                    self.launched.restarted.append(search.start_agent(agent, seat.host))
        self._head.handle(HostsFound(search.found))

    # ---- agents connect

    def _on_peer(self, peer: Peer) -> None:
        staged = self._agents.staged
        if staged is not None and peer.purpose is Purpose.COPY:
            staged.give(peer)
            return
        connection: AgentConnection = AgentConnection(peer.connection, AGENT_TO_HEAD, peer.tags)
        self._watches.begin(connection)
        link = self._transport.add(connection)
        self.execute(self._roster.arrive(link, AgentId(peer.number)))
        self._transport.watch(link)

    def admit(self, agents: Iterable[ConnectedAgent]) -> None:
        """Let agents in that have come before this attempt, and handle what all others have sent since the last."""
        for one in agents:
            self.execute(self._roster.arrive(one.link, one.agent))
            self._transport.deliver(one.link, one.messages)
        self._transport.handle_waiting()

    def execute(self, actions: Iterable[Action]) -> None:
        """Execute what the roster wants."""
        for action in actions:
            match action:
                case Take(link, agent, message):
                    if self._roster.agent_at(link) is not None:  # else refused after its last message
                        self._on_message(agent, link, message)
                case Admit(link, attempt):
                    self._transport.send((link,), replace(self._agents.job_info, attempt=attempt))
                    self._record.send_to(link)
                case Recall(link, ranks):
                    self._transport.send((link,), NextAttempt(self._plan.attempt, ranks))
                    self._record.send_to(link)
                case Dismiss(link, leaves):
                    self._send_last(link, Shutdown(EXIT_PREEMPTED, leaves=True) if leaves else Shutdown(0))
                case Refuse():
                    self._refuse(action)
                case Name(report):
                    self._head.handle(report)
                case AskHost(link):
                    self._watches.ask_one(link)
                    self._confirm_at = self._clock()
                case Close(link):
                    self._transport.drop(link)
                case Lose(agent, why, seat):
                    self._on_lost(agent, why, seat)

    def _send_last(self, link: LinkId, message: object) -> None:
        self._transport.send((link,), message)
        self._transport.drop(link)

    def _refuse(self, refusal: Refuse) -> None:
        """Tell an agent that the job has no place for it, or the reason, and close its connection."""
        agent, hosts, ranks = refusal.agent, self._head.hosts, self._roster.ranks_of(refusal.agent)
        is_taken = bool(ranks) and self._roster.waits and not refusal.reason
        if refusal.reason:
            text = refusal.reason
        elif ranks and self._roster.seats[agent].state in (SeatState.SUSPECTED, SeatState.LOST):
            its_host = f"whose host {hosts[ranks[0]]} was lost"
            text = f"this job goes on without its {format_ranks(ranks)}, {its_host} (--keep-survivors)"
        elif ranks:
            text = f"this job runs already: its {format_ranks(ranks)} is another process, on {hosts[ranks[0]]}"
        elif agent in self._roster.seats:
            is_taken = True
            text = "this job has no rank for this host now, and another process waits in its place"
        else:
            text = f"this job runs already, with {len(hosts)} processes: none is rank {agent}"
        self._head.record(AgentTurnedAway(agent, text))
        self._send_last(refusal.link, AgentRefused(text, is_taken, refusal.may_return))

    def _confirm_claimed(self) -> None:
        """Look whether the agents are alive whose places others claim."""
        for link in self._watches.take_confirmed():
            self.execute(self._roster.confirm(link))
        self._confirm_at = self._clock() + _CONFIRM_INTERVAL_S if self._watches.is_asking else None

    def _log_dropped_peers(self) -> None:
        if (dropped := self._dropped_peers.take()) is not None:
            self._head.record(dropped)

    # ---- messages of agents

    def _on_messages(self, link: LinkId, arrived: Sequence[AgentToHead]) -> None:
        agent = self._roster.agent_at(link)
        if agent is None:
            return
        try:
            messages, ranks = self._roster.drop_earlier(link, arrived), self._roster.ranks_of(agent)
            for message in messages:
                check_event(message, agent=agent, ranks=ranks)
        except ProtocolError as error:
            self._on_nonsense(link, error)
            return
        for message in messages:
            self.execute(self._roster.say(link, message))

    def _on_nonsense(self, link: LinkId, error: ProtocolError) -> None:
        reason = f"its agent sent something that is not a message of jaxrun: {error}"
        self._transport.spoil(link, reason)
        if (agent := self._roster.agent_at(link)) is not None:
            self._head.record(BadMessage(agent, reason))

    def _on_message(self, agent: AgentId, link: LinkId, message: AgentToHead) -> None:
        seat = self._roster.seats.get(agent)
        if seat is not None and not seat.ranks:
            if isinstance(message, AgentReport):
                self._head.record(SpareReported(agent, message.host, message.pid))
                self.execute(self._spares.add(link, message))
            elif isinstance(message, AgentSignalled) and self._plan.is_started_by_hand:
                self.execute(self._roster.go(link, f"it was ended by {message.signum.name}"))
                self._send_last(link, Shutdown(EXIT_SIGNAL_BASE + message.signum))
        elif isinstance(message, AgentReport) and self._refuse_unfit(link, message):
            return
        elif isinstance(message, AgentEvent):
            self._on_agent_event(message)
        else:
            self._on_worker_message(link, message)

    def _on_agent_event(self, event: AgentEvent) -> None:
        match event:
            case AgentConnected():
                self._head.handle(replace(event, record=None))  # what it knows was of use before the attempt began
            case AgentSignalled():
                self._losses.hold(event, ask=True)
            case AgentReport():
                offset = self._clock() - event.time
                self._launch.launch_id = self._launch.launch_id or event.launch_id
                self._head.handle(event)  # may record that this host takes the place of another, with another clock
                for rank in self._roster.ranks_of(event.agent):
                    self._head.record(RecordClock(rank, offset))
                self._spares.prepare()
            case _:
                self._head.handle(event)

    def _refuse_unfit(self, link: LinkId, report: AgentReport) -> bool:
        """Refuse an agent that replaces another, but does not fit the job; returns whether it was refused."""
        if self._roster.runs and report.check_failure:
            why = f"failed --host-check: {report.check_failure}"
            self.execute(self._roster.go(link, f"it {why}"))
            if self._plan.is_started_by_hand:
                self._output.print_line(f"jaxrun: {report.host} cannot take the place of a lost host: it {why}")
                self._send_last(link, AgentRefused(f"{report.host} {why}", is_taken=True))
            else:  # of a spare host, whose ranks are lost with it
                self._send_last(link, Shutdown(0))
            return True
        if not self._roster.waits or not (self._roster.runs or self._plan.attempt > 1):
            return False
        try:
            self._registry.check_command(report)
            self._registry.check_installation(report)
        except (UnavailableError, NotUniformError) as error:
            self._output.print_line(f"jaxrun: {report.host} cannot take the place of a lost host: {error}")
            self.execute(self._roster.turn_away(link, str(error)))
            return True
        return False

    def _on_worker_message(self, link: LinkId, message: AgentMessage | OutputChunk | StreamEnded) -> None:
        match message:
            case OutputChunk() | StreamEnded():
                self._remote_output.handle(message.rank, link, message)
                return
            case CheckpointSaved():
                self._record.handle_saved(message.step)
            case Failed():
                self._roster.add_failure(message.rank)
                self._remote_output.log_traceback(message)
        if not (isinstance(message, _RankEnd) and self._losses.hold_if_asking(message)):
            self._head.receive(message)

    # ---- agents that wait

    def lose_spare(self, agent: AgentId, reason: str) -> None:
        """The command that starts an agent on a spare host has failed."""
        self.execute(self._roster.lose(agent, reason))

    # ---- agents, hosts and the launch command go away

    def _drop_silent(self) -> None:
        """Lose the hosts that are silent."""
        lost, notice = self._watches.check()
        if notice:
            self._output.print_line(notice)
        for link in lost:
            self._transport.read(link)

    def _on_link_lost(self, link: LinkId, why: str, is_silent: bool) -> None:
        self._remote_output.forget(link)
        self.execute(self._roster.go(link, why, is_silent=is_silent))

    def _on_lost(self, agent: AgentId, why: str, seat: Seat | None) -> None:
        if seat is None or seat.ranks:
            self._losses.hold(AgentLost(agent, why), ask=False)
            return
        self._head.record(SpareLost(agent, seat.host, why))
        self._spares.print_loss(seat.host, why)

    def _explain_losses(self) -> None:
        """Tell the head why agents have ended, once it is known which hosts are alive."""
        unanswered = self._losses.unanswered()
        if unanswered and not self._attached:
            self._losses.wait_for_hosts()
            return
        for link in unanswered:  # what has started this process will end it before more can be known
            self._transport.connection(link).give_up(ATTACHED_GRACE_S)
            self._transport.read(link)
        events = self._losses.explain(self._head.hosts)
        agents = {event.rank: self._roster.of_rank(event.rank).agent for event in events if isinstance(event, _RankEnd)}
        for event in events:
            # A spare host may have a rank since the loss of its own; the event is about the process before.
            if not isinstance(event, _RankEnd) or self._roster.of_rank(event.rank).agent == agents[event.rank]:
                self._head.handle(event)
        self.execute(self._roster.settle())

    def _on_launch_output(self) -> None:
        text = self._launch.read()
        if text is None:
            self._head.loop.remove_reader(self._launch.fileno())
        elif text and self._plan.job.verbose:
            self._output.print_line(text.decode(errors="replace"))
        # One that outlives its agents does not end if it cannot start one of them; any other says why once it ends.
        survives = self._launch.command.survive_host_loss
        if text and survives and self._launch.failed_agents() & self._roster.not_started():
            self._head.handle(StartFailed(self._launch.describe_failed_start()))

    # ---- signals

    def on_signal(self, signum: int) -> None:
        if signum == signal.SIGCHLD:
            self._on_child_exit()
        elif not self._attached or signum in (signal.SIGQUIT, signal.SIGTSTP):
            self._head.handle(LauncherSignalled(signum))
        elif signum in (signal.SIGUSR1, signal.SIGUSR2):
            self.send((0,), SignalWorker(signum))  # the agents of the other ranks have got it as well
        elif self._signalled:
            self._head.handle(LauncherSignalled(signum))  # a second signal
        else:
            self._signalled = True
            self._losses.hold(AgentSignalled(self._roster.of_rank(0).agent, signal.Signals(signum)), ask=True)

    def _on_child_exit(self) -> None:
        for agent, launch in self.launched.spares.items():
            seat = self._roster.seats.get(agent)
            is_known = seat is None or seat.ranks or seat.state is SeatState.SPARE
            is_known = is_known or (seat is not None and seat.host in self._roster.lost_spares())
            if launch.status is None and launch.reap() and not is_known:
                self.lose_spare(agent, launch.describe_end() + launch.log_note)
        if self._search is not None and self._search.on_child_exit():
            self._on_hosts_found(self._search)
        if self._launch.status is None and self._launch.reap():
            self._head.record(LaunchCommandEnded(self._launch.status or 0))
            self._losses.hold(ask=True)
