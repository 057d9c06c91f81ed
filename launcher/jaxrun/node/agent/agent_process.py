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
from jaxrun.node.agent.host_readiness import HostReadiness
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
from jaxrun.protocol.hidden_fields import HidesFields
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


class AgentStart(HidesFields, frozen=True):
    """An agent that is started, and what it is for.

    ranks:        its ranks in the first attempt
    size:         the number of ranks of the job
    environ:      the environment of this process
    command:      the program with which a person has started the agent; empty if no person has
    by_terminal:  a second Ctrl-C ends it at once
    """

    hidden = frozenset({"environ"})

    ranks: Sequence[int]
    size: int
    environ: Mapping[str, str]
    command: Sequence[str] = ()
    by_terminal: bool = False

    @property
    def agent(self) -> AgentId:
        """Its number, which no other agent of the job has, as each rank is in one place."""
        return AgentId(self.ranks[0])


class WayToHead(Struct, frozen=True):
    """How an agent finds its head, and whom it notifies meanwhile.

    find:             returns where the head may be, for each round of attempts to connect; None if that is not known
    timeout:          seconds until the agent gives up
    why_none:         explains why `find` returns None
    check:            is called now and then until a head is found; may raise UnavailableError
    on_found:         is called once, with the first head
    on_failed_round:  is called as by `connect`
    on_lost:          is called with a sentence if the head is lost before the end of the job, and no other is awaited
    tunnel:           an address of this host that ssh forwards to the head
    search:           how to look for a head that takes the place of a lost one; None: there is none
    """

    find: Callable[[], HeadAddress | None]
    timeout: float
    why_none: str = ""
    check: Callable[[], None] = lambda: None
    on_found: Callable[[], None] = lambda: None
    on_failed_round: Callable[[str], None] = lambda why: None
    on_lost: Callable[[str], None] = lambda text: None
    tunnel: Address | None = None
    search: HeadSearch | None = None


def run(start: AgentStart, way: WayToHead) -> Shutdown:
    """Be an agent until the end of its job; returns the head's last order, which has the status.

    Raises UnavailableError if no head is found, NoPlaceError if the job runs already and takes no agent in, and
    NotUniformError if the job has no use for this agent.
    """
    find = partial(connect, way.find, start.agent, why_none=way.why_none, name=format_ranks(start.ranks))
    head = find(timeout=way.timeout, check=way.check, on_failed_round=way.on_failed_round)
    way.on_found()
    try:
        with SignalPipe(_SIGNALS) as signals:
            become_subreaper()
            with contextlib.closing(_AgentProcess(start, signals, way.tunnel)) as process:
                end = _serve_heads(process, head, find, way.search)
                signals.ignore_rest()  # who waits for this process shall learn the status that was decided
                if end is HEAD_LOST:
                    way.on_lost(f"{_describe_loss(process.lost_head)}: its host is gone, or jaxrun there was killed")
                return end
    finally:
        kill_all()


def _serve_heads(
    process: _AgentProcess, head: HeadConnection, find: Callable[..., HeadConnection], search: HeadSearch | None
) -> Shutdown:
    """Serve this head, and those that take its place, until one ends the job or none is left."""
    end = process.serve(head)
    while end is HEAD_LOST and search is not None:
        if process.stopped_by:  # nobody waits for this host
            return Shutdown(EXIT_SIGNAL_BASE + process.stopped_by)
        search.notify(_describe_search(process.lost_head, process.ranks, search.seconds))
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

    def __init__(self, start: AgentStart, signals: SignalPipe, tunnel: Address | None) -> None:
        self._start = start
        self._signals = signals
        self._tunnel = tunnel
        self._job: _AgentJob | None = None
        self.lost_head = ""
        self.stopped_by = 0

    @property
    def ranks(self) -> Sequence[int]:
        """The agent's first ranks."""
        return self._start.ranks

    def serve(self, head: HeadConnection) -> Shutdown:
        """Do what this head orders until it ends the job, or is lost: HEAD_LOST."""
        start = self._start
        connection: Connection[HeadToAgent] = Connection(head.connection, HEAD_TO_AGENT, head.tags)
        record = self._job.record if self._job is not None else None
        # What the agent reports takes a while to find out.
        connection.send(AgentConnected(start.agent, os.uname().nodename, record))
        link = HeadLink(start.agent, connection, self._signals, by_terminal=start.by_terminal)
        self.lost_head = plain_address(connection.peer[0])
        try:
            with contextlib.closing(EventLoop()) as loop:
                info = Connecting(link, loop).run()
            if not isinstance(info, JobInfo):
                return info
            job = self._find_job(info)
            return job.serve(self._orders(link, info, head, job.readiness), self.ranks)
        finally:
            self.stopped_by = link.stopped_by
            connection.close()

    def _orders(self, link: HeadLink, info: JobInfo, head: HeadConnection, readiness: HostReadiness) -> _Orders:
        """What the agent needs to execute the orders of this head."""
        start, peer = self._start, link.connection.peer
        address = plain_address(peer[0])
        at = Address(address, peer[1])
        is_tunnelled = at == self._tunnel
        own = ssh_address(start.environ) if is_tunnelled else plain_address(head.connection.getsockname()[0])
        report = partial(make_report, start.size, own, address, start.environ, tuple(start.command))
        tasks = HostTasks(start.agent, info, at, head.token, start.environ, report, readiness)
        closed = None if is_tunnelled else (peer[0], info.closed_port, *peer[2:])
        watch = HostWatch(SilenceLimit.of_agent(info.host_timeout), closed, time.monotonic)
        return _Orders(link, info, tasks, head.token, partial(watch.poll, (link.connection,)))

    def _find_job(self, info: JobInfo) -> _AgentJob:
        """Return the job of this head: the one that the agent has, or another."""
        if self._job is None or self._job.job_id != info.job_id:
            self.close()
            self._job = _AgentJob(info.job_id, self._start.environ)
        return self._job

    def search(self, find: Callable[..., HeadConnection], search: HeadSearch) -> HeadConnection | Shutdown:
        """Look for another head; return the end of this agent if a signal asks for it. Raises UnavailableError."""

        def check() -> None:
            for signum in self._signals.receive():
                if signum in STOPPING:
                    raise _StoppedError(signum)

        guard = self._job.guard_snapshots(self.ranks) if self._job is not None else None
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


