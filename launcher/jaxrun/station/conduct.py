"""One job on other hosts, from its starter's start to its exit code: puts door, station, head and output together."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from jaxrun import RUNTIME, __version__
from jaxrun.agent import orphans
from jaxrun.agent.guard import Guard
from jaxrun.agent.signals import LAUNCHER_SIGNALS, SignalPipe
from jaxrun.channel import addresses, secret
from jaxrun.channel.door import Door
from jaxrun.channel.messages import Welcome
from jaxrun.clock import Clock
from jaxrun.contract import AgentEnv
from jaxrun.control import Control
from jaxrun.desk import Desk
from jaxrun.errors import UnavailableError
from jaxrun.head.events import Ending, Limits
from jaxrun.head.head import Head
from jaxrun.head.muster import Muster, Terms
from jaxrun.head.uniform import Expected
from jaxrun.planning.layout import wanted_platforms
from jaxrun.planning.plan import Plan
from jaxrun.records.rundir import RunDir
from jaxrun.station.starting import Starting
from jaxrun.station.station import Station
from jaxrun.telling import decide, open_output, tell


@dataclass(frozen=True, slots=True)
class Meeting:
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


def conduct(
    plan: Plan,
    environ: Mapping[str, str],
    directory: RunDir,
    guard: Guard,
    started: float,
    meeting: Meeting | None = None,
) -> int:
    """Conduct the job that was begun at `started`, seconds since the epoch; returns the exit status of `jaxrun`."""
    meeting = meeting or Meeting(secret.new_token())
    there = addresses.interfaces()
    given = {**environ, **plan.job.env}
    door = _open_door(plan, given, there, directory, meeting)
    if meeting.announce is not None:
        meeting.announce(addresses.write(door.addresses))
    with SignalPipe(LAUNCHER_SIGNALS) as signals:
        orphans.adopt()
        output = open_output(plan, environ, directory)
        clock = Clock()
        terms = _terms(plan, given, directory, addresses.describe(door.addresses, there))
        desk = Desk(_make_head(plan, terms, started), directory, clock)
        control = Control.of(environ, desk)
        directory.record("started", started, listening=terms.offered)
        if plan.job.verbose:
            output.say(f"jaxrun: listening at {terms.offered}")
        station = None
        try:
            starting = _start(plan, environ, door, meeting.token, directory)
            guard.add(starting.pid)
            station = Station(
                desk,
                door,
                output,
                signals,
                starting,
                clock,
                verbose=plan.job.verbose,
                attached=meeting.attached,
                orders=(control.fileno(), control.hear) if control else None,
            )
            decided = decide(plan, desk.hosts, station.run(), started)
        except UnavailableError as error:
            decided = decide(plan, desk.hosts, Ending("unavailable", (), text=str(error)), started)
        try:
            return tell(decided, directory, output)
        finally:
            meeting.retract()
            if station is not None:
                # The last thing, as an engine may kill all processes once the first has ended, this one too.
                station.dismiss(decided.exit_code if meeting.attached else 0)
                station.end_starter(hurry=decided.exit_code != 0)
                station.close()
            orphans.end_all(spare=guard.pid)
            guard.dismiss()


def _open_door(
    plan: Plan, given: Mapping[str, str], there: Sequence[addresses.Interface], directory: RunDir, meeting: Meeting
) -> Door:
    offered = addresses.choose(there, plan.job.interface)
    platforms = wanted_platforms(plan.job, given)
    return Door(
        offered,
        meeting.token,
        lambda proof: Welcome(proof, directory.name, platforms),
        everywhere=not plan.job.interface,
        port=meeting.port,
    )


def _start(plan: Plan, environ: Mapping[str, str], door: Door, token: str, directory: RunDir) -> Starting:
    """Start what starts the agents. UnavailableError where it cannot be."""
    starter = plan.starter
    assert starter is not None
    told = AgentEnv(plan.job_id, addresses.write(door.addresses), token, starter.engine, plan.job.init_timeout)
    env = {**plan.base_env(environ), **starter.set_env, **told.to_env()}
    for name in starter.unset_env:
        env.pop(name, None)
    try:
        return Starting(starter.title, starter.argv, env, directory.path)
    except OSError as error:
        raise UnavailableError(f"{starter.argv[0]} could not be started: {error.strerror}") from None


def _terms(plan: Plan, given: Mapping[str, str], directory: RunDir, offered: str) -> Terms:
    return Terms(
        job=plan.job,
        job_id=plan.job_id,
        size=len(plan.workers),
        version=__version__,
        directory=os.getcwd(),
        program=plan.argv[plan.argv.index(RUNTIME) + 1 :],
        given=given,
        run_dir=directory.name,
        offered=offered,
    )


def _make_head(plan: Plan, terms: Terms, now: float) -> Head:
    job = plan.job
    undecided = Expected(terms.size, plan.job_id, job.platform, None)
    limits = Limits(init=job.init_timeout, job=job.timeout, grace=job.grace, stall=job.stall_timeout)
    return Head(plan.host_of, undecided, limits, "", now, Muster(terms), job.lockstep, job.chaos)
