"""What an agent does before its workers start: a check of its host, a report, facts, probes, copies of directories."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import TYPE_CHECKING

from jaxrun.node.agent.guard import Guard, job_marker
from jaxrun.node.agent.spawn import WorkerSetup
from jaxrun.node.channel.connection import Connection
from jaxrun.protocol.addresses import Address
from jaxrun.protocol.agent_id import AgentId
from jaxrun.protocol.agent_messages import AgentReport, HeadToAgent, HostTask, JobInfo
from jaxrun.protocol.auth import peer_token
from jaxrun.protocol.probe_messages import ProbePeers
from jaxrun.protocol.staging import CopyStaged

if TYPE_CHECKING:
    from jaxrun.node.agent.host_probe import PeerServer
    from jaxrun.node.agent.host_staging import HostStaging


class HostTasks:
    """Those of one agent; `threads` ends what they have begun, before this process forks.

    info:  what job this is
    """

    def __init__(
        self,
        agent: AgentId,
        connection: Connection[HeadToAgent],
        token: str,
        environ: Mapping[str, str],
        report: Callable[[JobInfo, AgentId], AgentReport],
    ) -> None:
        self._agent = agent
        self._connection = connection
        self._token = token
        self._environ = environ
        self._report = report
        self.info = JobInfo("", "", ())
        self.threads = contextlib.ExitStack()
        self._turn: socket.socket | None = None  # to run --host-check, as one agent of each host does
        self._peer_server: PeerServer | None = None
        self._staging: HostStaging | None = None

    def report(self, attempt: int, ranks: Sequence[int], is_stopped: Callable[[], bool]) -> AgentReport | None:
        """Check the host, where that is asked for, and report what is there; None if it is stopped before.

        `ranks` are those of the agent. Where something is staged, other hosts can take it here from now on.
        """
        failure = self._check_host(attempt, ranks, is_stopped)
        if failure is None:
            return None
        report = replace(self._report(self.info, self._agent), attempt=attempt, check_failure=failure)
        if self.info.stage is not None:
            from jaxrun.node.agent.host_staging import HostStaging

            head = Address(report.head_address, self._connection.peer[1])
            self._staging = self._staging or HostStaging(self.info.stage, self._agent, self._token, head)
            listener = self.threads.enter_context(contextlib.closing(self._staging.listen()))
            report = replace(report, stage_port=listener.sockets[0].getsockname()[1])
        self._connection.send(report)
        if self.info.probe:
            self._send_facts(report)
        return report

    def start_from_copies(self, setup: WorkerSetup) -> WorkerSetup:
        """The same with the copies in place of their sources, where something is staged. Raises UnavailableError."""
        return setup if self._staging is None else self._staging.start_from_copies(setup)

    def _send_facts(self, report: AgentReport) -> None:
        """Tell the head what there is on this host, and where this agent answers the others."""
        from jaxrun.node.agent.host_probe import PeerServer, collect_facts

        self._peer_server = self.threads.enter_context(contextlib.closing(PeerServer(peer_token(self._token))))
        seen, port = report.can_write_run_dir, self._peer_server.port
        environ = {**self._environ, **self.info.environment}
        self._connection.send(collect_facts(self._agent, environ, sees_run_dir=seen, port=port))

    def handle(self, task: HostTask, is_stopped: Callable[[], bool]) -> None:
        """Do what is asked, and tell the head, unless it is stopped before."""
        match task:
            case ProbePeers():
                from jaxrun.node.agent.host_probe import probe_peers

                assert self._peer_server is not None
                self._peer_server.start(len(task.addresses))
                self._connection.send(probe_peers(self._agent, peer_token(self._token), task))
            case CopyStaged():
                assert self._staging is not None
                if copied := self._staging.copy(task, is_stopped):
                    self._connection.send(copied)

    def _check_host(self, attempt: int, ranks: Sequence[int], is_stopped: Callable[[], bool]) -> str | None:
        """How --host-check has failed; empty if all is well or another agent of this host checks, None if stopped."""
        check, host = self.info.host_check, os.uname().nodename
        if check is None or not attempt:
            return ""
        self._turn = socket.socket(socket.AF_UNIX)  # in the abstract namespace, until the next attempt
        try:
            self._turn.bind(f"\0{sha256(f'{self._token} {host} {attempt}'.encode()).hexdigest()}")
        except OSError:
            return ""
        from jaxrun.node.agent.host_check import check_host

        guard = Guard(job_marker(self.info.job_id), ranks)
        try:
            return check_host(check, self._environ, is_stopped, host=host, rank=ranks[0], attempt=attempt)
        finally:
            guard.disarm()
