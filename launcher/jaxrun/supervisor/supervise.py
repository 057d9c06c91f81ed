"""Supervises one job from its first process to its exit code, wherever its agents are.

    LocalAgent    (local.py)    one agent in this process, with all workers    ─┐            ┌─▶ Head, which decides
                                                                                ├─ Dispatcher ─▶ events.jsonl
    RemoteAgents  (remote.py)   mpirun or srun starts agents, which connect    ─┘            └─▶ actions for the agents

The Finish action of the head ends the run; verdict/decide.py makes the verdict and the exit code from its outcome.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from jaxrun.agent.guard import Guard
from jaxrun.agent.signals import LAUNCHER_SIGNALS, SignalPipe
from jaxrun.agent.subreaper import become_subreaper, kill_all
from jaxrun.clock import Clock
from jaxrun.errors import EXIT_SOFTWARE
from jaxrun.head.actions import JobOutcome
from jaxrun.head.consistency import Expected
from jaxrun.head.head import Head
from jaxrun.head.timeouts import TimeLimits
from jaxrun.job.plan import Plan
from jaxrun.job.standard_input import explain_no_terminal
from jaxrun.output.output import Output
from jaxrun.rundir.rundir import RunDir
from jaxrun.supervisor.dispatch import Dispatcher
from jaxrun.supervisor.parent_link import ParentLink
from jaxrun.supervisor.report import open_output, report_verdict
from jaxrun.supervisor.terminal import Terminal

if TYPE_CHECKING:
    from jaxrun.head.agent_registry import AgentRegistry

_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class JobContext:
    """What the agents of a job work with; `clock` returns seconds since the epoch."""

    dispatcher: Dispatcher
    output: Output
    signals: SignalPipe
    clock: Callable[[], float]
    parent: ParentLink | None
    guard: Guard
    terminal: Terminal


class Agents(Protocol):
    """Whoever starts, watches and stops the workers of a job."""

    @property
    def registry(self) -> AgentRegistry | None:
        """Where remote agents report; None where the hosts are known from the start."""

    @property
    def listen_addresses(self) -> str:
        """Where remote agents connect, for people; empty where none do."""

    def run(self, context: JobContext) -> JobOutcome:
        """Start the workers and serve them until the head says that the job is over."""

    def stop(self, exit_code: int) -> None:
        """Let go of everything; the verdict has been printed. `exit_code` is the job's."""


def supervise(
    plan: Plan, environ: Mapping[str, str], directory: RunDir, guard: Guard, agents: Agents, started: float
) -> int:
    """Supervise the job that was begun at `started`, seconds since the epoch; returns the exit status of `jaxrun`."""
    exit_code = EXIT_SOFTWARE
    with SignalPipe(LAUNCHER_SIGNALS) as signals:
        become_subreaper()
        try:
            clock = Clock()
            dispatcher = Dispatcher(_make_head(plan, agents.registry, started), directory, clock)
            parent = ParentLink.from_env(environ, dispatcher)
            output = open_output(plan, environ, directory)
            if plan.job.pdb and (why := _explain_no_terminal(plan)):
                output.print_line(f"jaxrun: --pdb does nothing: {why}")
            if agents.listen_addresses:
                directory.record("started", started, listening=agents.listen_addresses)
            else:
                directory.record("started", started)
            outcome = agents.run(JobContext(dispatcher, output, signals, clock, parent, guard, Terminal(output)))
            exit_code = report_verdict(plan, dispatcher.hosts, outcome, started, directory, output, signals)
        finally:
            agents.stop(exit_code)
            kill_all(spare=guard.pid)
            guard.disarm()
    return exit_code


def _make_head(plan: Plan, registry: AgentRegistry | None, started: float) -> Head:
    """Make the head; a `registry` decides the devices and the coordinator's interface once all agents report."""
    job = plan.job
    expected = Expected(len(plan.workers), plan.job_id, job.platform, plan.local_devices)
    limits = TimeLimits(
        init=job.init_timeout,
        job=job.timeout,
        grace=job.failure_grace,
        signal_grace=job.signal_grace,
        stall=job.stall_timeout,
        stall_notice=job.stall_notice,
    )
    interface = "" if registry else _LOOPBACK
    return Head(
        plan.host_of,
        expected,
        limits,
        interface,
        started,
        registry,
        lockstep=job.lockstep,
        chaos=job.chaos,
        no_terminal=_explain_no_terminal(plan),
    )


def _explain_no_terminal(plan: Plan) -> str:
    return explain_no_terminal(plan.job.stdin, over_hosts=plan.launch_command is not None)
