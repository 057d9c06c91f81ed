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
from jaxrun.agent import orphans
from jaxrun.agent.agent import Agent
from jaxrun.agent.crew import Crew
from jaxrun.agent.guard import Guard, job_mark
from jaxrun.agent.signals import SignalPipe
from jaxrun.agent.spawn import Spawner
from jaxrun.agent.superior import Superior
from jaxrun.channel import addresses
from jaxrun.channel.knock import Found, Offer, knock
from jaxrun.channel.line import TO_AGENT, Line
from jaxrun.channel.messages import ToAgent
from jaxrun.clock import Clock
from jaxrun.contract import AgentEnv
from jaxrun.contract.names import RANK
from jaxrun.errors import EXIT_UNAVAILABLE
from jaxrun.head.events import AgentSignalled, Begin, Dismiss, Report
from jaxrun.output.relay import Relay
from jaxrun.planning.environment import stale
from jaxrun.planning.job import Job
from jaxrun.planning.machine import look
from jaxrun.planning.plan import Plan, Worker
from jaxrun.records.rundir import JOB

_SIGNALS = (
    signal.SIGCHLD,
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
)


def serve(env: AgentEnv, rank: int, size: int, environ: Mapping[str, str]) -> int:
    """Be the agent of `rank`; returns the status to end with. UnavailableError if the head cannot be found."""
    offer = Offer(env.job_id, env.token, addresses.parse(env.head))
    return attend(lambda: offer, rank, size, env.init_timeout, environ)


def attend(
    find: Callable[[], Offer | None],
    rank: int,
    size: int,
    timeout: float,
    environ: Mapping[str, str],
    why_none: str = "",
) -> int:
    """The same where the head is still to be found: `find` is asked again and again, `why_none` says where it looks."""
    found = knock(find, rank, timeout, why_none)
    guard = Guard(job_mark(found.job_id), f"{RANK}={rank}")  # forks, so it comes before any thread
    try:
        with SignalPipe(_SIGNALS) as signals:
            orphans.adopt()
            line: Line[ToAgent] = Line(found.connection, TO_AGENT)
            line.send(_report(rank, size, found, environ))
            begin = _await_orders(rank, line, signals)
            return begin if isinstance(begin, int) else _work(begin, found.job_id, line, signals, environ, guard)
    finally:
        orphans.end_all(spare=guard.pid)
        guard.dismiss()


def _await_orders(rank: int, line: Line[ToAgent], signals: SignalPipe) -> Begin | int:
    """What to start, or the status to end with. That this agent is to end is for the head to decide."""
    while True:
        select.select([line.fileno(), signals.fileno()], [], [])
        for number in signals.take():
            if number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                line.send(AgentSignalled(rank, number))
        messages = line.receive()
        for index, message in enumerate(messages, 1):
            if isinstance(message, Begin):
                line.put_back(messages[index:])
                return message
            if isinstance(message, Dismiss):
                return message.status
        if line.lost:
            return EXIT_UNAVAILABLE


def _work(
    begin: Begin,
    job_id: str,
    line: Line[ToAgent],
    signals: SignalPipe,
    environ: Mapping[str, str],
    guard: Guard,
) -> int:
    """Start the worker and serve it until the head has nothing more to say."""
    plan = plan_of(begin, job_id, environ)
    relay = Relay(begin.rank, line, begin.log_dir, shown=begin.shown)
    superior = Superior(begin.rank, line, relay)
    logs = Path(begin.log_dir) if begin.log_dir else None
    crew = Crew(plan, Spawner(plan, environ, begin.run_dir, logs))
    orders = (line.fileno(), superior.hear)
    agent = Agent(crew, superior, relay, signals, Clock(), orders)
    last = agent.run()
    orphans.end_all(spare=guard.pid)
    agent.close()
    relay.close()
    line.close()
    return last.status if isinstance(last, Dismiss) else EXIT_UNAVAILABLE


def plan_of(begin: Begin, job_id: str, environ: Mapping[str, str]) -> Plan:
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
        unset_env=stale(environ),
        local_devices=None,
        device_names=(),
        fork=False,
    )


def _report(rank: int, size: int, found: Found, environ: Mapping[str, str]) -> Report:
    welcome = found.welcome
    machine = look(welcome.platforms, environ)
    platform = next((name for name, gpus in machine.gpus.items() if gpus.names), "")
    gpus = machine.gpus.get(platform)
    return Report(
        rank=rank,
        size=size,
        host=machine.host,
        boot_id=Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        pid=os.getpid(),
        time=time.time(),
        version=__version__,
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
        sees_run_dir=bool(welcome.run_dir) and _is_of_job(Path(welcome.run_dir), found.job_id),
    )


def _plain(ip: str) -> str:
    """An IPv4 address as such, where a socket for both families shows it as one of IPv6."""
    return ip.removeprefix("::ffff:")


def _is_of_job(run_dir: Path, job_id: str) -> bool:
    try:
        return job_id in (run_dir / JOB).read_text() and os.access(run_dir, os.W_OK)
    except OSError:
        return False