class _Orders(HidesFields, frozen=True):
    """What an agent needs to execute the orders of one head.

    info:        the job, as this head knows it
    tasks:       do what the head wants to know of the host
    token:       the head's
    check_head:  gives up the connection if the head's host is silent
    """

    hidden = frozenset({"token"})

    link: HeadLink
    info: JobInfo
    tasks: HostTasks
    token: str
    check_head: CheckHead


class _AgentJob:
    """What an agent has of one job, for one head after the other.

    record:     what the latest head wants kept
    readiness:  of this host
    """

    def __init__(self, job_id: str, environ: Mapping[str, str]) -> None:
        self.job_id = job_id
        self.record: JobRecord | None = None
        self.readiness = HostReadiness(environ)
        self._environ = environ
        self._fork_server = OwnForkServer()
        self._snapshots = ""  # the directory of those on this host, once it has had ranks
        self._keeps_snapshots = False  # as the job continues with other agents

    def guard_snapshots(self, ranks: Sequence[int]) -> Guard | None:
        """Have the snapshots removed if this agent is killed while it has no head."""
        if not self._snapshots:
            return None
        return Guard(job_marker(self.job_id), ranks, job_id=self.job_id, snapshots=self._snapshots)

    def close(self) -> None:
        """Remove the snapshots on this host, unless the job continues with them."""
        if self._snapshots and not self._keeps_snapshots:
            remove_shared_directory(self._snapshots)

    def serve(self, head: _Orders, ranks: Sequence[int]) -> Shutdown:
        """Execute the head's orders until the last one; `ranks` are the agent's first ranks."""
        try:
            order = self._wait_for_orders(head, head.info.attempt, ranks)
            while not isinstance(order, Shutdown):
                if isinstance(order, NextAttempt):
                    ranks = order.ranks
                    kill_all(keep=self._fork_server.pids)  # what the earlier attempt has left
                    order = self._wait_for_orders(head, order.attempt, ranks)
                else:
                    order = self._supervise_workers(head, order)
            self._keeps_snapshots = order.job_goes_on
            return order
        finally:
            self.record = head.link.record or self.record

    def _wait_for_orders(self, head: _Orders, attempt: int, ranks: Sequence[int]) -> Order:
        """Report for this attempt, and do the head's other tasks; returns its next order."""
        tasks = head.tasks
        guard = tasks.begin_check(attempt, ranks)  # forks, so it comes before any thread
        prepare = partial(self._prepare, head.info)
        try:
            with tasks.serve_hosts() as servers, contextlib.closing(EventLoop()) as loop:
                report = partial(tasks.report, attempt, ranks, servers, runs_check=guard is not None)
                do = partial(tasks.handle, servers=servers)
                return WaitingForOrders(head.link, loop, head.check_head, report, do, prepare).run()
        finally:
            if guard is not None:
                guard.disarm()

    def _prepare(self, info: JobInfo, order: StartWorkers) -> None:
        """Start the process that will fork the workers which this agent may get in a later attempt."""
        if order.workers[0].fork and info.stage is None:
            self._fork_server.get(setup_of_orders(order.workers, self._environ, ""))

    def _supervise_workers(self, head: _Orders, order: StartWorkers) -> Order:
        """Start the workers and serve them until the head ends attempt or job, or is lost; returns its next order."""
        starts, info = order.workers, head.info
        first = starts[0]
        # An agent that has come in the place of a lost one may get other ranks than it was started with.
        ranks = [start.worker.rank for start in starts]
        self._snapshots = snapshot_directory(self.job_id, first.worker.host)
        # Forks, so it comes before any thread.
        guard = Guard(job_marker(self.job_id), ranks, job_id=self.job_id, snapshots=self._snapshots)
        try:
            setup = setup_of_orders(starts, self._environ, derive_rank_token(head.token))
            try:
                setup = head.tasks.start_from_copies(setup)
            except UnavailableError as error:  # the head will end the attempt
                head.link.connection.send(StartFailed(str(error)))
            shares_import = len(starts) > 1 or info.restarts  # between several workers, or attempts
            server = self._fork_server.get(setup) if first.fork and shares_import else None
            workers = WorkerGroup(setup, server, keep_server=info.restarts)
            shown = [start.worker.rank for start in starts if start.show_output]
            relay = Relay(ranks, head.link.connection, first.log_dir, shown=shown)
            clock = Clock()
            loop = EventLoop(clock)
            agent = Agent(loop, workers, relay, head.link.connection.send, clock, guard)
            guard.attach(loop, SIGNALS, relay.print_line)
            following = Supervising(head.link, loop, head.check_head, agent, relay, ranks).run()
            kill_all(keep=(guard.pid, *self._fork_server.pids))
            agent.close()
            loop.close()
            relay.close()
            return following
        finally:
            kill_all(keep=(guard.pid, *self._fork_server.pids))
            guard.disarm()
