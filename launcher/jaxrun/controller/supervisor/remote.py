"""Agents on other hosts: runs the command that starts them, mpirun or srun, and serves those that connect."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from jaxrun.analysis.diagnosis.fabric import relevant_variables
from jaxrun.analysis.diagnosis.outcome import EndReason, JobOutcome
from jaxrun.analysis.verdict.restarts import Stop
from jaxrun.controller.head.agent_registry import AgentRegistry
from jaxrun.controller.head.worker_assignment import Told
from jaxrun.controller.supervisor.attempt_context import AttemptContext
from jaxrun.controller.supervisor.engine_commands import EngineCommands
from jaxrun.controller.supervisor.executor import Executor
from jaxrun.controller.supervisor.host_search import HostSearch
from jaxrun.controller.supervisor.launch_process import LaunchProcess, abort_job
from jaxrun.controller.supervisor.next_attempt_hosts import AgentsLeft, plan_new_agents, plan_next_attempt
from jaxrun.controller.supervisor.quarantine_decision import HostsHeard, decide_quarantine
from jaxrun.controller.supervisor.server import AgentServer
from jaxrun.controller.supervisor.spare_agents import SpareAgents
from jaxrun.errors import JaxrunError
from jaxrun.node.channel.host_addresses import HostAddress, describe_addresses
from jaxrun.node.channel.listener import listen_on_tcp
from jaxrun.node.channel.rendezvous import RendezvousFile
from jaxrun.node.channel.silence import reserve_port
from jaxrun.protocol import auth
from jaxrun.protocol.addresses import format_addresses
from jaxrun.protocol.agent_id import AgentId
from jaxrun.protocol.agent_messages import JobInfo
from jaxrun.records.output.output import Output
from jaxrun.records.rundir.rundir import RunDir, attempt_directory
from jaxrun.spec.backends.quarantine import add_to_quarantine
from jaxrun.spec.job.layout import wanted_platforms
from jaxrun.spec.job.options import HOST_TIMEOUT_S
from jaxrun.spec.job.plan import Plan
from jaxrun.terminal import print_notice

if TYPE_CHECKING:
    from jaxrun.controller.supervisor.staging import Staged


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where agents connect and what they must know.

    port:          0 for any
    rendezvous:    the file that leads them here, in a job that somebody else started (`jaxrun attach`)
    on_listening:  is called once they can connect, after the last fork of the launcher: it may start a thread
    """

    token: str
    port: int = 0
    rendezvous: RendezvousFile | None = None
    on_listening: Callable[[], None] = lambda: None


