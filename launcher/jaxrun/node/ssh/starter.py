"""The starter: runs words on each host, by one ssh for each.

All connections are made at the same time. Standard input goes to the host of rank 0. The starter ends when all of its
ssh have ended; it outlives hosts that fail, and says once, when all others have started, which hosts these are and why.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import time
from collections.abc import Callable, Mapping

from jaxrun.errors import EXIT_UNAVAILABLE
from jaxrun.node.channel.event_loop import EventLoop
from jaxrun.node.ssh.carried_sources import collect_sources
from jaxrun.node.ssh.host_failures import describe_failures
from jaxrun.node.ssh.session import SshSession
from jaxrun.node.ssh.started_host import READ_BYTES, StartedHost, StartRequest, StartStep, write_output
from jaxrun.protocol.ssh_start import format_failed_agents
from jaxrun.text import parse_ranks

_SETTLE_S = 0.5  # for the agents that were started last to report, before the hosts that failed are named


class Starter:
    """All hosts."""

    def __init__(self, hosts: Mapping[str, str], request: StartRequest) -> None:
        """`hosts` has the ranks of each, "0-3"."""
        size = 1 + max(part[-1] for ranks in hosts.values() for part in parse_ranks(ranks, "a host"))
        self._loop = EventLoop(selector=selectors.PollSelector())  # which takes files, too: standard input may be one
        self._loop.add_poller(self._proceed)
        self._request = request
        began = time.monotonic()
        self._hosts = [StartedHost(name, ranks, size, request, began) for name, ranks in hosts.items()]
        if request.carries:
            collect_sources()  # while the connections are made
        self._report_at: float | None = None  # once all hosts are decided and some have failed
        self._has_reported = False
        self._stdin_to: SshSession | None = None
        for host in self._hosts:
            self._watch(host)

    def run(self) -> int:
        """Follow all hosts until their ssh have ended; returns the exit status."""
        self._loop.run_until(lambda: not any(host.is_open for host in self._hosts))
        self._report_failures(at_once=True)
        statuses = [EXIT_UNAVAILABLE if host.failure else host.status or 0 for host in self._hosts]
        return next(filter(None, statuses), 0)

    def _proceed(self) -> float | None:
        """Do what is due before the loop waits; return the seconds until something is again."""
        now = time.monotonic()
        due = [host.on_time(now) for host in self._hosts if host.is_open]
        self._update_descriptors()
        self._report_failures()
        due += [self._report_at] if self._report_at is not None and not self._has_reported else []
        return min(due) - now if due else None

    def _watch(self, host: StartedHost) -> None:
        session = host.session
        for descriptor, handle in ((session.stdout, host.on_output), (session.stderr, host.on_errors)):
            self._loop.add_reader(descriptor, 0, self._reader(host, descriptor, handle))

    def _reader(self, host: StartedHost, descriptor: int, handle: Callable[[bytes], None]) -> Callable[[], None]:
        def read() -> None:
            if not self._loop.has_reader(descriptor):  # closed since the loop found it ready
                return
            data = host.session.read(descriptor)
            if data is None:  # the handler of the other output has read it
                return
            if data:
                handle(data)
                self._lead_stdin(host)
                return
            self._loop.remove_reader(descriptor)
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
            data = os.read(0, READ_BYTES)
        if data:
            self._stdin_to.send(data)
        else:
            self._stdin_to.end_input()

    def _update_descriptors(self) -> None:
        """Wait for what can take more input, and read ours only where all of it has been taken."""
        for host in self._hosts:
            session = host.session
            if host.is_open and session.flush():
                self._loop.add_writer(session.stdin, 0, lambda: None)
            else:
                self._forget_writer(session)
        to, is_read = self._stdin_to, self._loop.has_reader(0)
        is_wanted = to is not None and to.takes_input and not to.has_unsent
        if is_wanted and not is_read:
            self._loop.add_reader(0, 0, self._read_stdin)
        elif is_read and not is_wanted:
            self._loop.remove_reader(0)

    def _forget_writer(self, session: SshSession) -> None:
        if session.stdin >= 0:
            self._loop.remove_reader(session.stdin)
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
                {host.name: host.failure for host in failed if host.failure is not None},
                len(self._hosts),
                self._request.shell.title,
            )
            write_output(2, f"{words}\n{format_failed_agents([host.agent for host in failed])}\n")
