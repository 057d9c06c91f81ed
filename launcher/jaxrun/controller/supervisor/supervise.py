"""Supervises one job from its first process to its exit code, wherever its agents are.

    LocalAgent    (local.py)    one agent in this process, with all workers    ─┐
                                                                                ├─▶ Executor ─▶ Dispatcher ─▶ Head
    RemoteAgents  (remote.py)   mpirun or srun starts agents, which connect    ─┘

The Finish action of the head ends an attempt to run the job; attempts.py begins the next, where there is one.
verdict/decide.py makes the verdict and the exit code from the last one's outcome.
"""

from __future__ import annotations

from collections.abc import Mapping

from jaxrun.clock import Clock
from jaxrun.controller.supervisor.attempts import Agents, Supervision, run_attempts, why_no_terminal
from jaxrun.controller.supervisor.report import open_output, report_verdict
from jaxrun.controller.supervisor.terminal import Terminal
from jaxrun.errors import EXIT_SOFTWARE
from jaxrun.node.agent.guard import Guard
from jaxrun.node.agent.signals import LAUNCHER_SIGNALS, SignalPipe
from jaxrun.node.agent.subreaper import become_subreaper, kill_all
from jaxrun.records.output.held_screen import HeldScreen
from jaxrun.records.rundir.rundir import RunDir
from jaxrun.spec.job.plan import Plan


def supervise(
    plan: Plan,
    environ: Mapping[str, str],
    directory: RunDir,
    guard: Guard,
    agents: Agents,
    started: float,
    held: HeldScreen | None = None,
) -> int:
    """Supervise the job that was begun at `started`, seconds since the epoch; returns the exit status of `jaxrun`.

    `held` is the screen where another process has it.
    """
    exit_code = EXIT_SOFTWARE
    with SignalPipe(LAUNCHER_SIGNALS) as signals:
        become_subreaper()
        try:
            output = open_output(plan, environ, directory, held)
            if plan.job.pdb and (why := why_no_terminal(plan)):
                output.print_line(f"jaxrun: --pdb does nothing: {why}")
            shared = Supervision(environ, directory, output, signals, Clock(), guard, Terminal(output))
            end = run_attempts(plan, shared, agents, started)
            exit_code = report_verdict(end.verdict, end.outcome, directory, output, signals)
        finally:
            agents.stop(exit_code)
            kill_all(spare=(guard.pid,))
            guard.disarm()
    return exit_code
