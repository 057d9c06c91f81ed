"""What the head asks of an agent before its workers start: a report, facts, probes, a check, copies of directories."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from jaxrun.node.agent.guard import Guard, job_marker
from jaxrun.node.agent.spawn import WorkerSetup
from jaxrun.node.channel.connection import Connection
from jaxrun.protocol.agent_messages import AgentReport, HeadToAgent, HostTask, JobInfo
from jaxrun.protocol.auth import peer_token
from jaxrun.protocol.probe_messages import CheckHost, ProbePeers
from jaxrun.protocol.stage_messages import CopyStaged

if TYPE_CHECKING:
    from jaxrun.node.agent.host_probe import PeerServer
    from jaxrun.node.agent.host_staging import HostStaging


class HostTasks:
    """Those of one agent; `threads` ends what they have begun, before this process forks.

    info:  what job this is
    """

    def __init__(
        self,
        number: int,
        connection: Connection[HeadToAgent],
        token: str,
        environ: Mapping[str, str],
        report: Callable[[JobInfo, int], AgentReport],
    ) -> None:
        self._number = number
        self._connection = connection
        self._token = token
        self._environ = environ
        self._report = report
        self.info = JobInfo("", "", ())
        self.threads = contextlib.ExitStack()
        self._peer_server: PeerServer | None = None
        self._staging: HostStaging | None = None

    def report(self, attempt: int = 1) -> AgentReport:
        """Report what is there; where something is staged, other hosts can take it here from now on."""
        report = replace(self._report(self.info, self._number), attempt=attempt)
        if self.info.stage is not None:
            from jaxrun.node.agent.host_staging import HostStaging

            self._staging = self._staging or HostStaging(self.info.stage, self._number, self._token)
            server = self.threads.enter_context(contextlib.closing(self._staging.serve()))
            report = replace(report, stage_port=server.port)
        self._connection.send(report)
        return report

    def start_from_copies(self, setup: WorkerSetup) -> WorkerSetup:
        """The same with the copies in place of their sources, where something is staged."""
        return setup if self._staging is None else self._staging.start_from_copies(setup)

    def send_facts(self, report: AgentReport) -> None:
        """Tell the head what there is on this host, and where this agent answers the others."""
        from jaxrun.node.agent.host_probe import PeerServer, collect_facts

        self._peer_server = self.threads.enter_context(contextlib.closing(PeerServer(peer_token(self._token))))
        seen, port = report.can_write_run_dir, self._peer_server.port
        environ = {**self._environ, **self.info.environment}
        self._connection.send(collect_facts(self._number, environ, sees_run_dir=seen, port=port))

    def handle(self, task: HostTask, ranks: Sequence[int], is_stopped: Callable[[], bool]) -> None:
        """Do what is asked, and tell the head, unless it is stopped before. `ranks` are those of the agent."""
        match task:
            case ProbePeers():
                from jaxrun.node.agent.host_probe import probe_peers

                assert self._peer_server is not None
                self._peer_server.start(len(task.addresses))
                self._connection.send(probe_peers(self._number, peer_token(self._token), task))
            case CheckHost():
                self._check_host(task, ranks, is_stopped)
            case CopyStaged():
                assert self._staging is not None
                if copied := self._staging.copy(task, is_stopped):
                    self._connection.send(copied)

    def _check_host(self, order: CheckHost, ranks: Sequence[int], is_stopped: Callable[[], bool]) -> None:
        from jaxrun.node.agent.host_check import check_host

        job_id = self.info.job_id
        guard = Guard(job_marker(job_id), ranks)
        try:
            if result := check_host(order, self._environ, job_id, is_stopped):
                self._connection.send(replace(result, rank=self._number))
        finally:
            guard.disarm()
