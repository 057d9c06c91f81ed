"""`python -m jaxrun.node.ssh_starter OPTIONS HOST=RANKS… -- WORDS`: runs WORDS on each host, by one ssh for each.

All connections are made at the same time. Nothing is sent to a host before an interpreter there has answered, so a
login shell may print what it likes. Standard input goes to the host of rank 0. The starter ends when all of its ssh
have ended; it outlives hosts that fail, and says once, when all others have started, which hosts these are and why.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import select
import selectors
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from jaxrun.errors import EXIT_UNAVAILABLE
from jaxrun.node.ssh_bootstrap import remote_command, start_message
from jaxrun.node.ssh_failures import (
    OLDEST_PYTHON,
    HostFailure,
    agent_ended,
    cannot_start,
    describe_failures,
    no_interpreter,
    other_python,
    parse_version,
    ssh_failed,
)
from jaxrun.node.ssh_session import SshSession
from jaxrun.protocol.addresses import parse_addresses
from jaxrun.protocol.agent_id import AgentId
from jaxrun.protocol.names import GANG_ADDRESS, RESERVED_PREFIX, VERSION
from jaxrun.protocol.ssh_start import (
    AGENT_RANKS,
    FOUND,
    GANG_TUNNEL,
    HEAD_TUNNEL,
    TUNNEL_MODES,
    TUNNEL_OFF,
    TUNNEL_ON,
    format_failed_agents,
)
from jaxrun.spec.backends.forwarded_variables import forwarded_variables
from jaxrun.spec.job.plan import AGENT_ARGV
from jaxrun.text import parse_ranks

_SSH_FAILED = 255
_SHELL_S = 20.0  # for a login shell to begin the interpreter, once ssh must have connected
_FIRST_NUDGE_S, _NUDGE_S = 2.0, 1.0  # until an empty line is sent to a start-up file that may wait for one
_SETTLE_S = 0.5  # for the agents that were started last to report, before the hosts that failed are named
_READ_BYTES = 65536
_HEAD = f"{RESERVED_PREFIX}HEAD"
# What ssh says of a port that the other side has chosen: the port, and to where it leads.
_ALLOCATED = re.compile(r"Allocated port (\d+) for remote forward to (\S+)")
# A tunnel has no probe of its own: ssh notices that a host is silent after 15 s.
_ALIVE_S, _ALIVE_COUNT = 5, 3


class StartStep(Enum):
    """How far a host has come."""

    CONNECTING = auto()
    CHECKING = auto()
    STARTING = auto()
    RUNNING = auto()
    ENDED = auto()


@dataclass(frozen=True, slots=True)
class StartRequest:
    """What the starter runs, and how.

    ssh:       the words of ssh, up to the name of the host
    python:    the path of the interpreter on the hosts
    words:     what is run there; those that are this interpreter's path become `python`
    limit_s:   until a host that has not begun `python` has failed
    tunnels:   the variable that names a forwarded port to an agent, by where the port leads, "10.1.0.4:40123"
    only_tunnels:  agents use nothing but the tunnels
    """

    ssh: tuple[str, ...]
    python: str
    directory: str
    words: tuple[str, ...]
    env: Mapping[str, str] = field(repr=False)
    limit_s: float
    tunnels: Mapping[str, str] = field(default_factory=dict)
    only_tunnels: bool = False

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
        self.session = SshSession((*request.ssh, name, remote_command(request.python, self._mark)))

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
                _write(1, f"{line}\n")

    def on_errors(self, data: bytes) -> None:
        """Standard error: ssh's and the shell's words, and from the agent's start on what it writes to its log."""
        text = data.decode(errors="replace")
        self._said = (self._said + text)[-_READ_BYTES:]
        if self.step in (StartStep.STARTING, StartStep.RUNNING):
            _write(2, text)

    def on_time(self, now: float) -> float:
        """Do what is due; returns when to call again."""
        if self.step is not StartStep.CONNECTING or self.failure is not None:
            return now + _SHELL_S
        if now >= self._give_up_at:
            text = f"nothing has run {self._request.python} within {self._request.limit_s:g} s"
            self.fail(HostFailure(text, f"ssh {self.name} true: does a start-up file of its shell wait?"))
        elif now >= self._nudge_at:
            self._nudge_at = now + _NUDGE_S
            self.session.send(b"\n")
        return min(self._nudge_at, self._give_up_at)

    def on_end(self, status: int) -> None:
        """Its ssh has ended, with this status."""
        before, self.step, self.status = self.step, StartStep.ENDED, status
        if self.failure is not None:
            return
        if before is StartStep.CONNECTING:
            failed = ssh_failed(self.name, self._said) if status == _SSH_FAILED else None
            self.failure = failed or no_interpreter(self.name, self._request.python, status, self._said)
        elif before is StartStep.CHECKING or (before is StartStep.STARTING and self._request.starts_agents):
            self.failure = agent_ended(status, self._said)

    def fail(self, failure: HostFailure) -> None:
        """Give the host up."""
        self.failure = failure
        self.session.kill()

    def _on_interpreter(self, version: str) -> None:
        if tuple(parse_version(version)) < OLDEST_PYTHON:
            self.fail(other_python(version))
            return
        request, env = self._request, {**self._env, **self._find_tunnels()}
        if request.only_tunnels and HEAD_TUNNEL in env:
            env[_HEAD] = env[HEAD_TUNNEL]
        self.step = StartStep.CHECKING
        self.session.send(start_message(self._mark, request.words, sys.executable, request.directory, VERSION, env))
        if not self.gets_stdin:
            self.session.end_input()

    def _find_tunnels(self) -> dict[str, str]:
        """The ports of the host that lead here; ssh has named them before it began the session."""
        while self._request.tunnels and select.select([self.session.stderr], [], [], 0)[0]:
            if not (data := os.read(self.session.stderr, _READ_BYTES)):
                break
            self.on_errors(data)
        found = {target: f"127.0.0.1:{port}" for port, target in _ALLOCATED.findall(self._said)}
        return {name: found[target] for target, name in self._request.tunnels.items() if target in found}

    def _on_check(self, answer: str) -> None:
        import json

        found = json.loads(answer)
        if found["problem"]:
            self.failure = cannot_start(found["problem"], found["detail"], self._request.python)
        else:
            self.step = StartStep.STARTING


