"""The life of an agent on another host: it finds the head, reports, is told what to start, and serves it to its end."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from jaxrun import RUNTIME, __version__
from jaxrun.agent import subreaper
from jaxrun.agent.agent import Agent
from jaxrun.agent.guard import Guard, job_marker
from jaxrun.agent.head_client import HeadClient
from jaxrun.agent.signals import SignalPipe
from jaxrun.agent.spawn import Spawner
from jaxrun.agent.worker_group import WorkerGroup
from jaxrun.channel import addresses
from jaxrun.channel.connect import HeadAddress, HeadConnection, connect
from jaxrun.channel.connection import HEAD_TO_AGENT, Connection
from jaxrun.clock import Clock
from jaxrun.errors import EXIT_UNAVAILABLE
from jaxrun.job.devices import probe_machine
from jaxrun.job.environment import inherited_job_variables
from jaxrun.job.job import Job
from jaxrun.job.plan import Plan, Worker
from jaxrun.output.relay import Relay
from jaxrun.protocol.agent_messages import AgentReport, AgentSignalled, HeadToAgent, Shutdown, StartWorker
from jaxrun.protocol.env import AgentEnv
from jaxrun.protocol.names import RANK
from jaxrun.rundir.rundir import JOB_FILE

_SIGNALS = (
    signal.SIGCHLD,
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
)


def run_from_env(env: AgentEnv, rank: int, size: int, environ: Mapping[str, str]) -> int:
    """Be the agent of `rank`; returns the status to end with. UnavailableError if the head cannot be found."""
    offer = HeadAddress(env.job_id, env.token, addresses.parse_addresses(env.head))
    return run(lambda: offer, rank, size, env.init_timeout, environ)


def run(
    find: Callable[[], HeadAddress | None],
    rank: int,
    size: int,
    timeout: float,
    environ: Mapping[str, str],
    why_none: str = "",
) -> int:
    """The same where the head is still to be found: `find` is asked again and again, `why_none` says where it looks."""
    found = connect(find, rank, timeout, why_none)
    guard = Guard(job_marker(found.job_id), f"{RANK}={rank}")  # forks, so it comes before any thread
    try:
        with SignalPipe(_SIGNALS) as signals:
            subreaper.become_subreaper()
            line: Connection[HeadToAgent] = Connection(found.connection, HEAD_TO_AGENT)
            line.send(_report(rank, size, found, environ))
            begin = _wait_start(rank, line, signals)
            return (
                begin
                if isinstance(begin, int)
                else _supervise_worker(begin, found.job_id, line, signals, environ, guard)
            )
    finally:
        subreaper.kill_all(spare=guard.pid)
        guard.disarm()


def _wait_start(rank: int, line: Connection[HeadToAgent], signals: SignalPipe) -> StartWorker | int:
    """What to start, or the status to end with. That this agent is to end is for the head to decide."""
    while True:
        select.select([line.fileno(), signals.fileno()], [], [])
        for number in signals.receive():
            if number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                line.send(AgentSignalled(rank, number))
        messages = line.receive()
        for index, message in enumerate(messages, 1):
            if isinstance(message, StartWorker):
                line.push_back(messages[index:])
                return message
            if isinstance(message, Shutdown):
                return message.status
        if line.lost_reason:
            return EXIT_UNAVAILABLE


def _supervise_worker(
    begin: StartWorker,
    job_id: str,
    line: Connection[HeadToAgent],
    signals: SignalPipe,
    environ: Mapping[str, str],
    guard: Guard,
) -> int:
    """Start the worker and serve it until the head has nothing more to say."""
    plan = plan_of(begin, job_id, environ)
    relay = Relay(begin.rank, line, begin.log_dir, shown=begin.show_output)
    superior = HeadClient(begin.rank, line, relay)
    logs = Path(begin.log_dir) if begin.log_dir else None
    crew = WorkerGroup(plan, Spawner(plan, environ, begin.run_dir, logs))
    orders = (line.fileno(), superior.receive)
    agent = Agent(crew, superior, relay, signals, Clock(), orders)
    last = agent.run()
    subreaper.kill_all(spare=guard.pid)
    agent.close()
    relay.close()
    line.close()
    return last.status if isinstance(last, Shutdown) else EXIT_UNAVAILABLE


def plan_of(begin: StartWorker, job_id: str, environ: Mapping[str, str]) -> Plan:
    """The plan for this one worker."""
    module = begin.program[0] == "-m"
    program = begin.program[1:] if module else begin.program
    worker = Worker(
        rank=begin.rank,
        local_rank=begin.local_rank,
        local_size=begin.local_size,
        host=begin.host,
        local_device_ids=begin.local_device_ids,
    )
    return Plan(
        job=Job(program=program, module=module, init_timeout=begin.init_timeout, lockstep=begin.lockstep),
        job_id=job_id,
        workers=(worker,),
        job_size=begin.size,
        argv=(sys.executable, "-m", RUNTIME, *begin.program),
        set_env=begin.environment,
        unset_env=inherited_job_variables(environ),
        local_devices=None,
        device_names=(),
        fork=False,
    )


def _report(rank: int, size: int, found: HeadConnection, environ: Mapping[str, str]) -> AgentReport:
    welcome = found.welcome
    machine = probe_machine(welcome.platforms, environ)
    platform = next((name for name, gpus in machine.gpus.items() if gpus.names), "")
    gpus = machine.gpus.get(platform)
    return AgentReport(
        rank=rank,
        size=size,
        host=machine.host,
        boot_id=Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        pid=os.getpid(),
        time=time.time(),
        jaxrun_version=__version__,
        address=_plain(found.connection.getsockname()[0]),
        head_address=_plain(found.connection.getpeername()[0]),
        directory=os.getcwd(),
        cpus=machine.cores,
        gpu_platform=platform,
        gpu_names=gpus.names if gpus else (),
        gpu_ids=gpus.ids if gpus else (),
        gpu_limit=gpus.visible if gpus else "",
        tpu=machine.tpu,
        cuda_plugin=machine.cuda_plugin,
        can_write_run_dir=bool(welcome.run_dir) and _is_of_job(Path(welcome.run_dir), found.job_id),
    )


def _plain(ip: str) -> str:
    """An IPv4 address as such, where a socket for both families shows it as one of IPv6."""
    return ip.removeprefix("::ffff:")


def _is_of_job(run_dir: Path, job_id: str) -> bool:
    try:
        return job_id in (run_dir / JOB_FILE).read_text() and os.access(run_dir, os.W_OK)
    except OSError:
        return False
