"""A job on other hosts: a launch command (mpirun or srun) starts agents there, which connect to this process.

Agents stay for the next attempt if everything that it needs is still there; otherwise the launch command is run again.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from jaxrun.analysis.diagnosis.fabric import relevant_variables
from jaxrun.analysis.diagnosis.job_end import EndedBySignal, Unavailable
from jaxrun.analysis.diagnosis.job_outcome import JobOutcome
from jaxrun.analysis.verdict.restarts import Stop
from jaxrun.controller.roster import Roster
from jaxrun.controller.supervisor.attempt_head import AttemptHead
from jaxrun.controller.supervisor.attempt_loop import AttemptLoop, make_head, make_registry
from jaxrun.controller.supervisor.engine_commands import EngineCommands
from jaxrun.controller.supervisor.host_watches import HostWatches
from jaxrun.controller.supervisor.launch_process import LaunchProcess, abort_job
from jaxrun.controller.supervisor.next_attempt_hosts import plan_new_agents, plan_next_attempt, usable_agents
from jaxrun.controller.supervisor.quarantine_decision import QuarantineFile
from jaxrun.controller.supervisor.remote_agents import JobAgents, LaunchedAgents, RemoteAgents
from jaxrun.controller.supervisor.supervision import Supervision
from jaxrun.controller.supervisor.transport import ConnectedAgent, Transport
from jaxrun.errors import JaxrunError
from jaxrun.node.agent.agent import LISTENER
from jaxrun.node.channel.acceptor import Acceptor
from jaxrun.node.channel.event_loop import EventLoop
from jaxrun.node.channel.host_addresses import HostAddress, describe_addresses
from jaxrun.node.channel.listener import Listener, listen_on_tcp
from jaxrun.node.channel.rendezvous import RendezvousFile
from jaxrun.node.channel.silence import SilenceLimit, reserve_port
from jaxrun.protocol import auth
from jaxrun.protocol.addresses import format_addresses
from jaxrun.protocol.agent_id import AgentId
from jaxrun.protocol.agent_messages import JobInfo
from jaxrun.protocol.auth import ServerHandshake
from jaxrun.protocol.hidden_fields import HidesFields
from jaxrun.protocol.job_record import JobRecord
from jaxrun.spec.job.layout import wanted_platforms
from jaxrun.spec.job.options import HOST_TIMEOUT_S
from jaxrun.spec.job.plan import Plan
from jaxrun.terminal import print_notice

if TYPE_CHECKING:
    from jaxrun.controller.supervisor.launcher_staging import Staged


class Endpoint(HidesFields, frozen=True):
    """Where agents connect, and what they must know.

    port:          0 for any
    rendezvous:    the file that leads them here, in a job that someone else started (`jaxrun attach`)
    on_listening:  called once they can connect, after the last fork of the launcher: it may start a thread
    """

    hidden = frozenset({"token"})

    token: str
    port: int = 0
    rendezvous: RendezvousFile | None = None
    on_listening: Callable[[], None] = lambda: None


class HeadPort(HidesFields, frozen=True):
    """The port at which the head listens.

    description:  its addresses, as text for people
    token:        the token for the agents that are started first
    closed_port:  a port at which nothing listens, for probes
    acceptor:     lets agents in that know the token
    transport:    the connections of agents that have come
    """

    hidden = frozenset({"token"})

    listener: Listener
    acceptor: Acceptor[ServerHandshake]
    description: str
    token: str
    rendezvous: RendezvousFile | None
    closed_port: socket.socket
    transport: Transport

    @classmethod
    def open(
        cls,
        loop: EventLoop,
        interface: str,
        offered: Sequence[HostAddress],
        endpoint: Endpoint | None = None,
        *,
        expected: int = 0,
    ) -> HeadPort:
        """Listen in the loop of the job; agents are offered these addresses. Raises UnavailableError if that fails.

        interface:  the --interface, the only one on which to listen; empty for all
        expected:   how many agents may come at the same time
        """
        endpoint = endpoint or Endpoint(auth.new_token())
        listener = listen_on_tcp(offered, endpoint.token, everywhere=not interface, port=endpoint.port)
        description, transport = describe_addresses(listener.addresses, offered), Transport(loop)
        acceptor = listener.accept(loop, LISTENER, transport.on_peer, transport.on_dropped, expected=expected)
        of_endpoint = (endpoint.token, endpoint.rendezvous)
        return cls(listener, acceptor, description, *of_endpoint, reserve_port(), transport)

    def renew(self, token: str) -> None:
        """Let in agents that know this token, and no longer those that know the one before."""
        self.listener.renew(token)
        self.acceptor.drop_all("came for an earlier attempt")

    def remove_rendezvous(self) -> None:
        """Remove the file that leads agents here, if there is one; while this port is open, no other head has it."""
        if self.rendezvous is not None:
            self.rendezvous.remove(self.listener.addresses)

    def close(self) -> None:
        self.remove_rendezvous()
        self.transport.close()
        self.acceptor.close()
        self.listener.close()
        self.closed_port.close()


class RemoteJob:
    """Runs the attempts of a job whose agents a launch command starts, one for each rank or for each host."""

    def __init__(
        self,
        shared: Supervision,
        plan: Plan,
        port: HeadPort,
        staged: Staged | None = None,
        connected: Sequence[ConnectedAgent] = (),
    ) -> None:
        """`connected` are agents that have come already."""
        self._shared = shared
        self._connected = connected
        self._port = port
        self._by_hand = plan.is_started_by_hand
        self._user_env = {**shared.environ, **plan.job.env}
        addresses = format_addresses(port.listener.addresses)
        self._commands = EngineCommands(shared.environ, shared.directory.path, addresses, port.token)
        self._roster = Roster(waits=plan.job.host_wait > 0)
        info = self._make_job_info(plan, staged)
        limit = SilenceLimit.of_head(info.host_timeout, len(plan.placement.agents))
        self._watches = HostWatches(port.transport, limit, shared.clock)
        self._job_agents = JobAgents(port.transport, self._watches, self._roster, info, self._commands, staged)
        self._quarantine = QuarantineFile(plan.job.quarantine)
        self._agents: RemoteAgents | None = None  # of the latest attempt, unless their launch command must end
        self._agents_stay = False  # for the next attempt
        self._retired: list[LaunchProcess] = []  # of earlier attempts; they have been told to end

    @property
    def listen_addresses(self) -> str:
        return self._port.description

    def run_attempt(self, plan: Plan, record: JobRecord) -> JobOutcome:
        """Serve the agents until the head decides that the attempt is over: existing ones, or others, started now.

        All of them are started anew where one that is needed is gone, or what has started them.

        record:  what is known of the job as the attempt begins
        """
        if self._agents is not None and not self._agents_stay:
            self._retire(self._agents)
        elif self._agents is None and plan.job.verbose:
            self._shared.output.print_line(f"jaxrun: listening at {self._port.description}")
        self._release_ended()
        called = self._roster.begin(plan, anew=not self._agents_stay)
        directory = "" if self._by_hand else os.getcwd()
        addresses = self.listen_addresses
        registry = make_registry(plan, self._shared, self._roster, directory=directory, listen_addresses=addresses)
        made = make_head(plan, self._shared, record, registry)
        head = AttemptHead(self._shared, made, plan.attempt, preload=plan.job.preload)
        try:
            launched = self._agents.launched if self._agents is not None else self._run_launch_command(plan)
        except JaxrunError as error:
            head.loop.close()
            return JobOutcome(Unavailable(str(error)), head.hosts)
        kept = record if plan.head_may_return else None
        agents = RemoteAgents(self._shared, head, plan, self._job_agents, launched, registry, kept)
        agents.execute(called)
        agents.admit(self._connected)
        if self._agents is None and launched.launch.command.agents_stay:
            self._start_spares(plan, agents)
        self._agents, self._connected = agents, ()
        outcome = agents.complete(AttemptLoop(self._shared, head, agents).run())
        self._retired += agents.end_search()
        if not isinstance(outcome.end, EndedBySignal):  # a second Ctrl-C waits for no host
            for line in self._quarantine.update(self.placed(plan), self._roster, outcome):
                self._shared.output.print_line(f"jaxrun: {line}")
        return outcome

    def placed(self, plan: Plan) -> Plan:
        placement = self._roster.placement
        if placement is plan.placement:
            return plan
        workers = tuple(replace(worker, host=placement.hosts[worker.rank]) for worker in plan.workers)
        return replace(plan, workers=workers, placement=placement)

    def next_plan(self, plan: Plan, outcome: JobOutcome) -> Plan | Stop:
        """Return the plan of another attempt, without lost hosts if others can replace them."""
        agents, roster, environ = self._agents, self._roster, self._shared.environ
        if agents is None or agents.launched.launch.reap():
            roster.end_launch()
        found = agents.found if agents is not None else ()
        following = plan_next_attempt(plan, roster, outcome, found, environ)
        if isinstance(following, Stop):
            return following
        is_served = following.placement.is_served_by(usable_agents(plan, roster, outcome))
        same_command = following.launch_command == plan.launch_command
        self._agents_stay = agents is not None and same_command and is_served
        try:
            return following if self._agents_stay else plan_new_agents(following, environ)
        except JaxrunError as error:
            return Stop(f"its agents cannot be started again: {error}")

    def stop(self, exit_code: int, headline: str = "", culprits: Collection[int] = ()) -> None:
        """Dismiss the agents: they end with 0 or, if someone else started them, with `exit_code`.

        headline:  why the job failed; empty if it did not
        culprits:  the ranks that caused the failure; an mpirun or srun that started all processes names the one that
                   ends with a status first, so that no other agent does

        This is the last action of a job: mpirun may kill all processes, including this one, once the first has ended.
        """
        self._port.remove_rendezvous()
        launches, agents = self._retired, self._agents
        if agents is not None:
            launch = agents.launched.launch
            blamed = culprits if launch.command.engine.command else ()
            agents.shut_down(exit_code if self._by_hand else 0, headline=headline, blamed=blamed)
            launch.stop(self._shared.loop, hurry=exit_code != 0 or launch.has_silent)
            agents.close()
            self._retire_spares(agents)
            launches = [*self._retired, launch]
        for retired in self._retired:
            retired.stop(self._shared.loop, hurry=True)
        for launch in launches:
            print_notice(launch.close())
        self._watches.close()
        self._port.close()
        if agents is not None and agents.launched.launch.command.attached and agents.silent_ranks - {0}:
            print_notice(abort_job(agents.launched.launch.command, exit_code, self._shared.environ))

    def _make_job_info(self, plan: Plan, staged: Staged | None) -> JobInfo:
        job = plan.job
        return JobInfo(
            plan.job_id,
            self._shared.directory.name,
            wanted_platforms(job, self._user_env),
            job.max_restarts > 0,
            job.probe_hosts,
            staged.stage if staged is not None else None,
            relevant_variables(job.env),
            job.host_timeout or HOST_TIMEOUT_S,
            self._port.closed_port.getsockname()[1],
            host_check=plan.host_check,
        )

    def _run_launch_command(self, plan: Plan) -> LaunchedAgents:
        """Run the launch command. Raises UnavailableError."""
        port, commands = self._port, self._commands
        if port.rendezvous is not None:
            port.rendezvous.write(commands.token, commands.addresses)
        return LaunchedAgents(commands.start_agents(plan, self._shared.guard))

    def _start_spares(self, plan: Plan, agents: RemoteAgents) -> None:
        """Start the agents that have a command of their own."""
        command, launched = agents.launched.launch.command, agents.launched
        for agent in map(AgentId, range(command.size, len(command.agent_hosts))):
            try:
                launch = self._commands.start_spare(plan, self._shared.guard, agent, command.agent_hosts[agent])
            except JaxrunError as error:
                agents.lose_spare(agent, str(error))
            else:
                launched.spares[agent] = launch

    def _retire(self, agents: RemoteAgents) -> None:
        """Make the agents and the launch command end, without waiting: they may be stuck with a lost host."""
        launch, commands = agents.launched.launch, self._commands
        self._shared.output.print_line(f"jaxrun: starting {launch.title} again", dim=True)
        agents.shut_down(0, job_goes_on=True)
        agents.close(wait=False)
        launch.ask_to_end()
        self._retired.append(launch)
        self._agents = None
        self._retire_spares(agents)
        commands.token = auth.new_token()  # a late agent of an earlier attempt cannot get in
        self._port.renew(commands.token)

    def _release_ended(self) -> None:
        """Close the commands that have ended: retired ones, and ones that had restarted an agent.

        Otherwise each restart would leave open files until the end of the job.
        """
        restarted = self._agents.launched.restarted if self._agents is not None else []
        for launches in (self._retired, restarted):
            for launch in [one for one in launches if one.reap()]:
                launches.remove(launch)
                if text := launch.close():
                    self._shared.output.print_line(f"jaxrun: {text}")

    def _retire_spares(self, agents: RemoteAgents) -> None:
        for launch in (*agents.launched.spares.values(), *agents.launched.restarted):
            launch.ask_to_end()
            self._retired.append(launch)
