"""An agent in a process of its own: connects to the head, reports its host, and supervises workers for it.

If the job is started again after a failure, the agent stays: it ends the rest of the attempt, and reports again.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from msgspec import Struct

from jaxrun.clock import Clock
from jaxrun.errors import EXIT_SIGNAL_BASE, UnavailableError
from jaxrun.files.shared_memory import remove_shared_directory, snapshot_directory
from jaxrun.node.agent.agent import SIGNALS, Agent
from jaxrun.node.agent.agent_report import make_report, plain_address, ssh_address
from jaxrun.node.agent.agent_states import (
    HEAD_LOST,
    STOPPING,
    CheckHead,
    Connecting,
    HeadLink,
    Order,
    Supervising,
    WaitingForOrders,
)
from jaxrun.node.agent.guard import Guard, job_marker
from jaxrun.node.agent.host_tasks import HostTasks
from jaxrun.node.agent.pipes import Relay
from jaxrun.node.agent.process_tree import become_subreaper, kill_all
from jaxrun.node.agent.signals import SignalPipe
from jaxrun.node.agent.spawn import setup_of_orders
from jaxrun.node.agent.worker_group import OwnForkServer, WorkerGroup
from jaxrun.node.channel.connection import HEAD_TO_AGENT, Connection
from jaxrun.node.channel.event_loop import EventLoop
from jaxrun.node.channel.silence import HostWatch, SilenceLimit
from jaxrun.protocol.addresses import Address
from jaxrun.protocol.agent_id import AgentId
from jaxrun.protocol.agent_messages import (
    AgentConnected,
    HeadToAgent,
    JobInfo,
    NextAttempt,
    Shutdown,
    StartFailed,
    StartWorkers,
)
from jaxrun.protocol.auth import derive_rank_token
from jaxrun.protocol.connect import HeadAddress, HeadConnection, connect
from jaxrun.protocol.job_record import JobRecord
from jaxrun.text import format_ranks, format_seconds

_ROUND_S = 1.0  # for the addresses of a head that is looked for again, before its name is looked up anew
_SIGNALS = (
    signal.SIGCHLD,
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
)


class HeadSearch(Struct, frozen=True):
    """How an agent that has lost its head looks for one that takes its place (--wait-hosts).

    seconds:  for how long
    notify:   is called with what people are to know
    begin:    is called when a search begins; returns the `on_failed_round` of `connect`
    """

    seconds: float
    notify: Callable[[str], None]
    begin: Callable[[], Callable[[str], None]]


def run(
    find_head: Callable[[], HeadAddress | None],
    ranks: Sequence[int],
    size: int,
    timeout: float,
    environ: Mapping[str, str],
    not_found: str = "",
    *,
    command: Sequence[str] = (),
    by_terminal: bool = False,
    on_lost: Callable[[str], None] = lambda text: None,
    check: Callable[[], None] = lambda: None,
    on_found: Callable[[], None] = lambda: None,
    on_failed_round: Callable[[str], None] = lambda why: None,
    tunnel: Address | None = None,
    search: HeadSearch | None = None,
) -> Shutdown:
    """Be the agent of `ranks` of a job of this size, at first; returns the head's last order, which has the status.

    `find_head` is called again for each attempt to connect, for `timeout` seconds. UnavailableError if no head is
    found, and `not_found` explains why `find_head` returns None; NotUniformError if the job has no use for this agent.
    `command` is the program with which a person has started this agent; `by_terminal`: a second Ctrl-C ends it at once.
    `on_lost` is called with a sentence where the head is lost before it has said that the job is over, unless another
    one is looked for, as `search` says.
    `check` is called now and then until a head is found, and may raise UnavailableError; then `on_found`, once.
    `on_failed_round` is called as by `connect`. `tunnel` is an address of this host that ssh forwards to the head.
    """
    agent = AgentId(ranks[0])  # which is another agent's in no job, as each rank is in one place
    find = partial(connect, find_head, agent, why_none=not_found, name=format_ranks(ranks))
    head = find(timeout=timeout, check=check, on_failed_round=on_failed_round)
    on_found()
    try:
        with SignalPipe(_SIGNALS) as signals:
            become_subreaper()
            process = _AgentProcess(
                agent, ranks, size, environ, command, signals, by_terminal=by_terminal, tunnel=tunnel
            )
            with contextlib.closing(process):
                end = _serve_heads(process, head, find, search, ranks)
                signals.ignore_rest()  # who waits for this process shall learn the status that was decided
                if end is HEAD_LOST:
                    on_lost(f"{_describe_loss(process.lost_head)}: its host is gone, or jaxrun there was killed")
                return end
    finally:
        kill_all()


def _serve_heads(
    process: _AgentProcess,
    head: HeadConnection,
    find: Callable[..., HeadConnection],
    search: HeadSearch | None,
    ranks: Sequence[int],
) -> Shutdown:
    """Serve this head, and those that take its place, until one ends the job or none is left."""
    end = process.serve(head)
    while end is HEAD_LOST and search is not None:
        if process.stopped_by:  # nobody waits for this host
            return Shutdown(EXIT_SIGNAL_BASE + process.stopped_by)
        search.notify(_describe_search(process.lost_head, ranks, search.seconds))
        found = process.search(find, search)
        if isinstance(found, Shutdown):
            return found
        search.notify("the head is back")
        end = process.serve(found)
    return end


def _describe_loss(address: str) -> str:
    return f"the head at {address} was lost"


def _describe_search(address: str, ranks: Sequence[int], seconds: float) -> str:
    return (
        f"{_describe_loss(address)}; {format_ranks(ranks)} here ended, and the snapshots stay. Looking for the head "
        f"again for {format_seconds(seconds)} (--wait-hosts)"
    )


class _StoppedError(Exception):
    """A signal asks for the end of an agent that has no head."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


