"""The tasks of an agent before its workers start: waits for GPUs, checks its host, reports, probes, copies directories.

All of them block, so they run in a thread (task_thread.py): each task yields its results as messages to the head.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from jaxrun.node.agent.guard import Guard, job_marker
from jaxrun.node.agent.host_readiness import CheckTurn, HostReadiness
from jaxrun.node.agent.spawn import WorkerSetup
from jaxrun.node.agent.task_thread import Task
from jaxrun.protocol.addresses import Address
from jaxrun.protocol.agent_id import AgentId
from jaxrun.protocol.agent_messages import AgentEvent, AgentReport, HostTask, JobInfo
from jaxrun.protocol.auth import peer_token
from jaxrun.protocol.probe_messages import ProbePeers
from jaxrun.text import format_ranks

if TYPE_CHECKING:
    from jaxrun.node.agent.host_probe import PeerServer
    from jaxrun.node.agent.host_staging import HostStaging
    from jaxrun.node.channel.listener import Listener


class HostServers(Struct, frozen=True):
    """Where other hosts reach this one until its workers start; None for what the job does not ask for.

    peers:   answers the probes of the other agents
    copies:  where others connect to copy staged directories
    """

    peers: PeerServer | None
    copies: Listener | None


class HostTasks:
    """The tasks of one agent, in all attempts of its job."""

    def __init__(
        self,
        agent: AgentId,
        job: JobInfo,
        head: Address,
        token: str,
        environ: Mapping[str, str],
        report: Callable[[JobInfo, AgentId], AgentReport],
        readiness: HostReadiness,
    ) -> None:
        """`head` is where the agent has found the head; `report` collects the facts about the host.

        readiness:  of the host, as it is known from earlier heads
        """
        self._agent = agent
        self._job = job
        self._token = token
        self._environ = environ
        self._report = report
        self._turn = socket.socket(socket.AF_UNIX)  # the right to run --host-check, which one agent of each host has
        self._readiness = readiness
        self._staging: HostStaging | None = None
        self._report_again: Task[AgentEvent] = lambda is_stopped: iter(())  # once the host has the environment
        if job.stage is not None:
            from jaxrun.node.agent.host_staging import HostStaging

            self._staging = HostStaging(job.stage, agent, token, head, environ)

    def start_from_copies(self, setup: WorkerSetup) -> WorkerSetup:
        """Return the setup with copies in place of their sources, if something is staged. Raises UnavailableError."""
        return setup if self._staging is None else self._staging.start_from_copies(setup)

    @contextlib.contextmanager
    def serve_hosts(self) -> Iterator[HostServers]:
        """Let other hosts reach this one. Raises UnavailableError if it has no port left."""
        with contextlib.ExitStack() as stack:
            peers = copies = None
            if self._job.probe:
                from jaxrun.node.agent.host_probe import PeerServer

                peers = stack.enter_context(contextlib.closing(PeerServer(peer_token(self._token))))
            if self._staging is not None:
                copies = stack.enter_context(contextlib.closing(self._staging.listen()))
            yield HostServers(peers, copies)

    def begin_check(self, attempt: int, ranks: Sequence[int]) -> Guard | None:
        """Fork the guard of --host-check if this agent must run it; another agent of its host may do so.

        `ranks` are the agent's. An agent that waits on a spare host, for attempt 0, runs no check.
        """
        if self._job.host_check is None or not attempt:
            return None
        self._turn.close()
        self._turn = socket.socket(socket.AF_UNIX)  # in the abstract namespace, until the next attempt
        name = sha256(f"{self._token} {os.uname().nodename} {attempt}".encode()).hexdigest()
        try:
            self._turn.bind(f"\0{name}")
        except OSError:
            return None
        return Guard(job_marker(self._job.job_id), ranks)

    # ---- tasks

    def report(
        self,
        attempt: int,
        ranks: Sequence[int],
        servers: HostServers,
        is_stopped: Callable[[], bool],
        *,
        runs_check: bool,
    ) -> Iterator[AgentEvent]:
        """Wait for the GPUs' memory, check the host, report it, and send facts about it if the head asks for them.

        As long as the host lacks the environment, only that is reported, and the rest once it is there.
        """
        if self._staging is not None and self._staging.lacks_environment:
            self._report_again = partial(self.report, attempt, ranks, servers, runs_check=runs_check)
            found = self._report(self._job, self._agent)
            yield replace(found, attempt=attempt, stage_port=_port(servers.copies), lacks_environment=True)
            return
        check, turn = self._job.host_check if runs_check else None, CheckTurn(attempt, ranks[0] if ranks else 0)
        failure = self._readiness.wait(check, turn, partial(_log, ranks), is_stopped)
        if failure is None:
            return
        found = self._report(self._job, self._agent)
        yield replace(found, attempt=attempt, check_failure=failure, stage_port=_port(servers.copies))
        if servers.peers is not None:
            from jaxrun.node.agent.host_probe import collect_facts

            environ, seen = {**self._environ, **self._job.environment}, found.can_write_run_dir
            yield collect_facts(self._agent, environ, sees_run_dir=seen, port=servers.peers.port)
        if found.machine.seen_gpus.names and self._job.restarts:
            self._readiness.note_gpu_memory()

    def handle(self, task: HostTask, is_stopped: Callable[[], bool], servers: HostServers) -> Iterator[AgentEvent]:
        """Do a task of the head; yield nothing if it `is_stopped` before."""
        if isinstance(task, ProbePeers):
            from jaxrun.node.agent.host_probe import probe_peers

            assert servers.peers is not None
            servers.peers.start(len(task.addresses))
            yield probe_peers(self._agent, peer_token(self._token), task)
        else:
            assert self._staging is not None and servers.copies is not None
            lacked = self._staging.lacks_environment
            if copied := self._staging.copy(task, is_stopped, servers.copies):
                yield copied
                if lacked and not self._staging.lacks_environment:
                    yield from self._report_again(is_stopped)


def _port(listener: Listener | None) -> int:
    return int(listener.sockets[0].getsockname()[1]) if listener is not None else 0


def _log(ranks: Sequence[int], text: str) -> None:
    """Write to the log of the engine, because agents have no other screen between two attempts."""
    with contextlib.suppress(OSError):  # the engine may have ended
        print(f"jaxrun: {format_ranks(ranks)} on {os.uname().nodename}: {text}", file=sys.stderr, flush=True)
