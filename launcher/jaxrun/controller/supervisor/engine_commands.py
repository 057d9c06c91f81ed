"""Runs the commands of an engine that a job needs: for all agents, for spare hosts, and to find lost hosts again."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path

from msgspec import Struct, field

from jaxrun.controller.supervisor.launch_process import LaunchProcess
from jaxrun.errors import JaxrunError, UnavailableError, UsageError
from jaxrun.node.agent.agent import OUTPUT
from jaxrun.node.agent.guard import Guard
from jaxrun.node.channel.event_loop import LoopPart
from jaxrun.protocol import auth
from jaxrun.protocol.agent_id import AgentId
from jaxrun.protocol.env import AgentEnv
from jaxrun.protocol.names import ATTEMPT, HOST
from jaxrun.protocol.settings import STDIN_NONE
from jaxrun.spec.backends.planning import command_on
from jaxrun.spec.backends.quarantine import excluded_hosts
from jaxrun.spec.job.plan import AGENT_ARGV, LaunchCommand, Plan


class EngineCommands:
    """Runs the commands of one job.

    addresses:  where the job's head listens
    token:      the token for agents that are started now
    """

    def __init__(self, environ: Mapping[str, str], directory: Path | None, addresses: str, token: str) -> None:
        """`directory`: where to keep the launch command's output; None for nowhere."""
        self._environ = environ
        self._directory = directory
        self.addresses = addresses
        self.token = token

    def start_agents(self, plan: Plan, guard: Guard) -> LaunchProcess:
        """Run the launch command of the plan. Raises UnavailableError if it cannot be started."""
        assert plan.launch_command is not None
        return self._start_guarded(plan, plan.launch_command, guard)

    def start_spare(self, plan: Plan, guard: Guard, agent: AgentId, host: str) -> LaunchProcess:
        """Start this agent on a spare host, or on one that is back. Raises the exceptions of the backend's `plan`."""
        assert plan.launch_command is not None
        words = (*AGENT_ARGV, str(agent), str(plan.launch_command.size))
        return self._start_guarded(plan, command_on(plan, host, words, self._environ), guard)

    def start_search(self, plan: Plan, command: LaunchCommand) -> LaunchProcess:
        """Run a command that shows whether a host is usable. Raises UnavailableError if it cannot be started."""
        return self._start(plan, command, auth.new_token())  # a token that is useless

    def _start_guarded(self, plan: Plan, command: LaunchCommand, guard: Guard) -> LaunchProcess:
        launch = self._start(plan, command, self.token, self._directory)
        guard.add(launch.pid)
        return launch

    def _start(self, plan: Plan, command: LaunchCommand, token: str, directory: Path | None = None) -> LaunchProcess:
        timeout = plan.job.init_timeout
        told = AgentEnv(plan.job_id, self.addresses, token, command.engine.key, timeout, command.agents_stay)
        env = {**plan.base_env(self._environ), **command.set_env, **told.to_env()}
        for name in command.unset_env:
            env.pop(name, None)
        has_stdin = command == plan.launch_command and plan.job.stdin != STDIN_NONE
        try:
            return LaunchProcess(command, env, directory, has_stdin=has_stdin)
        except OSError as error:
            raise UnavailableError(f"{command.argv[0]} could not be started: {error.strerror}") from None


_LOOK_TIMEOUT_S = 20.0  # for one search; ssh tries a dead host for minutes
_KILL_AFTER_S = 2.0  # after SIGTERM


class _HostCheck(Struct):
    """The command that checks one host.

    late_at:  when to send it the next of `signals`, in seconds since the epoch
    """

    process: LaunchProcess
    late_at: float
    signals: list[signal.Signals] = field(default_factory=lambda: [signal.SIGTERM, signal.SIGKILL])


class HostSearch:
    """Checks whether the hosts that a job lacks are back: the engine runs a command on all of them at the same time.

    There is one search at a time, in one attempt: hosts that are wanted while it runs join it. `found` are the hosts on
    which the last search's command exited with 0.
    """

    def __init__(
        self,
        loop: LoopPart,
        clock: Callable[[], float],
        plan: Plan,
        environ: Mapping[str, str],
        engine: EngineCommands,
        guard: Guard,
    ) -> None:
        self._loop = loop
        self._clock = clock
        self._plan = plan
        self._environ = environ
        self._engine = engine
        self._guard = guard
        self._commands: dict[str, LaunchCommand] = {}  # by host; making one takes a while
        self._running: dict[str, _HostCheck] = {}  # by host
        self.found: tuple[str, ...] = ()
        loop.add_timer(self._next_late_at, self._end_late)

    def begin(self, hosts: Collection[str] = ()) -> bool:
        """Check these hosts, or all that were left out, except those in quarantine.

        Hosts that the caller names are checked in any case: this job itself may have put them in quarantine.
        Returns whether the search is already over.
        """
        if not self._running:
            self.found = ()
        job = self._plan.job
        late_at = self._clock() + (job.init_timeout if job.host_check else _LOOK_TIMEOUT_S)
        for host in dict.fromkeys(hosts) or self._left_out():
            if host in self._running or host in self.found:
                continue
            try:
                process = self._engine.start_search(self._plan, self._command_on(host))
            except JaxrunError:
                continue
            self._running[host] = check = _HostCheck(process, late_at)
            self._loop.add_reader(process.fileno(), OUTPUT, partial(self._read, host, check))
        return not self._running

    def on_child_exit(self) -> bool:
        """Handle the exit of a child of this process; returns whether this ends the search."""
        ended = [host for host, check in self._running.items() if check.process.reap()]
        for host in ended:
            process = self._running.pop(host).process
            self.found += (host,) if process.status == 0 else ()
            self._loop.remove_reader(process.fileno())
            process.close()
        return bool(ended) and not self._running

    def close(self) -> list[LaunchProcess]:
        """Give up; returns commands that are still running, which have been told to end."""
        processes = [check.process for check in self._running.values()]
        for process in processes:
            process.ask_to_end()
        return processes

    def start_agent(self, agent: AgentId, host: str) -> LaunchProcess:
        """Start an agent on a host that was found. Raises exceptions of the backend's `plan`, or UnavailableError."""
        return self._engine.start_spare(self._plan, self._guard, agent, host)

    def _left_out(self) -> list[str]:
        try:
            excluded = excluded_hosts(self._plan.job)
        except UsageError:  # the file cannot be read now
            return []
        left_out = self._plan.placement.left_out
        return [host for host in left_out if host not in self._plan.hosts and host not in excluded]

    def _command_on(self, host: str) -> LaunchCommand:
        """Return a command that exits with 0 if the host is usable, as --host-check defines it. Raises like `plan`."""
        if host not in self._commands:
            plan = self._plan
            told = f"{HOST}={host}", f"{ATTEMPT}={plan.attempt + 1}"
            check = plan.job.host_check
            words = ("/bin/sh", "-c", check) if check else (sys.executable, "-c", "import jaxrun")
            self._commands[host] = command_on(plan, host, ("/usr/bin/env", *told, *words), self._environ)
        return self._commands[host]

    def _read(self, host: str, check: _HostCheck) -> None:
        # Otherwise its end was noticed in the same step.
        if self._running.get(host) is check and check.process.read() is None:
            self._loop.remove_reader(check.process.fileno())

    def _next_late_at(self) -> float | None:
        return min((check.late_at for check in self._running.values() if check.signals), default=None)

    def _end_late(self) -> None:
        now = self._clock()
        for check in self._running.values():
            if check.signals and check.late_at <= now:
                check.process.signal(check.signals.pop(0))
                check.late_at = now + _KILL_AFTER_S