class Starter:
    """All hosts."""

    def __init__(self, hosts: Mapping[str, str], request: StartRequest) -> None:
        """`hosts` has the ranks of each, "0-3"."""
        size = 1 + max(part[-1] for ranks in hosts.values() for part in parse_ranks(ranks, "a host"))
        self._selector = selectors.PollSelector()  # which takes files, too
        self._request = request
        began = time.monotonic()
        self._hosts = [StartedHost(name, ranks, size, request, began) for name, ranks in hosts.items()]
        self._report_at: float | None = None  # once all hosts are decided and some have failed
        self._has_reported = False
        self._stdin_to: SshSession | None = None
        for host in self._hosts:
            self._watch(host)

    def run(self) -> int:
        """Follow all hosts until their ssh have ended; returns the exit status."""
        while any(host.is_open for host in self._hosts):
            now = time.monotonic()
            due = [host.on_time(now) for host in self._hosts if host.is_open]
            due += [self._report_at] if self._report_at is not None and not self._has_reported else []
            for key, _ in self._selector.select(max(0.0, min(due) - now)):
                if key.fd in self._selector.get_map():  # no handler before has closed it
                    key.data()
            self._update_descriptors()
            self._report_failures()
        self._report_failures(at_once=True)
        statuses = [EXIT_UNAVAILABLE if host.failure else host.status or 0 for host in self._hosts]
        return next(filter(None, statuses), 0)

    def _watch(self, host: StartedHost) -> None:
        session = host.session
        for descriptor, handle in ((session.stdout, host.on_output), (session.stderr, host.on_errors)):
            self._selector.register(descriptor, selectors.EVENT_READ, self._reader(host, descriptor, handle))

    def _reader(self, host: StartedHost, descriptor: int, handle: Callable[[bytes], None]) -> Callable[[], None]:
        def read() -> None:
            if data := os.read(descriptor, _READ_BYTES):
                handle(data)
                self._lead_stdin(host)
                return
            self._selector.unregister(descriptor)
            if host.session.close(descriptor):
                host.on_end(host.session.wait())
                self._forget_writer(host.session)

        return read

    def _lead_stdin(self, host: StartedHost) -> None:
        """Once rank 0's agent is being started, it gets our standard input."""
        if host.step is StartStep.STARTING and host.gets_stdin and self._stdin_to is None:
            self._stdin_to = host.session

    def _read_stdin(self) -> None:
        assert self._stdin_to is not None
        data = b""
        with contextlib.suppress(OSError):
            data = os.read(0, _READ_BYTES)
        if data:
            self._stdin_to.send(data)
        else:
            self._stdin_to.end_input()

    def _update_descriptors(self) -> None:
        """Wait for what can take more input, and read ours only where all of it has been taken."""
        for host in self._hosts:
            session = host.session
            if host.is_open and session.flush():
                if session.stdin not in self._selector.get_map():
                    self._selector.register(session.stdin, selectors.EVENT_WRITE, lambda: None)
            else:
                self._forget_writer(session)
        to, is_read = self._stdin_to, 0 in self._selector.get_map()
        is_wanted = to is not None and to.takes_input and not to.has_unsent
        if is_wanted and not is_read:
            self._selector.register(0, selectors.EVENT_READ, self._read_stdin)
        elif is_read and not is_wanted:
            self._selector.unregister(0)

    def _forget_writer(self, session: SshSession) -> None:
        if session.stdin >= 0 and session.stdin in self._selector.get_map():
            self._selector.unregister(session.stdin)
        session.close_input_if_done()

    def _report_failures(self, *, at_once: bool = False) -> None:
        """Name the hosts that have failed, once it is known of all hosts whether they have."""
        failed = [host for host in self._hosts if host.failure is not None]
        if self._has_reported or not failed or not all(host.is_decided for host in self._hosts):
            return
        self._report_at = self._report_at or time.monotonic() + _SETTLE_S
        if at_once or len(failed) == len(self._hosts) or time.monotonic() >= self._report_at:
            self._has_reported = True
            words = describe_failures(
                {host.name: host.failure for host in failed if host.failure is not None}, len(self._hosts)
            )
            _write(2, f"{words}\n{format_failed_agents([host.agent for host in failed])}\n")


