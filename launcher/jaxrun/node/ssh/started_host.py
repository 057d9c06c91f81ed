"""One host of a job by ssh: from the connection, over the interpreter's first answer, to the end of its agent.

Nothing is sent to a host before an interpreter there has answered, so a login shell may print what it likes.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Mapping
from enum import Enum, auto

from msgspec import field

from jaxrun.node.ssh.carried_sources import CarriedSources, collect_sources
from jaxrun.node.ssh.host_failures import (
    HostFailure,
    agent_ended,
    cannot_start,
    check_python,
    no_interpreter,
)
from jaxrun.node.ssh.remote_command import HostStart, remote_command, start_message
from jaxrun.node.ssh.remote_shell import RemoteShell
from jaxrun.node.ssh.session import SshSession
from jaxrun.protocol.agent_id import AgentId
from jaxrun.protocol.hidden_fields import HidesFields
from jaxrun.protocol.names import (
    AGENT_RANKS,
    CARRIED_ENVIRONMENT,
    HEAD_ADDRESSES,
    HEAD_TUNNEL,
    LACKS_DIRECTORY,
    VERSION,
)
from jaxrun.protocol.ssh_start import FOUND, CarriedEnvironment
from jaxrun.spec.job.plan import AGENT_ARGV
from jaxrun.text import parse_ranks

SHELL_S = 20.0  # for a login shell to begin the interpreter, once ssh must have connected
READ_BYTES = 65536
_FIRST_NUDGE_S, _NUDGE_S = 2.0, 1.0  # until an empty line is sent to a start-up file that may wait for one
# What ssh says of a port that the other side has chosen: the port, and to where it leads.
_ALLOCATED = re.compile(r"Allocated port (\d+) for remote forward to (\S+)")


class StartStep(Enum):
    """How far a host has come."""

    CONNECTING = auto()
    CHECKING = auto()
    STARTING = auto()
    RUNNING = auto()
    ENDED = auto()


class StartRequest(HidesFields, frozen=True):
    """What the starter runs, and how.

    shell:     how to reach the hosts
    pythons:   the paths of the interpreter on the hosts; the first that is there is taken
    words:     what is run there; those that are this interpreter's path become `python`
    limit_s:   until a host that has not begun `python` has failed
    tunnels:   the variable that names a forwarded port to an agent, by where the port leads, "10.1.0.4:40123"
    only_tunnels:  agents use nothing but the tunnels
    carries:   jaxrun is sent to hosts that lack it, and --stage brings this interpreter's environment
    stage_dir: the value of --stage-dir
    stages_directory:  --stage brings the directory
    """

    hidden = frozenset({"env"})

    shell: RemoteShell
    pythons: tuple[str, ...]
    directory: str
    words: tuple[str, ...]
    env: Mapping[str, str]
    limit_s: float
    tunnels: Mapping[str, str] = field(default_factory=dict)
    only_tunnels: bool = False
    carries: bool = False
    stage_dir: str = ""
    stages_directory: bool = False

    @property
    def python(self) -> str:
        return " ".join(self.pythons)

    @property
    def starts_agents(self) -> bool:
        return AGENT_ARGV[-1] in self.words


class StartedHost:
    """One host: follows it from the connection to the end of what runs there."""

    def __init__(self, name: str, ranks: str, size: int, request: StartRequest, began: float) -> None:
        self.name = name
        self.agent = AgentId(parse_ranks(ranks, "a host")[0][0])
        self.step = StartStep.CONNECTING
        self.failure: HostFailure | None = None
        self.status: int | None = None
        self._request = request
        self._env = {**request.env, AGENT_RANKS: f"{ranks} {size}"}
        self._mark = f"jaxrun-{os.urandom(8).hex()}"
        self._said = ""  # on standard error, before the agent was started
        self._out = ""  # of standard output, the line that is not complete
        self._nudge_at = began + _FIRST_NUDGE_S
        self._give_up_at = began + request.limit_s
        self.session = SshSession(request.shell.command(name, remote_command(request.pythons, self._mark)))

    @property
    def is_decided(self) -> bool:
        """Whether it is known if the agent has started; what is no agent has when its command is run."""
        started = StartStep.STARTING if not self._request.starts_agents else StartStep.RUNNING
        return self.failure is not None or self.step.value >= started.value

    @property
    def is_open(self) -> bool:
        return self.step is not StartStep.ENDED

    @property
    def gets_stdin(self) -> bool:
        return self.agent == 0 and self._request.starts_agents

    def on_output(self, data: bytes) -> None:
        """Standard output: the mark, the answer of the check, and from then on the agent's own."""
        *lines, self._out = (self._out + data.decode(errors="replace")).split("\n")
        for line in lines:
            found, text = self._mark in line, line.partition(self._mark)[2].strip()
            if self.step is StartStep.CONNECTING and found:
                self._on_interpreter(text)
            elif self.step is StartStep.CHECKING and found:
                self._on_check(text)
            elif self.step is StartStep.STARTING and line == FOUND:
                self.step = StartStep.RUNNING
            elif self.step in (StartStep.STARTING, StartStep.RUNNING):
                write_output(1, f"{line}\n")

    def on_errors(self, data: bytes) -> None:
        """Standard error: ssh's and the shell's words, and from the agent's start on what it writes to its log."""
        text = data.decode(errors="replace")
        self._said = (self._said + text)[-READ_BYTES:]
        if self.step in (StartStep.STARTING, StartStep.RUNNING):
            write_output(2, text)

    def on_time(self, now: float) -> float:
        """Do what is due; returns when to call again."""
        if self.step is not StartStep.CONNECTING or self.failure is not None:
            return now + SHELL_S
        if now >= self._give_up_at:
            text = f"nothing has run {self._request.python} within {self._request.limit_s:g} s"
            trial = f"{self._request.shell.trial} {self.name} true"
            self.fail(HostFailure(text, f"{trial}: does a start-up file of its shell wait?"))
        elif now >= self._nudge_at:
            self._nudge_at = now + _NUDGE_S
            self.session.send(b"\n")
        return min(self._nudge_at, self._give_up_at)

    def on_end(self, status: int) -> None:
        """Its ssh or qrsh has ended, with this status."""
        before, self.step, self.status = self.step, StartStep.ENDED, status
        if self.failure is not None:
            return
        if before is StartStep.CONNECTING:
            failed = self._request.shell.failure(self.name, status, self._said)
            self.failure = failed or no_interpreter(
                self._request.python, status, self._said, carries=self._request.carries
            )
        elif before is StartStep.CHECKING or (before is StartStep.STARTING and self._request.starts_agents):
            self.failure = agent_ended(status, self._said)

    def fail(self, failure: HostFailure) -> None:
        """Give the host up."""
        self.failure = failure
        self.session.kill()

    def _on_interpreter(self, version: str) -> None:
        request = self._request
        if failure := check_python(version, carries=request.carries):
            self.fail(failure)
            return
        env = {**self._env, **self._find_tunnels()}
        if request.only_tunnels and HEAD_TUNNEL in env:
            env[HEAD_ADDRESSES] = env[HEAD_TUNNEL]
        if request.carries:
            env[CARRIED_ENVIRONMENT] = _own_environment().to_text()
        self.step = StartStep.CHECKING
        start = HostStart(
            argv=request.words,
            python=sys.executable,
            directory=request.directory,
            version=VERSION,
            env=env,
            carried=self._carried,
            stage_dir=request.stage_dir,
            directory_comes={LACKS_DIRECTORY: request.directory} if request.stages_directory else None,
        )
        self.session.send(start_message(self._mark, start))

    @property
    def _carried(self) -> CarriedSources | None:
        return collect_sources() if self._request.carries else None

    def _find_tunnels(self) -> dict[str, str]:
        """The ports of the host that lead here; ssh has named them before it began the session."""
        while self._request.tunnels and (data := self.session.read(self.session.stderr)):
            self.on_errors(data)
        found = {target: f"127.0.0.1:{port}" for port, target in _ALLOCATED.findall(self._said)}
        return {name: found[target] for target, name in self._request.tunnels.items() if target in found}

    def _on_check(self, answer: str) -> None:
        import json

        found = json.loads(answer)
        if found["problem"]:
            self.failure = cannot_start(found["problem"], found["detail"], self._request.python)
        elif found["wants_carried"] and self._carried is not None:
            self.session.send(self._carried.archive)
            return
        else:
            self.step = StartStep.STARTING
        if not self.gets_stdin:
            self.session.end_input()


def _own_environment() -> CarriedEnvironment:
    """This interpreter, and the directories in which it finds packages."""
    return CarriedEnvironment(
        sys.executable, sys.prefix, tuple(part for part in sys.path if part.startswith(f"{sys.prefix}/"))
    )


def write_output(descriptor: int, text: str) -> None:
    """Write to a standard stream of this process, whose reader may be gone."""
    with contextlib.suppress(OSError):
        os.write(descriptor, text.encode())