class _AgentProcess:
    """The agent of some ranks, for one head after the other.

    lost_head:   the address of the latest head
    stopped_by:  the latest signal that has asked the agent to end; 0 for none
    """

    def __init__(
        self,
        agent: AgentId,
        ranks: Sequence[int],
        size: int,
        environ: Mapping[str, str],
        command: Sequence[str],
        signals: SignalPipe,
        *,
        by_terminal: bool,
        tunnel: Address | None,
    ) -> None:
        self._tunnel = tunnel
        self._agent = agent
        self._ranks = ranks
        self._size = size
        self._environ = environ
        self._command = tuple(command)
        self._signals = signals
        self._by_terminal = by_terminal
        self._job: _AgentJob | None = None
        self.lost_head = ""
        self.stopped_by = 0

    def serve(self, head: HeadConnection) -> Shutdown:
        """Do what this head orders until it ends the job, or is lost: HEAD_LOST."""
        connection: Connection[HeadToAgent] = Connection(head.connection, HEAD_TO_AGENT, head.tags)
        record = self._job.record if self._job is not None else None
        # What the agent reports takes a while to find out.
        connection.send(AgentConnected(self._agent, os.uname().nodename, record))
        link = HeadLink(self._agent, connection, self._signals, by_terminal=self._by_terminal)
        address = self.lost_head = plain_address(connection.peer[0])
        at = Address(address, connection.peer[1])
        is_tunnelled = at == self._tunnel
        own = ssh_address(self._environ) if is_tunnelled else plain_address(head.connection.getsockname()[0])
        report = partial(make_report, self._size, own, address, self._environ, self._command)
        try:
            with contextlib.closing(EventLoop()) as loop:
                info = Connecting(link, loop).run()
            if not isinstance(info, JobInfo):
                return info
            tasks = HostTasks(self._agent, info, at, head.token, self._environ, report)
            job = self._find_job(info)
            job.connect(link, info, tasks, head.token, probes_head=not is_tunnelled)
            return job.run(self._ranks)
        finally:
            self.stopped_by = link.stopped_by
            connection.close()

    def _find_job(self, info: JobInfo) -> _AgentJob:
        """Return the job of this head: the one that the agent has, or another."""
        if self._job is None or self._job.job_id != info.job_id:
            self.close()
            self._job = _AgentJob(info, self._environ)
        return self._job

    def search(self, find: Callable[..., HeadConnection], search: HeadSearch) -> HeadConnection | Shutdown:
        """Look for another head; return the end of this agent if a signal asks for it. Raises UnavailableError."""

        def check() -> None:
            for signum in self._signals.receive():
                if signum in STOPPING:
                    raise _StoppedError(signum)

        guard = self._job.guard_snapshots(self._ranks) if self._job is not None else None
        try:
            return find(timeout=search.seconds, check=check, on_failed_round=search.begin(), longest_round=_ROUND_S)
        except _StoppedError as stopped:
            return Shutdown(EXIT_SIGNAL_BASE + stopped.signum)
        finally:
            if guard is not None:
                guard.disarm()

    def close(self) -> None:
        """The agent needs nothing of its job any more."""
        if self._job is not None:
            self._job.close()


