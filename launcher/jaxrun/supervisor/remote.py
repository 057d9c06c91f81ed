"""One job on other hosts, from its starter's start to its exit code: puts door, station, head and output together."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from jaxrun import RUNTIME, __version__
from jaxrun.agent import subreaper
from jaxrun.agent.guard import Guard
from jaxrun.agent.signals import LAUNCHER_SIGNALS, SignalPipe
from jaxrun.channel import addresses
from jaxrun.channel.listener import Listener
from jaxrun.clock import Clock
from jaxrun.errors import UnavailableError
from jaxrun.head.actions import EndReason, JobOutcome
from jaxrun.head.agent_registry import AgentRegistry, JobSpec
from jaxrun.head.consistency import Expected
from jaxrun.head.events import TimeLimits
from jaxrun.head.head import Head
from jaxrun.job.layout import wanted_platforms
from jaxrun.job.plan import Plan
from jaxrun.protocol import auth
from jaxrun.protocol.agent_messages import Welcome
from jaxrun.protocol.env import AgentEnv
from jaxrun.rundir.rundir import RunDir
from jaxrun.supervisor.dispatch import Dispatcher
from jaxrun.supervisor.launch_process import LaunchProcess
from jaxrun.supervisor.parent_link import ParentLink
from jaxrun.supervisor.report import make_verdict, open_output, report_verdict
from jaxrun.supervisor.server import AgentServer


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where the agents come to: decided by the launcher, or by rank 0 of a job that somebody else started.

    port:       to listen at; 0 for any
    announce:   is told the head's addresses when it listens
    retract:    is called when nobody needs them any more
    attached:   the agents were not started by this process, and end with the job's own status
    """

    token: str
    port: int = 0
    announce: Callable[[str], None] | None = None
    retract: Callable[[], None] = lambda: None
    attached: bool = False


def run_remote(
    plan: Plan,
    environ: Mapping[str, str],
    directory: RunDir,
    guard: Guard,
    started: float,
    meeting: Endpoint | None = None,
) -> int:
    """Conduct the job that was begun at `started`, seconds since the epoch; returns the exit status of `jaxrun`."""
    meeting = meeting or Endpoint(auth.new_token())
    there = addresses.list_interfaces()
    given = {**environ, **plan.job.env}
    door = _open_listener(plan, given, there, directory, meeting)
    if meeting.announce is not None:
        meeting.announce(addresses.format_addresses(door.addresses))
    with SignalPipe(LAUNCHER_SIGNALS) as signals:
        subreaper.become_subreaper()
        output = open_output(plan, environ, directory)
        clock = Clock()
        terms = _terms(plan, given, directory, addresses.describe_addresses(door.addresses, there))
        desk = Dispatcher(_make_head(plan, terms, started), directory, clock)
        control = ParentLink.from_env(environ, desk)
        directory.record("started", started, listening=terms.listen_addresses)
        if plan.job.verbose:
            output.print_line(f"jaxrun: listening at {terms.listen_addresses}")
        station = None
        try:
            starting = _start(plan, environ, door, meeting.token, directory)
            guard.add(starting.pid)
            station = AgentServer(
                desk,
                door,
                output,
                signals,
                starting,
                clock,
                verbose=plan.job.verbose,
                attached=meeting.attached,
                orders=(control.fileno(), control.receive) if control else None,
            )
            decided = make_verdict(plan, desk.hosts, station.run(), started)
        except UnavailableError as error:
            decided = make_verdict(plan, desk.hosts, JobOutcome(EndReason.UNAVAILABLE, text=str(error)), started)
        try:
            return report_verdict(decided, directory, output)
        finally:
            meeting.retract()
            if station is not None:
                # The last thing, as an engine may kill all processes once the first has ended, this one too.
                station.shut_down_agents(decided.exit_code if meeting.attached else 0)
                station.stop_launch_process(hurry=decided.exit_code != 0)
                station.close()
            subreaper.kill_all(spare=guard.pid)
            guard.disarm()


def _open_listener(
    plan: Plan, given: Mapping[str, str], there: Sequence[addresses.Interface], directory: RunDir, meeting: Endpoint
) -> Listener:
    offered = addresses.select_interfaces(there, plan.job.interface)
    platforms = wanted_platforms(plan.job, given)
    return Listener(
        offered,
        meeting.token,
        lambda proof: Welcome(proof, directory.name, platforms),
        everywhere=not plan.job.interface,
        port=meeting.port,
    )


def _start(plan: Plan, environ: Mapping[str, str], door: Listener, token: str, directory: RunDir) -> LaunchProcess:
    """Start what starts the agents. UnavailableError where it cannot be."""
    starter = plan.launch_command
    assert starter is not None
    told = AgentEnv(
        plan.job_id, addresses.format_addresses(door.addresses), token, starter.engine, plan.job.init_timeout
    )
    env = {**plan.base_env(environ), **starter.set_env, **told.to_env()}
    for name in starter.unset_env:
        env.pop(name, None)
    try:
        return LaunchProcess(starter.title, starter.argv, env, directory.path)
    except OSError as error:
        raise UnavailableError(f"{starter.argv[0]} could not be started: {error.strerror}") from None


def _terms(plan: Plan, given: Mapping[str, str], directory: RunDir, offered: str) -> JobSpec:
    return JobSpec(
        job=plan.job,
        job_id=plan.job_id,
        size=len(plan.workers),
        version=__version__,
        directory=os.getcwd(),
        program=plan.argv[plan.argv.index(RUNTIME) + 1 :],
        user_env=given,
        run_dir=directory.name,
        listen_addresses=offered,
    )


def _make_head(plan: Plan, terms: JobSpec, now: float) -> Head:
    job = plan.job
    undecided = Expected(terms.size, plan.job_id, job.platform, None)
    limits = TimeLimits(init=job.init_timeout, job=job.timeout, grace=job.grace, stall=job.stall_timeout)
    return Head(plan.host_of, undecided, limits, "", now, AgentRegistry(terms), job.lockstep, job.chaos)
