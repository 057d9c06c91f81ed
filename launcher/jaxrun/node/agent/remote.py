"""An agent on another host than the head: connects to it, reports its host, and supervises workers for it.

Where the job is started again after a failure, the agent stays: it ends what is left of the attempt, and reports anew.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from jaxrun.clock import Clock
from jaxrun.errors import EXIT_SIGNAL_BASE, EXIT_UNAVAILABLE, NotUniformError, UnavailableError
from jaxrun.node.agent.agent import MESSAGES, SIGNALS, Agent
from jaxrun.node.agent.agent_report import make_report, plain_address
from jaxrun.node.agent.gpus import GpuMemory
from jaxrun.node.agent.guard import Guard, job_marker
from jaxrun.node.agent.host_tasks import HostTasks
from jaxrun.node.agent.pipes import Relay
from jaxrun.node.agent.process_tree import become_subreaper, kill_all
from jaxrun.node.agent.signals import SignalPipe
from jaxrun.node.agent.spawn import setup_of_orders
from jaxrun.node.agent.worker_group import ForkServers, WorkerGroup
from jaxrun.node.channel.connection import HEAD_TO_AGENT, Connection
from jaxrun.node.channel.event_loop import EventLoop
from jaxrun.node.channel.silence import HostWatch, SilenceLimit
from jaxrun.protocol.agent_id import AgentId
from jaxrun.protocol.agent_messages import (
    AgentConnected,
    AgentRefused,
    AgentReport,
    AgentSignalled,
    ClockProbe,
    ClockReply,
    HeadToAgent,
    JobInfo,
    NextAttempt,
    OutputCredit,
    Shutdown,
    StartFailed,
    StartWorkers,
    ToRanks,
)
from jaxrun.protocol.auth import derive_rank_token
from jaxrun.protocol.connect import HeadAddress, connect
from jaxrun.protocol.probe_messages import ProbePeers
from jaxrun.protocol.shared_memory import remove_shared_directory, snapshot_directory
from jaxrun.protocol.staging import CopyStaged
from jaxrun.text import format_ranks

HEAD_LOST = Shutdown(EXIT_UNAVAILABLE)  # sentinel, which no head sends; compare with `is`
_Order = StartWorkers | NextAttempt | Shutdown
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
) -> int:
    """Be the agent of `ranks` of a job of this size, at first; returns the status to end with.

    `find_head` is called again for each attempt to connect, for `timeout` seconds. UnavailableError if no head is
    found, and `not_found` explains why `find_head` returns None; NotUniformError if the job has no use for this agent.
    `command` is the program with which a person has started this agent; `by_terminal`: a second Ctrl-C ends it at once.
    `on_lost` is called with a sentence where the head is lost before it has said that the job is over.
    `check` is called now and then until a head is found, and may raise UnavailableError; then `on_found`, once.
    `on_failed_round` is called as by `connect`.
    """
    agent = AgentId(ranks[0])  # which is another agent's in no job, as each rank is in one place
    name = format_ranks(ranks)
    head = connect(find_head, agent, timeout, not_found, name=name, check=check, on_failed_round=on_failed_round)
    on_found()
    address = plain_address(head.connection.getpeername()[0])
    try:
        with SignalPipe(_SIGNALS) as signals:
            become_subreaper()
            connection: Connection[HeadToAgent] = Connection(head.connection, HEAD_TO_AGENT, head.tags)
            connection.send(AgentConnected(agent, os.uname().nodename))  # what it reports takes a while to find out
            report = partial(make_report, size, head, environ, tuple(command))
            job = _AgentJob(agent, ranks, connection, head.token, signals, environ, report, by_terminal=by_terminal)
            order = job.wait_for_order()
            while not isinstance(order, Shutdown):
                order = job.report_again(order) if isinstance(order, NextAttempt) else job.supervise_workers(order)
            job.remove_snapshots(order)
            if order is HEAD_LOST:
                on_lost(f"the head at {address} was lost: its host is gone, or jaxrun there was killed")
            return order.status
    finally:
        kill_all()


class _AgentJob:
    """What an agent does for one job, order by order; `ranks` are those that it has at first."""

    def __init__(
        self,
        agent: AgentId,
        ranks: Sequence[int],
        connection: Connection[HeadToAgent],
        token: str,
        signals: SignalPipe,
        environ: Mapping[str, str],
        report: Callable[[JobInfo, AgentId], AgentReport],
        *,
        by_terminal: bool,
    ) -> None:
        self._agent = agent
        self._ranks = tuple(ranks)
        self._connection = connection
        self._token = token
        self._signals = signals
        self._environ = environ
        self._tasks = HostTasks(agent, connection, token, environ, report)
        self._stops_left = 1 if by_terminal else None  # until a signal that asks for the end does not ask the head
        self._check_head: Callable[[], float | None] = lambda: None  # whether its host is lost; returns when again
        self._fork_servers = ForkServers()
        self._gpu_memory: GpuMemory | None = None
        self._snapshots = ""  # the directory of those on this host, once it has had ranks

    def wait_for_order(self) -> _Order:
        """Report what is there, and what more is asked for; wait for what the head decides.

        Signals are reported to the head: it decides that this agent ends. Raises NotUniformError if it refuses the
        agent.
        """
        with self._tasks.threads:
            return self._wait_for_order()

    def _wait_for_order(self) -> _Order:
        connection, signals, tasks = self._connection, self._signals, self._tasks
        while True:
            wait = 0.0 if connection.has_messages else self._check_head()
            select.select([connection.fileno(), signals.fileno()], [], [], wait)
            for signum in signals.receive():
                if signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP) and (order := self._on_stop(signum)):
                    return order
            messages = connection.receive()
            for index, message in enumerate(messages, 1):
                match message:
                    case JobInfo():
                        tasks.info = message
                        closed = (connection.peer[0], message.closed_port, *connection.peer[2:])
                        watch = HostWatch(SilenceLimit.of_agent(message.host_timeout), closed, time.monotonic)
                        self._check_head = partial(watch.poll, (connection,))
                        connection.push_back(messages[index:])
                        report = tasks.report(message.attempt, self._ranks, self._is_stopped)
                        if report is not None and report.machine.seen_gpus.names and message.restarts:
                            self._gpu_memory = GpuMemory(self._environ)
                        break
                    case CopyStaged() if index < len(messages):
                        pass  # the head wants something else by now
                    case ProbePeers() | CopyStaged():
                        tasks.handle(message, self._is_stopped)
                    case AgentRefused():
                        raise NotUniformError(message.reason)
                    case StartWorkers(waits=True):
                        self._prepare(message)
                    case StartWorkers() | NextAttempt() | Shutdown():
                        connection.push_back(messages[index:])
                        return message
            if connection.lost_reason:
                return HEAD_LOST

    def report_again(self, order: NextAttempt) -> _Order:
        """Report for the next attempt, in which nothing of the earlier one is left, and wait for what comes."""
        self._ranks = order.ranks
        kill_all(keep=self._fork_servers.pids)
        if self._gpu_memory is not None:
            self._gpu_memory.wait_until_free(self._log, self._is_stopped)
        with self._tasks.threads:
            self._tasks.report(order.attempt, self._ranks, self._is_stopped)
            return self._wait_for_order()

    def remove_snapshots(self, order: Shutdown) -> None:
        if self._snapshots and not order.job_goes_on:
            remove_shared_directory(self._snapshots)

    def _on_stop(self, signum: int) -> Shutdown | None:
        """A signal asks for the end: the head decides, unless somebody at a terminal insists."""
        if self._stops_left == 0:
            return Shutdown(EXIT_SIGNAL_BASE + signum)
        if self._stops_left is not None:
            self._stops_left -= 1
        self._connection.send(AgentSignalled(self._agent, signum))
        return None

    def _prepare(self, order: StartWorkers) -> None:
        """Start the process that forks the workers which this agent may get in a later attempt."""
        if order.workers[0].fork and self._tasks.info.stage is None:
            self._fork_servers.prepare(setup_of_orders(order.workers, self._environ, ""))

    def _log(self, text: str) -> None:
        """Write to the log of the engine, as agents have no other screen between two attempts."""
        with contextlib.suppress(OSError):  # of an engine that has ended
            print(f"jaxrun: {format_ranks(self._ranks)} on {os.uname().nodename}: {text}", file=sys.stderr, flush=True)

    def _is_stopped(self) -> bool:
        """Whether somebody asks for the end: by a signal, or the head, which sends nothing else now but beats."""
        self._check_head()
        self._connection.push_back(orders := self._connection.receive())
        return self._signals.stop_requested or bool(orders or self._connection.lost_reason)

    def supervise_workers(self, order: StartWorkers) -> _Order:
        """Start the workers and serve them until the head ends attempt or job, or is lost; returns its next order."""
        starts = order.workers
        job_id, first = self._tasks.info.job_id, starts[0]
        self._snapshots = snapshot_directory(job_id, first.worker.host)
        # Forks, so it comes before any thread.
        guard = Guard(job_marker(job_id), self._ranks, job_id=job_id, snapshots=self._snapshots)
        try:
            setup = setup_of_orders(starts, self._environ, derive_rank_token(self._token))
            try:
                setup = self._tasks.start_from_copies(setup)
            except UnavailableError as error:  # the head ends the attempt
                self._connection.send(StartFailed(str(error)))
            server = self._fork_servers.take(setup, start=first.fork and len(starts) > 1)  # one import of jax for all
            successors = self._fork_servers if first.fork and self._tasks.info.restarts else None
            workers = WorkerGroup(setup, server, successors=successors)
            shown = [start.worker.rank for start in starts if start.show_output]
            relay = Relay(self._ranks, self._connection, first.log_dir, shown=shown)
            clock = Clock()
            loop = EventLoop(clock)
            agent = Agent(loop, workers, relay, self._connection.send, clock)
            guard.attach(loop, SIGNALS, relay.print_line)
            following = self._serve(loop, agent, relay)
            kill_all(keep=(guard.pid, *self._fork_servers.pids))
            agent.close()
            loop.close()
            relay.close()
            return following
        finally:
            kill_all(keep=(guard.pid, *self._fork_servers.pids))
            guard.disarm()

    def _serve(self, loop: EventLoop, agent: Agent, relay: Relay) -> _Order:
        """Run the agent until the head's last order, or its loss, by which the workers are killed."""
        last: _Order | None = None
        ranks = self._ranks

        def kill_workers(order: Shutdown) -> Shutdown:
            for signum in (signal.SIGSTOP, signal.SIGKILL):
                agent.signal_all(signum)
            return order

        def on_orders() -> None:
            nonlocal last
            for message in self._connection.receive():
                match message:
                    case OutputCredit():
                        relay.add_credit(message.bytes)
                    case NextAttempt() | Shutdown():
                        last = message
                    case ToRanks():
                        agent.execute(message.ranks, message.order)
                    case ClockProbe():
                        self._connection.send(ClockReply(self._agent, message.asked_at, time.time()))
                    case JobInfo() | AgentRefused() | StartWorkers() | ProbePeers() | CopyStaged():
                        pass  # which come before the workers start
                    case _:
                        agent.execute(ranks, message)
            if self._connection.lost_reason and last is None:
                last = kill_workers(HEAD_LOST)

        def on_signals() -> None:
            nonlocal last
            for signum in self._signals.receive():
                if signum == signal.SIGCHLD:
                    agent.on_child_exit()
                elif signum in (signal.SIGUSR1, signal.SIGUSR2):
                    agent.signal_all(signum)
                elif order := self._on_stop(signum):
                    last = kill_workers(order)

        loop.add_reader(self._signals.fileno(), SIGNALS, on_signals)
        loop.add_reader(self._connection.fileno(), MESSAGES, on_orders)
        loop.add_poller(self._check_head)
        loop.add_poller(relay.flush_due)
        agent.start()
        on_orders()  # those that came together with the order to start are not announced by the descriptor
        while last is None:
            loop.run_once()
            if self._connection.lost_reason:
                on_orders()
        return last
