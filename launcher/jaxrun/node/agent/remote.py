"""An agent on another host than the head: connects to it, reports its host, and supervises one worker for it.

Where the job is started again after a failure, the agent stays: it ends what is left of the attempt, and reports anew.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from jaxrun import RUNTIME
from jaxrun.clock import Clock
from jaxrun.errors import NotUniformError
from jaxrun.node.agent import subreaper
from jaxrun.node.agent.agent import Agent
from jaxrun.node.agent.fork_server_keeper import ForkServerKeeper
from jaxrun.node.agent.gpus import GpuMemory
from jaxrun.node.agent.guard import Guard, job_marker
from jaxrun.node.agent.head_client import HEAD_LOST, HeadClient
from jaxrun.node.agent.host_probe import HostProbe
from jaxrun.node.agent.report import make_report, plain_address
from jaxrun.node.agent.signals import SignalPipe
from jaxrun.node.agent.spawn import Spawner
from jaxrun.node.agent.worker_group import WorkerGroup
from jaxrun.node.channel.connection import HEAD_TO_AGENT, Connection
from jaxrun.protocol.agent_messages import (
    AgentConnected,
    AgentRefused,
    AgentReport,
    AgentSignalled,
    HeadToAgent,
    JobInfo,
    NextAttempt,
    Shutdown,
    StartWorker,
)
from jaxrun.protocol.connect import HeadAddress, connect
from jaxrun.protocol.names import RANK
from jaxrun.protocol.probe_messages import ProbePeers
from jaxrun.records.output.relay import Relay
from jaxrun.spec.job.environment import inherited_job_variables
from jaxrun.spec.job.job import Job
from jaxrun.spec.job.plan import Plan, Worker

_Order = StartWorker | NextAttempt | Shutdown
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
    rank: int,
    size: int,
    timeout: float,
    environ: Mapping[str, str],
    not_found: str = "",
    *,
    command: Sequence[str] = (),
    on_lost: Callable[[str], None] = lambda text: None,
    check: Callable[[], None] = lambda: None,
) -> int:
    """Be the agent of `rank`; returns the status to end with.

    `find_head` is called again for each attempt to connect, for `timeout` seconds. UnavailableError if no head is
    found, and `not_found` explains why `find_head` returns None; NotUniformError if the job has no use for this agent.
    `command` is the program with which a person has started this agent; `on_lost` is called with a sentence where the
    head is lost before it has said that the job is over.
    `check` is called now and then until a head is found, and may raise UnavailableError.
    """
    head = connect(find_head, rank, timeout, not_found, check=check)
    address = plain_address(head.connection.getpeername()[0])
    try:
        with SignalPipe(_SIGNALS) as signals:
            subreaper.become_subreaper()
            connection: Connection[HeadToAgent] = Connection(head.connection, HEAD_TO_AGENT, head.tags)
            connection.send(AgentConnected(rank, os.uname().nodename))  # what it reports may take a while to find out
            report = partial(make_report, size, head, environ, tuple(command))
            job = _AgentJob(rank, connection, signals, environ, report)
            with HostProbe(rank, environ, connection, head.token) as probe:
                order = job.wait_for_order(probe)
            while not isinstance(order, Shutdown):
                order = job.supervise_worker(order) if isinstance(order, StartWorker) else job.report_again(order)
            if order is HEAD_LOST:
                on_lost(f"the head at {address} was lost: its host is gone, or jaxrun there was killed")
            return order.status
    finally:
        subreaper.kill_all()


class _AgentJob:
    """What an agent does for one job, order by order; `rank` is the first that it has."""

    def __init__(
        self,
        rank: int,
        connection: Connection[HeadToAgent],
        signals: SignalPipe,
        environ: Mapping[str, str],
        report: Callable[[JobInfo, int], AgentReport],
    ) -> None:
        self._rank = rank
        self._connection = connection
        self._signals = signals
        self._environ = environ
        self._report = report
        self._info = JobInfo("", "", ())
        self._fork_servers = ForkServerKeeper(environ)
        self._gpu_memory: GpuMemory | None = None

    def wait_for_order(self, probe: HostProbe | None = None) -> _Order:
        """Report what is there, and by `probe` what more is asked for; wait for what the head decides.

        Signals are reported to the head: it decides that this agent ends. Raises NotUniformError if it refuses the
        agent.
        """
        connection, signals = self._connection, self._signals
        while True:
            select.select([connection.fileno(), signals.fileno()], [], [])
            for signum in signals.receive():
                if signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                    connection.send(AgentSignalled(self._rank, signum))
            messages = connection.receive()
            for index, message in enumerate(messages, 1):
                if isinstance(message, JobInfo):
                    self._info = message
                    report = self._report(message, self._rank)
                    if report.gpu_names and message.restarts:
                        self._gpu_memory = GpuMemory.visible_with(self._environ)
                    connection.send(report)
                    if message.probe and probe is not None:
                        probe.send_facts(sees_run_dir=report.can_write_run_dir)
                if isinstance(message, ProbePeers) and probe is not None:
                    probe.probe_peers(message)
                if isinstance(message, AgentRefused):
                    raise NotUniformError(message.reason)
                if isinstance(message, StartWorker) and message.waits:
                    self._prepare(message)
                elif isinstance(message, (StartWorker, NextAttempt, Shutdown)):
                    connection.push_back(messages[index:])
                    return message
            if connection.lost_reason:
                return HEAD_LOST

    def report_again(self, order: NextAttempt) -> _Order:
        """Report for the next attempt, in which nothing of the earlier one is left, and wait for what comes."""
        self._rank = order.rank
        subreaper.kill_all(spare=self._fork_servers.pids)
        if self._gpu_memory is not None:
            self._gpu_memory.wait_until_free(self._log, self._is_stopped)
        self._connection.send(replace(self._report(self._info, self._rank), attempt=order.attempt))
        return self.wait_for_order()

    def _prepare(self, start: StartWorker) -> None:
        """Start the process from which the worker is forked that this agent may get in a later attempt."""
        plan = _plan_of_worker(start, self._info.job_id, self._environ)
        self._fork_servers.keep(self._fork_servers.start(plan) if start.fork else None, plan)

    def _log(self, text: str) -> None:
        """Write to the log of the engine, as agents have no other screen between two attempts."""
        print(f"jaxrun: rank {self._rank} on {os.uname().nodename}: {text}", file=sys.stderr, flush=True)

    def _is_stopped(self) -> bool:
        """Whether somebody asks for the end: by a signal, or the head, which sends nothing else now."""
        return self._signals.stop_requested or bool(select.select([self._connection.fileno()], [], [], 0)[0])

    def supervise_worker(self, start: StartWorker) -> _Order:
        """Start the worker and serve it until the head ends the attempt or the job, or is lost; returns its order."""
        connection = self._connection
        job_id = self._info.job_id
        guard = Guard(job_marker(job_id), f"{RANK}={start.rank}", job_id=job_id)  # forks, so it comes before any thread
        try:
            plan = _plan_of_worker(start, self._info.job_id, self._environ)
            log_dir = _make_log_dir(start.log_dir)
            fork_server = self._fork_servers.take(plan)
            workers = WorkerGroup(
                plan,
                Spawner(plan, self._environ, start.run_dir, log_dir),
                fork_server,
                new_server=(lambda: self._fork_servers.start(plan)) if start.fork else None,
            )
            relay = Relay(start.rank, connection, start.log_dir, shown=start.show_output)
            head = HeadClient(start.rank, connection, relay)
            agent = Agent(workers, head, relay, self._signals, Clock(), head)
            last = agent.run()
            self._fork_servers.keep(workers.successor, plan)
            subreaper.kill_all(spare=(guard.pid, *self._fork_servers.pids))
            agent.close()
            relay.close()
            return last if isinstance(last, (NextAttempt, Shutdown)) else HEAD_LOST
        finally:
            subreaper.kill_all(spare=(guard.pid, *self._fork_servers.pids))
            guard.disarm()


def _make_log_dir(name: str) -> Path | None:
    """The directory of the logs, which the head may have made on a file system that shows it here later."""
    if not name:
        return None
    with contextlib.suppress(OSError):
        os.mkdir(name)
    return Path(name)


def _plan_of_worker(start: StartWorker, job_id: str, environ: Mapping[str, str]) -> Plan:
    """The plan of this one worker."""
    module = start.program[0] == "-m"
    program = start.program[1:] if module else start.program
    worker = Worker(
        rank=start.rank,
        local_rank=start.local_rank,
        local_size=start.local_size,
        host=start.host,
        local_device_ids=start.local_device_ids,
    )
    return Plan(
        job=Job(program=program, module=module, **asdict(start.settings)),
        job_id=job_id,
        workers=(worker,),
        job_size=start.size,
        argv=(sys.executable, "-m", RUNTIME, *start.program),
        set_env=start.environment,
        unset_env=inherited_job_variables(environ),
        local_devices=None,
        device_names=(),
        fork=False,
        attempt=start.attempt,
        restart_reason=start.restart_reason,
    )
