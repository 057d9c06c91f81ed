"""An agent on another host than the head: connects to it, reports its host, and supervises one worker for it."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from jaxrun import RUNTIME, __version__
from jaxrun.agent import subreaper
from jaxrun.agent.agent import Agent
from jaxrun.agent.guard import Guard, job_marker
from jaxrun.agent.head_client import HEAD_LOST, HeadClient
from jaxrun.agent.signals import SignalPipe
from jaxrun.agent.spawn import Spawner
from jaxrun.agent.worker_group import WorkerGroup
from jaxrun.channel.connection import HEAD_TO_AGENT, Connection
from jaxrun.clock import Clock
from jaxrun.errors import NotUniformError
from jaxrun.job.devices import probe_machine
from jaxrun.job.environment import inherited_job_variables
from jaxrun.job.job import Job
from jaxrun.job.plan import Plan, Worker
from jaxrun.output.relay import Relay
from jaxrun.protocol.agent_messages import (
    AgentRefused,
    AgentReport,
    AgentSignalled,
    HeadToAgent,
    JobInfo,
    Shutdown,
    StartWorker,
)
from jaxrun.protocol.connect import HeadAddress, HeadConnection, connect
from jaxrun.protocol.names import RANK
from jaxrun.rundir.own_directory import open_own_directory
from jaxrun.rundir.rundir import JOB_FILE

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
    address = _plain(head.connection.getpeername()[0])
    try:
        with SignalPipe(_SIGNALS) as signals:
            subreaper.become_subreaper()
            connection: Connection[HeadToAgent] = Connection(head.connection, HEAD_TO_AGENT, head.session)
            report = partial(_report, rank, size, head, environ, tuple(command))
            job_id, order = _wait_for_order(rank, connection, signals, report)
            if isinstance(order, StartWorker):
                order = _supervise_worker(order, job_id, connection, signals, environ)
            if order is HEAD_LOST:
                on_lost(f"the head at {address} was lost: its host is gone, or jaxrun there was killed")
            return order.status
    finally:
        subreaper.kill_all()


def _wait_for_order(
    rank: int, connection: Connection[HeadToAgent], signals: SignalPipe, report: Callable[[JobInfo], AgentReport]
) -> tuple[str, StartWorker | Shutdown]:
    """Report what is there, and wait for what the head decides; returns the job's id, and that.

    Signals are reported to the head: it decides that this agent ends. Raises NotUniformError if it refuses the agent.
    """
    job_id = ""
    while True:
        select.select([connection.fileno(), signals.fileno()], [], [])
        for signum in signals.receive():
            if signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                connection.send(AgentSignalled(rank, signum))
        messages = connection.receive()
        for index, message in enumerate(messages, 1):
            if isinstance(message, JobInfo):
                job_id = message.job_id
                connection.send(report(message))
            if isinstance(message, AgentRefused):
                raise NotUniformError(message.reason)
            if isinstance(message, (StartWorker, Shutdown)):
                connection.push_back(messages[index:])
                return job_id, message
        if connection.lost_reason:
            return job_id, HEAD_LOST


def _supervise_worker(
    start: StartWorker,
    job_id: str,
    connection: Connection[HeadToAgent],
    signals: SignalPipe,
    environ: Mapping[str, str],
) -> Shutdown:
    """Start the worker and serve it until the head sends Shutdown, or is lost; returns that, or HEAD_LOST."""
    guard = Guard(job_marker(job_id), f"{RANK}={start.rank}")  # forks, so it comes before any thread
    try:
        plan = _plan_of_worker(start, job_id, environ)
        log_dir = Path(start.log_dir) if start.log_dir else None
        workers = WorkerGroup(plan, Spawner(plan, environ, start.run_dir, log_dir))
        relay = Relay(start.rank, connection, start.log_dir, shown=start.show_output)
        head = HeadClient(start.rank, connection, relay)
        agent = Agent(workers, head, relay, signals, Clock(), head)
        last = agent.run()
        subreaper.kill_all(spare=guard.pid)
        agent.close()
        relay.close()
        connection.close()
        return last if isinstance(last, Shutdown) else HEAD_LOST
    finally:
        subreaper.kill_all(spare=guard.pid)
        guard.disarm()


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
        job=Job(
            program=program,
            module=module,
            init_timeout=start.init_timeout,
            lockstep=start.lockstep,
            make_mesh=start.make_mesh,
            torch_env=start.torch_env,
            pdb=start.pdb,
            stdin=start.stdin,
        ),
        job_id=job_id,
        workers=(worker,),
        job_size=start.size,
        argv=(sys.executable, "-m", RUNTIME, *start.program),
        set_env=start.environment,
        unset_env=inherited_job_variables(environ),
        local_devices=None,
        device_names=(),
        fork=False,
    )


def _report(
    rank: int, size: int, head: HeadConnection, environ: Mapping[str, str], command: tuple[str, ...], info: JobInfo
) -> AgentReport:
    machine = probe_machine(info.platforms, environ)
    platform = next((name for name, gpus in machine.gpus.items() if gpus.names), "")
    gpus = machine.gpus.get(platform)
    return AgentReport(
        rank=rank,
        size=size,
        command=command,
        host=machine.host,
        boot_id=Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        pid=os.getpid(),
        time=time.time(),
        jaxrun_version=__version__,
        address=_plain(head.connection.getsockname()[0]),
        head_address=_plain(head.connection.getpeername()[0]),
        directory=os.getcwd(),
        cpus=machine.cores,
        gpu_platform=platform,
        gpu_names=gpus.names if gpus else (),
        gpu_ids=gpus.ids if gpus else (),
        gpu_limit=gpus.visible if gpus else "",
        tpu=machine.tpu,
        cuda_plugin=machine.cuda_plugin,
        can_write_run_dir=bool(info.run_dir) and _is_of_job(Path(info.run_dir), info.job_id),
    )


def _plain(ip: str) -> str:
    """Write an IPv4 address as such, where a socket for both families shows it as one of IPv6."""
    return ip.removeprefix("::ffff:")


def _is_of_job(run_dir: Path, job_id: str) -> bool:
    """Whether this is the run directory of the job, on this host, too, and this user's own to write to."""
    try:
        directory = open_own_directory(run_dir)
    except OSError:
        return False
    try:
        with open(os.open(JOB_FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=directory)) as file:
            return job_id in file.read() and os.access(".", os.W_OK, dir_fd=directory)
    except (OSError, ValueError):
        return False
    finally:
        os.close(directory)