def _write(descriptor: int, text: str) -> None:
    with contextlib.suppress(OSError):  # the launcher is gone
        os.write(descriptor, text.encode())


def _parse(words: Sequence[str]) -> tuple[dict[str, str], StartRequest]:
    end = list(words).index("--")
    parser = argparse.ArgumentParser(prog="jaxrun.node.ssh_starter", allow_abbrev=False)
    parser.add_argument("--ssh", required=True)
    parser.add_argument("--connect-timeout", type=int, required=True)
    parser.add_argument("--directory", required=True)
    parser.add_argument("--remote-python", default=sys.executable)
    parser.add_argument("--tunnel", choices=TUNNEL_MODES, default=TUNNEL_OFF)
    parser.add_argument("hosts", nargs="+")
    given = parser.parse_args(words[:end])
    options = {
        "BatchMode": "yes",
        "ConnectTimeout": given.connect_timeout,
        "RemoteCommand": "none",  # nor what else the user's configuration does for a person at a terminal
        "PermitLocalCommand": "no",
        "ControlMaster": "no",
        "LogLevel": "INFO",
        **_tunnel_options(given.tunnel),
    }
    tunnels = _tunnels(os.environ) if given.tunnel != TUNNEL_OFF else {}
    forwards = [word for target in tunnels for word in ("-R", f"127.0.0.1:0:{target}")]
    ssh = (given.ssh, "-T", "-x", *(word for name, value in options.items() for word in ("-o", f"{name}={value}")))
    names = forwarded_variables(os.environ, {})
    request = StartRequest(
        ssh=(*ssh, *forwards, "--"),
        python=given.remote_python,
        directory=given.directory,
        words=tuple(words[end + 1 :]),
        env={name: os.environ[name] for name in names if name in os.environ},
        limit_s=given.connect_timeout + _SHELL_S,
        tunnels=tunnels,
        only_tunnels=given.tunnel == TUNNEL_ON,
    )
    return dict(word.split("=", 1) for word in given.hosts), request


def _tunnel_options(mode: str) -> dict[str, object]:
    """What ssh does about forwarded ports: a user's own may be in use already, and those of a tunnel must be there."""
    if mode == TUNNEL_OFF:
        return {"ClearAllForwardings": "yes"}
    alive: dict[str, object] = {"ServerAliveInterval": _ALIVE_S, "ServerAliveCountMax": _ALIVE_COUNT}
    return alive | ({"ExitOnForwardFailure": "yes", "ControlPath": "none"} if mode == TUNNEL_ON else {})


def _tunnels(environ: Mapping[str, str]) -> dict[str, str]:
    """What is forwarded: the head's port, and that of the process that owns a gang."""
    named = {HEAD_TUNNEL: environ.get(_HEAD, ""), GANG_TUNNEL: environ.get(GANG_ADDRESS, "")}
    return {str(parse_addresses(text)[0]): name for name, text in named.items() if text}


def main() -> int:
    while os.open(os.devnull, os.O_RDWR) <= 2:  # no pipe takes the place of a standard stream that is closed
        pass
    return Starter(*_parse(sys.argv[1:])).run()


if __name__ == "__main__":
    os._exit(main())
