"""Agents on other hosts: runs the command that starts them, mpirun or srun, and serves those that connect."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from jaxrun import __version__
from jaxrun.analysis.diagnosis.outcome import EndReason, JobOutcome
from jaxrun.analysis.diagnosis.root_cause import find_culprits
from jaxrun.analysis.fabric.checks import relevant_variables
from jaxrun.analysis.verdict.restarts import Stop
from jaxrun.controller.head.agent_registry import AgentRegistry
from jaxrun.controller.supervisor.agent_receiver import SpareAgents
from jaxrun.controller.supervisor.executor import Executor
from jaxrun.controller.supervisor.host_search import HostSearch
from jaxrun.controller.supervisor.launch_process import LaunchProcess, abort_job
from jaxrun.controller.supervisor.server import AgentServer
from jaxrun.errors import JaxrunError, UnavailableError, UsageError
from jaxrun.node.agent.agent import LISTENER
from jaxrun.node.channel.host_addresses import HostAddress, describe_addresses
from jaxrun.node.channel.listener import listen_on_tcp
from jaxrun.node.channel.rendezvous import RendezvousFile
from jaxrun.protocol import auth
from jaxrun.protocol.addresses import format_addresses
from jaxrun.protocol.agent_messages import JobInfo
from jaxrun.protocol.env import AgentEnv
from jaxrun.protocol.names import RESERVED_PREFIX
from jaxrun.protocol.settings import STDIN_NONE
from jaxrun.records.rundir.rundir import RunDir, attempt_directory
from jaxrun.spec.backends.by_hand import replan_by_hand
from jaxrun.spec.backends.quarantine import add_to_quarantine, excluded_hosts
from jaxrun.spec.backends.remote_plan import (
    agents_by_rank,
    assign_agents,
    command_on,
    describe_size,
    replace_hosts,
    replan,
    take_back,
)
from jaxrun.spec.job.layout import wanted_platforms
from jaxrun.spec.job.plan import LaunchCommand, Plan
from jaxrun.terminal import print_notice

if TYPE_CHECKING:
    from jaxrun.controller.supervisor.attempts import AttemptContext
    from jaxrun.controller.supervisor.staging import Staged


_LOOK_TIMEOUT_S = 20.0  # for one look whether a host is there again; ssh tries a dead one for minutes


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where agents connect and what they must know.

    port:        0 for any
    rendezvous:  the file that leads them here, in a job that somebody else started (`jaxrun attach`)
    """

    token: str
    port: int = 0
    rendezvous: RendezvousFile | None = None


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
        self._token = self._endpoint.token
        self._server: AgentServer | None = None
        self._launch: LaunchProcess | None = None
        self._registry: AgentRegistry | None = None
        self._spares: SpareAgents | None = None
        self._quarantined: set[str] = set()
        self._found: tuple[str, ...] = ()  # hosts that the last attempt lacked, and that were there
        self._search_commands: dict[str, LaunchCommand] = {}  # by host; to make one takes a while
        self._retired: list[LaunchProcess] = []  # of earlier attempts; they have been told to end
        self._user_env = {**environ, **plan.job.env}
        platforms, restarts = wanted_platforms(plan.job, self._user_env), plan.job.max_restarts > 0
        self._staged, stage, everywhere = staged, None, not plan.job.interface
        if staged is not None:
            self._stage_listener = listen_on_tcp(offered, auth.peer_token(self._token), everywhere=everywhere)
            stage = replace(staged.stage, port=self._stage_listener.sockets[0].getsockname()[1])
        given = relevant_variables(plan.job.env)
        self._job_info = JobInfo(plan.job_id, directory.name, platforms, restarts, plan.job.probe_hosts, stage, given)
        self._listener = listen_on_tcp(offered, self._token, everywhere=everywhere, port=self._endpoint.port)
        self.listen_addresses = describe_addresses(self._listener.addresses, offered)

    def make_registry(self, plan: Plan) -> AgentRegistry:
        """Where the agents of this attempt report."""
        log_dir = str(attempt_directory(Path(self._directory.name), plan.attempt)) if self._directory.path else ""
        self._registry = AgentRegistry(
            plan,
            self._user_env,
            version=__version__,
            directory="" if plan.is_started_by_hand else os.getcwd(),
            run_dir=self._directory.name,
            log_dir=log_dir,
            listen_addresses=self.listen_addresses,
            stage=self._job_info.stage,
        )
        return self._registry

    @property
    def _addresses(self) -> str:
        return format_addresses(self._listener.addresses)

    def next_plan(self, plan: Plan, outcome: JobOutcome) -> Plan | Stop:
        """The plan of another attempt, without the hosts that were lost where others can take their places."""
        if plan.is_started_by_hand:
            return self._next_by_hand(plan, outcome)
        placement, spares = tuple(worker.host for worker in plan.workers), self._usable_spares(plan)
        lost = self._lost_hosts(plan, outcome)
        choice = replace_hosts(placement, spares, lost, plan.job.min_hosts, plan.whole)
        choice = take_back(choice, [host for host in self._found if host not in lost])
        if failed := {plan.host_of[rank] for rank in outcome.failed_checks} - {*choice.left_out}:
            why = f"no spare host is left for {', '.join(sorted(failed))}"
            return Stop(why if plan.job.spares or plan.job.min_hosts else "")
        same_hosts = choice.placement == placement and spares == plan.spare_hosts
        if same_hosts and (self._serves(plan) or _has_own_agents(plan)):
            return plan
        try:
            made = replan(plan, choice.placement, choice.spares, self._environ)
        except JaxrunError as error:
            if outcome.reason is EndReason.GROWN and self._found:  # no reason to end
                self._found = ()
                return self.next_plan(plan, outcome)
            return Stop(f"the job cannot be placed on other hosts: {error}")
        agents = assign_agents(choice.placement, self._agents_left(), choice.spares)
        if agents is not None:
            made = replace(made, launch_command=plan.launch_command, agents=agents)
        return replace(
            made,
            left_out=tuple(host for host in (*plan.left_out, *choice.left_out) if host not in choice.placement),
            host_notes=(*plan.host_notes, *choice.notes),
            whole=choice.whole,
        )

    def _next_by_hand(self, plan: Plan, outcome: JobOutcome) -> Plan | Stop:
        """The plan of another attempt with the agents that are there: all that it had, or with --min-hosts others."""
        assert self._server is not None
        may_shrink = plan.job.min_hosts is not None and self._serves(plan, 0)
        failed = {number for number, ranks in plan.agents.items() if outcome.failed_checks.keys() & set(ranks)}
        made = replan_by_hand(plan, self._server.usable_agents - failed) if may_shrink else plan
        if made is None or not self._serves(made) or (failed and made is plan):
            return Stop("" if failed else "agents are gone that jaxrun did not start")
        if made.agents == plan.agents:
            return plan
        lost = [host for host in plan.hosts if host not in made.hosts]
        back = [host for host in made.hosts if host not in plan.hosts]
        news = [*(f"{host} is left out" for host in lost), *(f"{host} is taken back" for host in back)]
        again = "; the same command, typed there again, takes it back" if lost else ""
        note = f"{', '.join(news)}: {describe_size([worker.host for worker in made.workers])}{again}"
        left_out = tuple(host for host in (*plan.left_out, *lost) if host not in back)
        return replace(made, left_out=left_out, host_notes=(*plan.host_notes, note))

    def run(self, context: AttemptContext) -> JobOutcome:
        """Serve the agents until the head says that the attempt is over: those that are there, or others, started now.

        All of them are started anew where one that is needed is gone, or what has started them.
        """
        assert self._registry is not None
        plan = context.plan
        moved = plan.launch_command != self._plan.launch_command
        earlier = self._server.connections if self._server is not None and not moved and self._serves(plan) else None
        try:
            if self._server is not None and earlier is not None:
                self._plan = plan
                self._server.close_loop()
            else:
                self._plan = self._on_own_agents(plan)
                self._registry.plan = self._plan
                self._start_launch_command(context)
        except JaxrunError as error:
            return JobOutcome(EndReason.UNAVAILABLE, text=str(error))
        assert self._launch is not None and self._plan.launch_command is not None
        if self._spares is None or earlier is None:
            self._spares = SpareAgents(self._plan.launch_command.agent_hosts, self._registry)
        self._spares.begin_attempt(self._registry)
        self._found, self._search_commands = (), {}
        executor = Executor(replace(context, plan=self._plan))
        if self._staged is not None:
            self._stage_listener.attach(executor.loop, LISTENER, self._staged.give)
        self._server = AgentServer(
            executor,
            self._listener,
            self._launch,
            self._job_info,
            verbose=self._plan.job.verbose,
            attached=bool(self._plan.launch_command.attached_to),
            spares=self._spares,
            find_hosts=None if plan.is_started_by_hand else self._find_hosts,
            earlier=earlier,
        )
        outcome = executor.run(self._server)
        self._retired += self._server.search.close()
        self._found = self._server.search.found
        if outcome.reason is not EndReason.INTERRUPTED:  # a second Ctrl-C waits for no host
            self._quarantine(self._plan, outcome, context)
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
        for launch in self._retired:
            launch.stop(hurry=True)
        for launch in filter(None, (*self._retired, self._launch)):
            print_notice(launch.close())
        self._listener.close()
        if self._staged is not None:
            self._stage_listener.close()
        hangs = server is not None and bool(server.silent_ranks - {0})
        if command is not None and command.attached_to and hangs:
            print_notice(abort_job(command.engine, exit_code, self._environ))

    def _lost_hosts(self, plan: Plan, outcome: JobOutcome) -> set[str]:
        """The hosts that cannot be used: lost by silence or otherwise, or without an agent that has reported."""
        culprits = {worker.rank for worker in find_culprits(outcome.workers)} if outcome.workers else set()
        lost = {worker.rank for worker in outcome.workers if worker.lost_reason and worker.rank in culprits}
        lost.update(outcome.unanswered, outcome.failed_checks)
        if outcome.reason is EndReason.UNAVAILABLE and self._registry is not None and self._registry.reports:
            lost.update(rank for rank in plan.host_of if rank not in self._registry.reports)
        return {host for rank, host in plan.host_of.items() if rank in lost}

    def _quarantine(self, plan: Plan, outcome: JobOutcome, context: AttemptContext) -> None:
        """Write the hosts that were lost, or have failed --host-check, to the file of --quarantine."""
        path, hosts, found = plan.job.quarantine, plan.host_of, dict[str, str]()
        if self._spares is not None:
            found |= dict.fromkeys(self._spares.lost_hosts, "lost while it waited as a spare host")
        lost = [worker for worker in find_culprits(outcome.workers) if worker.lost_reason]  # no victims of mpirun's end
        found |= {hosts[worker.rank]: f"lost: {worker.lost_reason}" for worker in lost}
        found |= {hosts[rank]: f"failed --host-check: {why}" for rank, why in outcome.failed_checks.items()}
        found = {host: why for host, why in found.items() if host not in self._quarantined}
        self._quarantined.update(found)
        if path is None or not found:
            return
        text = f"{', '.join(found)} added to {path} (--quarantine); to use a host again, delete its line there"
        try:
            add_to_quarantine(path, found)
        except OSError as error:
            text = f"{', '.join(found)} could not be added to {path} (--quarantine): {error.strerror}"
        context.output.print_line(f"jaxrun: {text}")

    def _find_hosts(self, search: HostSearch) -> None:
        """Look for the hosts that were lost, but those in quarantine, and with --host-check that fail it."""
        plan, check = self._plan, [sys.executable, "-c", "import jaxrun"]
        if plan.job.host_check:
            check = ["/bin/sh", "-c", plan.job.host_check]

        def start(host: str) -> LaunchProcess | None:
            told = f"{RESERVED_PREFIX}HOST={host}", f"{RESERVED_PREFIX}ATTEMPT={plan.attempt + 1}"
            words = ["/usr/bin/env", *told, *check]
            commands = self._search_commands
            try:
                commands[host] = commands.get(host) or command_on(plan, host, words, self._environ)
                return self._run_launch_command(commands[host], auth.new_token(), log=False)  # which opens nothing
            except JaxrunError:
                return None

        try:
            excluded = excluded_hosts(plan.job)
        except UsageError:  # the file cannot be read now
            excluded = dict.fromkeys(plan.left_out, "")
        hosts = dict.fromkeys(host for host in plan.left_out if host not in (*plan.hosts, *excluded))
        search.begin(hosts, start, plan.job.init_timeout if plan.job.host_check else _LOOK_TIMEOUT_S)

    def _serves(self, plan: Plan, *agents: int) -> bool:
        """Whether the launch command runs, and these `agents` are there, or all that the ranks of this plan need."""
        if self._server is None or self._launch is None or self._launch.reap():
            return False
        needed = agents or tuple(number for number, ranks in plan.agents.items() if ranks)
        return self._server.usable_agents >= set(needed)

    def _agents_left(self) -> dict[int, str]:
        """The hosts of the agents that can go on without some others, by number."""
        command, server = self._plan.launch_command, self._server
        if command is None or server is None or self._launch is None or self._launch.reap():
            return {}
        usable = server.usable_agents
        return {number: host for number, host in enumerate(command.agent_hosts) if number in usable}

    def _usable_spares(self, plan: Plan) -> tuple[str, ...]:
        """The spare hosts that were not lost while they waited, first those whose agents are ready."""
        ready = set(self._agents_left().values())
        lost = self._spares.lost_hosts if self._spares is not None else ()
        there = [host for host in plan.spare_hosts if host not in lost]
        return tuple(sorted(there, key=lambda host: host not in ready))

    def _on_own_agents(self, plan: Plan) -> Plan:
        """The same plan for a launch command that is started now: each agent has the rank that is its number."""
        if _has_own_agents(plan):
            return plan
        return replan(plan, [worker.host for worker in plan.workers], plan.spare_hosts, self._environ)

    def _start_launch_command(self, context: AttemptContext) -> None:
        """Run the launch command, in place of one that has run before. Raises UnavailableError."""
        if self._launch is not None:
            context.output.print_line(f"jaxrun: starting {self._launch.title} again", dim=True)
            self._retire(self._launch)
            self._token = auth.new_token()  # an agent of before that is late finds no way in
            self._listener.renew(self._token)
            if self._staged is not None:
                self._stage_listener.renew(auth.peer_token(self._token))
        elif self._plan.job.verbose:
            context.output.print_line(f"jaxrun: listening at {self.listen_addresses}")
        if self._endpoint.rendezvous is not None:
            self._endpoint.rendezvous.write(self._token, self._addresses)
        assert self._plan.launch_command is not None
        self._launch = self._run_launch_command(self._plan.launch_command, self._token)
        context.guard.add(self._launch.pid)

    def _retire(self, launch: LaunchProcess) -> None:
        """Have the agents and the launch command end, and wait for neither: they may be stuck with a lost host."""
        if self._server is not None:
            self._server.shut_down_agents(0, job_goes_on=True)
            self._server.close(wait=False)
            self._server = None
        launch.ask_to_end()
        self._retired.append(launch)
        self._launch = None

    def _run_launch_command(self, command: LaunchCommand, token: str, *, log: bool = True) -> LaunchProcess:
        """Raises UnavailableError where it cannot be started."""
        plan = self._plan
        agent_env = AgentEnv(plan.job_id, self._addresses, token, command.engine, plan.job.init_timeout).to_env()
        env = {**plan.base_env(self._environ), **command.set_env, **agent_env}
        for name in command.unset_env:
            env.pop(name, None)
        try:
            has_stdin = log and plan.job.stdin != STDIN_NONE
            return LaunchProcess(command, env, self._directory.path if log else None, has_stdin=has_stdin)
        except OSError as error:
            raise UnavailableError(f"{command.argv[0]} could not be started: {error.strerror}") from None


def _has_own_agents(plan: Plan) -> bool:
    """Whether the agents have the ranks that the launch command of the plan starts them with."""
    return plan.is_started_by_hand or dict(plan.agents) == agents_by_rank(len(plan.workers), plan.agent_count)