class _AgentJob:
    """The work of an agent for one job, attempt by attempt."""

    _link: HeadLink
    _tasks: HostTasks
    _check_head: CheckHead

    def __init__(self, info: JobInfo, environ: Mapping[str, str]) -> None:
        self.job_id = info.job_id
        self._info = info
        self._environ = environ
        self._token = ""
        self._fork_server = OwnForkServer()
        self._snapshots = ""  # the directory of those on this host, once it has had ranks
        self._keeps_snapshots = False  # as the job continues with other agents

    def connect(self, link: HeadLink, info: JobInfo, tasks: HostTasks, token: str, *, probes_head: bool) -> None:
        """Be for this head from now on, which may take the place of another."""
        if self._token:
            tasks.continue_after(self._tasks)
            link.record = link.record or self._link.record
        self._link, self._info, self._tasks, self._token = link, info, tasks, token
        peer = link.connection.peer
        closed = (peer[0], info.closed_port, *peer[2:]) if probes_head else None
        watch = HostWatch(SilenceLimit.of_agent(info.host_timeout), closed, time.monotonic)
        self._check_head = partial(watch.poll, (link.connection,))

    @property
    def record(self) -> JobRecord | None:
        """What the latest head wants kept."""
        return self._link.record

    def guard_snapshots(self, ranks: Sequence[int]) -> Guard | None:
        """Have the snapshots removed if this agent is killed while it has no head."""
        if not self._snapshots:
            return None
        return Guard(job_marker(self.job_id), ranks, job_id=self.job_id, snapshots=self._snapshots)

    def close(self) -> None:
        """Remove the snapshots on this host, unless the job continues with them."""
        if self._snapshots and not self._keeps_snapshots:
            remove_shared_directory(self._snapshots)

    def run(self, ranks: Sequence[int]) -> Shutdown:
        """Execute the head's orders until the last one; `ranks` are the agent's first ranks."""
        order = self._wait_for_orders(self._info.attempt, ranks)
        while not isinstance(order, Shutdown):
            if isinstance(order, NextAttempt):
                ranks = order.ranks
                kill_all(keep=self._fork_server.pids)  # what the earlier attempt has left
                order = self._wait_for_orders(order.attempt, ranks)
            else:
                order = self._supervise_workers(order, ranks)
        self._keeps_snapshots = order.job_goes_on
        return order

    def _wait_for_orders(self, attempt: int, ranks: Sequence[int]) -> Order:
        """Report for this attempt, and do the head's other tasks; returns its next order."""
        tasks = self._tasks
        guard = tasks.begin_check(attempt, ranks)  # forks, so it comes before any thread
        try:
            with tasks.serve_hosts() as servers, contextlib.closing(EventLoop()) as loop:
                report = partial(tasks.report, attempt, ranks, servers, runs_check=guard is not None)
                do = partial(tasks.handle, servers=servers)
                return WaitingForOrders(self._link, loop, self._check_head, report, do, self._prepare).run()
        finally:
            if guard is not None:
                guard.disarm()

    def _prepare(self, order: StartWorkers) -> None:
        """Start the process that will fork the workers which this agent may get in a later attempt."""
        if order.workers[0].fork and self._info.stage is None:
            self._fork_server.get(setup_of_orders(order.workers, self._environ, ""))

    def _supervise_workers(self, order: StartWorkers, ranks: Sequence[int]) -> Order:
        """Start the workers and serve them until the head ends attempt or job, or is lost; returns its next order."""
        starts = order.workers
        job_id, first = self._info.job_id, starts[0]
        self._snapshots = snapshot_directory(job_id, first.worker.host)
        # Forks, so it comes before any thread.
        guard = Guard(job_marker(job_id), ranks, job_id=job_id, snapshots=self._snapshots)
        try:
            setup = setup_of_orders(starts, self._environ, derive_rank_token(self._token))
            try:
                setup = self._tasks.start_from_copies(setup)
            except UnavailableError as error:  # the head will end the attempt
                self._link.connection.send(StartFailed(str(error)))
            shares_import = len(starts) > 1 or self._info.restarts  # between several workers, or attempts
            server = self._fork_server.get(setup) if first.fork and shares_import else None
            workers = WorkerGroup(setup, server, keep_server=self._info.restarts)
            shown = [start.worker.rank for start in starts if start.show_output]
            relay = Relay(ranks, self._link.connection, first.log_dir, shown=shown)
            clock = Clock()
            loop = EventLoop(clock)
            agent = Agent(loop, workers, relay, self._link.connection.send, clock, guard)
            guard.attach(loop, SIGNALS, relay.print_line)
            following = Supervising(self._link, loop, self._check_head, agent, relay, ranks).run()
            kill_all(keep=(guard.pid, *self._fork_server.pids))
            agent.close()
            loop.close()
            relay.close()
            return following
        finally:
            kill_all(keep=(guard.pid, *self._fork_server.pids))
            guard.disarm()
