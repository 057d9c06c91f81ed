"""Agents on other hosts: runs the command that starts them, mpirun or srun, and serves those that connect."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxrun import RUNTIME, __version__
from jaxrun.channel.interfaces import Interface, describe_addresses
from jaxrun.channel.listener import listen_on_tcp
from jaxrun.channel.rendezvous import RendezvousFile
from jaxrun.errors import UnavailableError
from jaxrun.head.actions import EndReason, JobOutcome
from jaxrun.head.agent_registry import AgentRegistry, JobSpec
from jaxrun.job.layout import wanted_platforms
from jaxrun.job.plan import Plan
from jaxrun.protocol import auth
from jaxrun.protocol.addresses import format_addresses
from jaxrun.protocol.agent_messages import JobInfo
from jaxrun.protocol.env import AgentEnv
from jaxrun.protocol.names import STDIN_NONE
from jaxrun.rundir.rundir import RunDir
from jaxrun.supervisor.launch_process import LaunchProcess
from jaxrun.supervisor.server import AgentServer

if TYPE_CHECKING:
    from jaxrun.supervisor.supervise import JobContext


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
    """Agents of supervise.py: one for each worker, started by the launch command of the plan."""

    def __init__(
        self,
        plan: Plan,
        environ: Mapping[str, str],
        directory: RunDir,
        interfaces: Sequence[Interface],
        endpoint: Endpoint | None = None,
    ) -> None:
        """Listen at `interfaces`. UnavailableError where that cannot be."""
        self._plan = plan
        self._environ = environ
        self._directory = directory
        self._endpoint = endpoint or Endpoint(auth.new_token())
        self._server: AgentServer | None = None
        user_env = {**environ, **plan.job.env}
        self._job_info = JobInfo(plan.job_id, directory.name, wanted_platforms(plan.job, user_env))
        self._listener = listen_on_tcp(
            interfaces, self._endpoint.token, everywhere=not plan.job.interface, port=self._endpoint.port
        )
        self.listen_addresses = describe_addresses(self._listener.addresses, interfaces)
        self.registry = AgentRegistry(_job_spec(plan, user_env, directory, self.listen_addresses))

    @property
    def _addresses(self) -> str:
        return format_addresses(self._listener.addresses)

    def run(self, context: JobContext) -> JobOutcome:
        """Start the agents and serve them until the head says that the job is over."""
        if self._plan.job.verbose:
            context.output.print_line(f"jaxrun: listening at {self.listen_addresses}")
        try:
            if self._endpoint.rendezvous is not None:
                self._endpoint.rendezvous.write(self._endpoint.token, self._addresses)
            launch = self._start_launch_process()
        except UnavailableError as error:
            return JobOutcome(EndReason.UNAVAILABLE, text=str(error))
        context.guard.add(launch.pid)
        assert self._plan.launch_command is not None
        attached = bool(self._plan.launch_command.attached_to)
        self._server = AgentServer(
            context, self._listener, launch, self._job_info, verbose=self._plan.job.verbose, attached=attached
        )
        return self._server.run()

    def stop(self, exit_code: int) -> None:
        """Dismiss the agents: they end with 0, or, where somebody else started them, with `exit_code`.

        It is the last that a job does, as mpirun may kill all processes, this one too, once the first has ended.
        """
        rendezvous = self._endpoint.rendezvous
        if rendezvous is not None:
            rendezvous.remove()
        if self._server is not None:
            self._server.shut_down_agents(exit_code if _is_started_by_hand(self._plan) else 0)
            self._server.close(hurry=exit_code != 0)
        self._listener.close()

    def _start_launch_process(self) -> LaunchProcess:
        """Run the launch command. UnavailableError where it cannot be started."""
        plan, command = self._plan, self._plan.launch_command
        assert command is not None
        agent_env = AgentEnv(
            plan.job_id, self._addresses, self._endpoint.token, command.engine, plan.job.init_timeout
        ).to_env()
        env = {**plan.base_env(self._environ), **command.set_env, **agent_env}
        for name in command.unset_env:
            env.pop(name, None)
        try:
            has_stdin = plan.job.stdin != STDIN_NONE
            return LaunchProcess(command.title, command.argv, env, self._directory.path, has_stdin=has_stdin)
        except OSError as error:
            raise UnavailableError(f"{command.argv[0]} could not be started: {error.strerror}") from None


def _is_started_by_hand(plan: Plan) -> bool:
    """Whether this process has started only some of the agents."""
    command = plan.launch_command
    return plan.job.host_rank is not None or bool(command and command.attached_to)


def _job_spec(plan: Plan, user_env: Mapping[str, str], directory: RunDir, listen_addresses: str) -> JobSpec:
    return JobSpec(
        job=plan.job,
        job_id=plan.job_id,
        size=len(plan.workers),
        version=__version__,
        directory="" if _is_started_by_hand(plan) else os.getcwd(),
        program=plan.argv[plan.argv.index(RUNTIME) + 1 :],
        user_env=user_env,
        run_dir=directory.name,
        listen_addresses=listen_addresses,
    )