class RemoteAgents:
    """Agents of attempts.py: started by the launch command of the plan, one for each rank or for each host."""

    def __init__(
        self,
        plan: Plan,
        environ: Mapping[str, str],
        directory: RunDir,
        offered: Sequence[HostAddress],
        endpoint: Endpoint | None = None,
        staged: Staged | None = None,
    ) -> None:
        """Listen; `offered` to agents are these addresses. UnavailableError where that cannot be."""
        self._plan = plan
        self._environ = environ
        self._directory = directory
        self._endpoint = endpoint or Endpoint(auth.new_token())
        self._server: AgentServer | None = None
        self._launch: LaunchProcess | None = None
        self._registry: AgentRegistry | None = None
        self._spares: SpareAgents | None = None
        self._quarantined: set[str] = set()
        self._spared: set[str] = set()  # the lost hosts of which it is said that they are not added to the quarantine
        self._agents_stay = False  # in the next attempt
        self._found: tuple[str, ...] = ()  # hosts that the last attempt lacked, and that were there
        self._retired: list[LaunchProcess] = []  # of earlier attempts; they have been told to end
        self._user_env = {**environ, **plan.job.env}
        platforms, restarts = wanted_platforms(plan.job, self._user_env), plan.job.max_restarts > 0
        self._staged, stage = staged, staged.stage if staged is not None else None
        given = relevant_variables(plan.job.env)
        self._reserved = reserve_port()
        timeout = plan.job.host_timeout or HOST_TIMEOUT_S
        port, probe = self._reserved.getsockname()[1], plan.job.probe_hosts
        info = JobInfo(plan.job_id, directory.name, platforms, restarts, probe, stage, given, timeout, port)
        self._job_info = replace(info, host_check=plan.host_check)
        everywhere, port = not plan.job.interface, self._endpoint.port
        self._listener = listen_on_tcp(offered, self._endpoint.token, everywhere=everywhere, port=port)
        self.listen_addresses = describe_addresses(self._listener.addresses, offered)
        addresses = format_addresses(self._listener.addresses)
        self._commands = EngineCommands(environ, directory.path, addresses, self._endpoint.token)
        self._endpoint.on_listening()

    def make_registry(self, plan: Plan) -> AgentRegistry:
        log_dir = str(attempt_directory(Path(self._directory.name), plan.attempt)) if self._directory.path else ""
        self._registry = AgentRegistry(
            plan,
            Told(self._user_env, self._directory.name, log_dir),
            directory="" if plan.is_started_by_hand else os.getcwd(),
            listen_addresses=self.listen_addresses,
        )
        return self._registry

    def next_plan(self, plan: Plan, outcome: JobOutcome) -> Plan | Stop:
        """The plan of another attempt, without the hosts that were lost where others can take their places."""
        left = self._agents_left()
        following = plan_next_attempt(plan, outcome, left, self._environ)
        if isinstance(following, Stop):
            return following
        self._agents_stay = following.launch_command == self._plan.launch_command and left.serve(following)
        try:
            return following if self._agents_stay else plan_new_agents(following, self._environ)
        except JaxrunError as error:
            return Stop(f"its agents cannot be started again: {error}")

    def run(self, context: AttemptContext) -> JobOutcome:
        """Serve the agents until the head says that the attempt is over: those that are there, or others, started now.

        All of them are started anew where one that is needed is gone, or what has started them.
        """
        assert self._registry is not None
        plan = self._plan = context.plan
        earlier = self._server.connections if self._server is not None and self._agents_stay else None
        try:
            if self._server is not None and earlier is not None:
                self._server.close_loop()
            else:
                self._start_launch_command(context)
        except JaxrunError as error:
            return JobOutcome(EndReason.UNAVAILABLE, text=str(error))
        assert self._launch is not None and self._plan.launch_command is not None
        if self._spares is None or earlier is None:
            self._spares = SpareAgents(self._plan.launch_command.agent_hosts, self._registry)
        self._spares.registry = self._registry
        executor = Executor(context)
        search = None if plan.is_started_by_hand else HostSearch(executor, self._environ, self._commands)
        self._server = AgentServer(
            executor, self._listener, self._launch, self._job_info, self._spares, search, earlier, self._staged
        )
        if earlier is None and self._plan.launch_command.agents_stay:
            apart = [AgentId(number) for number in range(self._plan.launch_command.size, self._plan.agent_count)]
            self._spares.start(apart, partial(self._commands.start_spare, self._plan, context.guard))
        outcome = executor.run(self._server)
        if search is not None:
            self._retired += search.close()
        self._found = search.found if search is not None else ()
        if outcome.reason is not EndReason.INTERRUPTED:  # a second Ctrl-C waits for no host
            self._quarantine(outcome, context.output)
        return outcome

    def stop(self, exit_code: int) -> None:
        """Dismiss the agents: they end with 0, or, where somebody else started them, with `exit_code`.

        It is the last that a job does, as mpirun may kill all processes, this one too, once the first has ended.
        """
        rendezvous = self._endpoint.rendezvous
        if rendezvous is not None:
            rendezvous.remove()
        server, command = self._server, self._plan.launch_command
        if server is not None:
            server.shut_down_agents(exit_code if self._plan.is_started_by_hand else 0)
        if self._launch is not None:
            self._launch.stop(hurry=exit_code != 0 or self._launch.has_silent)
        if server is not None:
            server.close()
        self._retire_spares()
        for launch in self._retired:
            launch.stop(hurry=True)
        for launch in filter(None, (*self._retired, self._launch)):
            print_notice(launch.close())
        self._listener.close()
        self._reserved.close()
        hangs = server is not None and bool(server.silent_ranks - {0})
        if command is not None and command.attached_to and hangs:
            print_notice(abort_job(command, exit_code, self._environ))

    def _agents_left(self) -> AgentsLeft:
        command, server = self._plan.launch_command, self._server
        stay = command is not None and command.agents_stay and server is not None and not server.uses_mpi
        runs = self._launch is not None and not self._launch.reap()
        usable = server.usable_agents if server is not None and (runs or stay) else set[AgentId]()
        hosts = command.agent_hosts if command is not None and (stay or not command.agents_stay) else ()
        return AgentsLeft(
            usable,
            {agent: host for number, host in enumerate(hosts) if (agent := AgentId(number)) in usable},
            self._registry.reported_ranks if self._registry is not None else (),
            self._spares.lost_hosts if self._spares is not None else (),
            self._found,
        )

    def _quarantine(self, outcome: JobOutcome, output: Output) -> None:
        """Write the hosts that are to be avoided to the file of --quarantine."""
        assert self._spares is not None
        path, lost_spares = self._plan.job.quarantine, self._spares.lost_hosts
        decided = decide_quarantine(self._plan.host_of, outcome, lost_spares, self._heard())
        found = {host: why for host, why in decided.hosts.items() if host not in self._quarantined}
        self._quarantined.update(found)
        if path is None:
            return
        spared = {host: why for host, why in decided.spared.items() if host not in self._spared}
        self._spared.update(spared)
        for why in dict.fromkeys(spared.values()):
            hosts = ", ".join(host for host, each in spared.items() if each == why)
            output.print_line(f"jaxrun: {hosts} not added to {path} (--quarantine): {why}")
        if not found:
            return
        text = f"{', '.join(found)} added to {path} (--quarantine); to use a host again, delete its line there"
        try:
            add_to_quarantine(path, found)
        except OSError as error:
            text = f"{', '.join(found)} could not be added to {path} (--quarantine): {error.strerror}"
        output.print_line(f"jaxrun: {text}")

    def _heard(self) -> HostsHeard:
        """What was heard in this attempt, and from which hosts."""
        assert self._registry is not None and self._server is not None and self._spares is not None
        hosts = self._plan.host_of
        agents = self._plan.agents
        reports = {**self._spares.reported}
        reports |= {hosts[agents[agent][0]]: report for agent, report in self._registry.reports.items()}
        silent = {agent: agents.get(agent, ()) for agent in self._server.silent_agents}
        return HostsHeard(
            reported=[*reports],
            # Both ends of the connection of an agent on the launcher's own host have one address.
            far=[host for host, one in reports.items() if one.address != one.head_address],
            silent=[hosts[ranks[0]] if ranks else self._spares.host_of(agent) for agent, ranks in silent.items()],
        )

    def _start_launch_command(self, context: AttemptContext) -> None:
        """Run the launch command, in place of one that has run before. Raises UnavailableError."""
        if self._launch is not None:
            context.output.print_line(f"jaxrun: starting {self._launch.title} again", dim=True)
            self._retire(self._launch)
            self._commands.token = auth.new_token()  # an agent of before that is late finds no way in
            self._listener.renew(self._commands.token)
        elif self._plan.job.verbose:
            context.output.print_line(f"jaxrun: listening at {self.listen_addresses}")
        if self._endpoint.rendezvous is not None:
            self._endpoint.rendezvous.write(self._commands.token, self._commands.addresses)
        self._launch = self._commands.start_agents(self._plan, context.guard)

    def _retire(self, launch: LaunchProcess) -> None:
        """Have the agents and the launch command end, and wait for neither: they may be stuck with a lost host."""
        if self._server is not None:
            self._server.shut_down_agents(0, job_goes_on=True)
            self._server.close(wait=False)
            self._server = None
        launch.ask_to_end()
        self._retired.append(launch)
        self._launch = None
        self._retire_spares()

    def _retire_spares(self) -> None:
        spares = list(self._spares.launches.values()) if self._spares is not None else []
        for launch in spares:
            launch.ask_to_end()
        self._retired += spares
