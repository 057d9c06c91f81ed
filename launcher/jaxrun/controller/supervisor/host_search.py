"""Looks whether the hosts that a job lacks are there: has the engine run a command on each, all at the same time."""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping
from functools import partial

from jaxrun.controller.supervisor.engine_commands import EngineCommands
from jaxrun.controller.supervisor.executor import Executor
from jaxrun.controller.supervisor.launch_process import LaunchProcess
from jaxrun.errors import JaxrunError, UsageError
from jaxrun.node.agent.agent import OUTPUT
from jaxrun.protocol.names import RESERVED_PREFIX
from jaxrun.records.event_log.events import HostsFound
from jaxrun.spec.backends.quarantine import excluded_hosts
from jaxrun.spec.backends.remote_plan import command_on
from jaxrun.spec.job.plan import LaunchCommand

_LOOK_TIMEOUT_S = 20.0  # for one look; ssh tries a dead host for minutes
_KILL_AFTER_S = 2.0  # after SIGTERM


class HostSearch:
    """One look after the other, in one attempt. `found` are the hosts on which the command of the last ended with 0."""

    def __init__(self, executor: Executor, environ: Mapping[str, str], engine: EngineCommands) -> None:
        self._executor = executor
        self._plan = executor.context.plan
        self._environ = environ
        self._engine = engine
        self._commands: dict[str, LaunchCommand] = {}  # by host; to make one takes a while
        self._running: dict[str, LaunchProcess] = {}
        self.found: tuple[str, ...] = ()
        self._deadline: float | None = None
        self._signals: list[signal.Signals] = []  # for those that are late
        executor.loop.add_timer(lambda: self._deadline, self._end_late)

    def begin(self) -> None:
        """Look for the hosts that were lost, but those in quarantine; HostsFound follows."""
        job, self.found = self._plan.job, ()
        limit = job.init_timeout if job.host_check else _LOOK_TIMEOUT_S
        self._deadline = self._executor.context.clock() + limit
        self._signals = [signal.SIGTERM, signal.SIGKILL]
        for host in self._missing_hosts():
            try:
                process = self._engine.start_search(self._plan, self._command_on(host))
            except JaxrunError:
                continue
            self._running[host] = process
            self._executor.loop.add_reader(process.fileno(), OUTPUT, partial(self._read, process))
        self._conclude_if_over()

    def on_child_exit(self) -> None:
        ended = [host for host, process in self._running.items() if process.reap()]
        for host in ended:
            process = self._running.pop(host)
            self.found += (host,) if process.status == 0 else ()
            self._executor.loop.remove_reader(process.fileno())
            process.close()
        if ended:
            self._conclude_if_over()

    def close(self) -> list[LaunchProcess]:
        """Give up; returns what still runs, and has been told to end."""
        for process in self._running.values():
            process.ask_to_end()
        return list(self._running.values())

    def _missing_hosts(self) -> list[str]:
        plan = self._plan
        try:
            excluded = excluded_hosts(plan.job)
        except UsageError:  # the file cannot be read now
            return []
        return [host for host in dict.fromkeys(plan.left_out) if host not in (*plan.hosts, *excluded)]

    def _command_on(self, host: str) -> LaunchCommand:
        """What ends with 0 where the host can be used, as --host-check says. Raises what the backend's `plan` does."""
        if host not in self._commands:
            plan = self._plan
            told = f"{RESERVED_PREFIX}HOST={host}", f"{RESERVED_PREFIX}ATTEMPT={plan.attempt + 1}"
            check = plan.job.host_check
            words = ("/bin/sh", "-c", check) if check else (sys.executable, "-c", "import jaxrun")
            self._commands[host] = command_on(plan, host, ("/usr/bin/env", *told, *words), self._environ)
        return self._commands[host]

    def _read(self, process: LaunchProcess) -> None:
        if process.read() is None:
            self._executor.loop.remove_reader(process.fileno())

    def _end_late(self) -> None:
        signum = self._signals.pop(0)
        self._deadline = self._executor.context.clock() + _KILL_AFTER_S if self._signals else None
        for process in self._running.values():
            process.signal(signum)

    def _conclude_if_over(self) -> None:
        if not self._running:
            self._deadline = None
            self._executor.handle(HostsFound(self.found))
