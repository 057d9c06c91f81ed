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

from jaxrun.clock import Clock
from jaxrun.errors import UnavailableError
from jaxrun.files.shared_memory import remove_shared_directory, snapshot_directory
from jaxrun.node.agent.agent import SIGNALS, Agent
from jaxrun.node.agent.agent_report import make_report, plain_address, ssh_address
from jaxrun.node.agent.agent_states import (
    HEAD_LOST,
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
from jaxrun.protocol.connect import HeadAddress, connect
from jaxrun.text import format_ranks

_SIGNALS = (
    signal.SIGCHLD,
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
)


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
) -> Shutdown:
    """Be the agent of `ranks` of a job of this size, at first; returns the head's last order, which has the status.

    `find_head` is called again for each attempt to connect, for `timeout` seconds. UnavailableError if no head is
    found, and `not_found` explains why `find_head` returns None; NotUniformError if the job has no use for this agent.
    `command` is the program with which a person has started this agent; `by_terminal`: a second Ctrl-C ends it at once.
    `on_lost` is called with a sentence where the head is lost before it has said that the job is over.
    `check` is called now and then until a head is found, and may raise UnavailableError; then `on_found`, once.
    `on_failed_round` is called as by `connect`. `tunnel` is an address of this host that ssh forwards to the head.
    """
    agent = AgentId(ranks[0])  # which is another agent's in no job, as each rank is in one place
    name = format_ranks(ranks)
    head = connect(find_head, agent, timeout, not_found, name=name, check=check, on_failed_round=on_failed_round)
    on_found()
    try:
        with SignalPipe(_SIGNALS) as signals:
            become_subreaper()
            connection: Connection[HeadToAgent] = Connection(head.connection, HEAD_TO_AGENT, head.tags)
            connection.send(AgentConnected(agent, os.uname().nodename))  # what it reports takes a while to find out
            link = HeadLink(agent, connection, signals, by_terminal=by_terminal)
            address = plain_address(connection.peer[0])
            is_tunnelled = Address(address, connection.peer[1]) == tunnel
            own = ssh_address(environ) if is_tunnelled else plain_address(head.connection.getsockname()[0])
            report = partial(make_report, size, own, address, environ, tuple(command))
            with contextlib.closing(EventLoop()) as loop:
                info = Connecting(link, loop).run()
            if isinstance(info, JobInfo):
                tasks = HostTasks(agent, info, Address(address, connection.peer[1]), head.token, environ, report)
                end = _AgentJob(link, info, tasks, head.token, environ, probes_head=not is_tunnelled).run(ranks)
            else:
                end = info
            if end is HEAD_LOST:
                on_lost(f"the head at {address} was lost: its host is gone, or jaxrun there was killed")
            return end
    finally:
        kill_all()


class _AgentJob:
    """The work of an agent for one job, attempt by attempt."""

    def __init__(
        self,
        link: HeadLink,
        info: JobInfo,
        tasks: HostTasks,
        token: str,
        environ: Mapping[str, str],
        *,
        probes_head: bool,
    ) -> None:
        self._link = link
        self._info = info
        self._tasks = tasks
        self._token = token
        self._environ = environ
        peer = link.connection.peer
        closed = (peer[0], info.closed_port, *peer[2:]) if probes_head else None
        watch = HostWatch(SilenceLimit.of_agent(info.host_timeout), closed, time.monotonic)
        self._check_head: CheckHead = partial(watch.poll, (link.connection,))
        self._fork_server = OwnForkServer()
        self._snapshots = ""  # the directory of this host's snapshots, once it has had ranks

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
        if self._snapshots and not order.job_goes_on:
            remove_shared_directory(self._snapshots)
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
            agent = Agent(loop, workers, relay, self._link.connection.send, clock)
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
