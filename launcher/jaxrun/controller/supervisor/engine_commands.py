"""Starts the commands of an engine that one job needs: that of all agents, those of spare hosts, those of a search."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from jaxrun.controller.supervisor.launch_process import LaunchProcess
from jaxrun.errors import UnavailableError
from jaxrun.node.agent.guard import Guard
from jaxrun.protocol import auth
from jaxrun.protocol.agent_id import AgentId
from jaxrun.protocol.env import AgentEnv
from jaxrun.protocol.settings import STDIN_NONE
from jaxrun.spec.backends.remote_plan import command_on
from jaxrun.spec.job.plan import AGENT_ARGV, LaunchCommand, Plan


class EngineCommands:
    """Those of one job.

    addresses:  at which its head listens
    token:      by which agents that are started now are known
    """

    def __init__(self, environ: Mapping[str, str], directory: Path | None, addresses: str, token: str) -> None:
        """`directory`: where the launch command's output is kept; None for nowhere."""
        self._environ = environ
        self._directory = directory
        self.addresses = addresses
        self.token = token

    def start_agents(self, plan: Plan, guard: Guard) -> LaunchProcess:
        """Run the launch command of the plan. Raises UnavailableError where it cannot be started."""
        assert plan.launch_command is not None
        return self._start_guarded(plan, plan.launch_command, guard)

    def start_spare(self, plan: Plan, guard: Guard, agent: AgentId, host: str) -> LaunchProcess:
        """Start this agent on a spare host. Raises what the backend's `plan` raises."""
        assert plan.launch_command is not None
        words = (*AGENT_ARGV, str(agent), str(plan.launch_command.size))
        return self._start_guarded(plan, command_on(plan, host, words, self._environ), guard)

    def start_search(self, plan: Plan, command: LaunchCommand) -> LaunchProcess:
        """Run a command that shows whether a host is there. Raises UnavailableError where it cannot be started."""
        return self._start(plan, command, auth.new_token())  # a token that opens nothing

    def _start_guarded(self, plan: Plan, command: LaunchCommand, guard: Guard) -> LaunchProcess:
        launch = self._start(plan, command, self.token, self._directory)
        guard.add(launch.pid)
        return launch

    def _start(self, plan: Plan, command: LaunchCommand, token: str, directory: Path | None = None) -> LaunchProcess:
        timeout = plan.job.init_timeout
        told = AgentEnv(plan.job_id, self.addresses, token, command.engine, timeout, command.agents_stay)
        env = {**plan.base_env(self._environ), **command.set_env, **told.to_env()}
        for name in command.unset_env:
            env.pop(name, None)
        has_stdin = command == plan.launch_command and plan.job.stdin != STDIN_NONE
        try:
            return LaunchProcess(command, env, directory, has_stdin=has_stdin)
        except OSError as error:
            raise UnavailableError(f"{command.argv[0]} could not be started: {error.strerror}") from None
