"""One job on other hosts, from its starter's start to its exit code: puts door, station, head and output together."""

from __future__ import annotations

import os
from collections.abc import Mapping

from jaxrun import RUNTIME, __version__
from jaxrun.agent import orphans
from jaxrun.agent.guard import Guard
from jaxrun.agent.signals import LAUNCHER_SIGNALS, SignalPipe
from jaxrun.channel import addresses, secret
from jaxrun.channel.door import Door
from jaxrun.channel.messages import Welcome
from jaxrun.clock import Clock
from jaxrun.contract import AgentEnv
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
from jaxrun.telling import open_output, tell


def conduct(plan: Plan, environ: Mapping[str, str], directory: RunDir, guard: Guard, started: float) -> int:
    """Conduct the job that was begun at `started`, seconds since the epoch; returns the exit status of `jaxrun`."""
    token = secret.new_token()
    there = addresses.interfaces()
    offered = addresses.choose(there, plan.job.interface)
    given = {**environ, **plan.job.env}
    platforms = wanted_platforms(plan.job, given)
    everywhere = not plan.job.interface
    door = Door(offered, token, lambda proof: Welcome(proof, directory.name, platforms), everywhere=everywhere)
    with SignalPipe(LAUNCHER_SIGNALS) as signals:
        orphans.adopt()
        output = open_output(plan, environ, directory)
        clock = Clock()
        terms = _terms(plan, given, directory, addresses.describe(door.addresses, there))
        desk = Desk(_make_head(plan, terms, started), directory, clock)
        directory.record("started", started, listening=terms.offered)
        if plan.job.verbose:
            output.say(f"jaxrun: listening at {terms.offered}")
        try:
            starting = _start(plan, environ, door, token, directory)
            guard.add(starting.pid)
            station = Station(desk, door, output, signals, starting, clock, verbose=plan.job.verbose)
            ending = station.run()
            station.dismiss(0)
        except UnavailableError as error:
            ending = Ending("unavailable", (), text=str(error))
        finally:
            guard.dismiss()
            orphans.end_all()
    return tell(plan, desk.hosts, ending, started, directory, output)


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
    limits = Limits(init=job.init_timeout, job=job.timeout, grace=job.grace)
    return Head(plan.host_of, undecided, limits, "", now, Muster(terms))
