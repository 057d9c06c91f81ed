"""Supervises a job from its first process to its exit code, in attempts, each with a head of its own.

    LocalAgent    (local.py)    one agent in this process, with all workers    ─┐
                                                                                ├─▶ Executor ─▶ Dispatcher ─▶ Head
    RemoteAgents  (remote.py)   mpirun or srun starts agents, which connect    ─┘

The Finish action of the head ends an attempt; verdict/restarts.py decides whether there is another, and
verdict/decide.py makes the verdict and the exit code of the last one's outcome.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from jaxrun.analysis.diagnosis.outcome import JobOutcome
from jaxrun.analysis.verdict import decide
from jaxrun.analysis.verdict.restarts import AttemptEnd, Restart, Stop, decide_restart, summarize_end
from jaxrun.analysis.verdict.verdict import Verdict
from jaxrun.clock import Clock
from jaxrun.controller.head.consistency import Expected
from jaxrun.controller.head.head import Head
from jaxrun.controller.head.head_state import TimeLimits
from jaxrun.controller.supervisor.attempt_context import AttemptContext, Supervision
from jaxrun.controller.supervisor.dispatcher import Dispatcher
from jaxrun.controller.supervisor.job_report import describe_restart, open_output, report_verdict
from jaxrun.controller.supervisor.parent_link import ParentLink
from jaxrun.controller.supervisor.terminal import Terminal, why_no_terminal
from jaxrun.errors import EXIT_SOFTWARE
from jaxrun.node.agent.guard import Guard
from jaxrun.node.agent.process_tree import become_subreaper, kill_all
from jaxrun.node.agent.signals import LAUNCHER_SIGNALS, SignalPipe
from jaxrun.protocol.addresses import loopback_address
from jaxrun.protocol.codec import field_values
from jaxrun.protocol.env import attempt_nonce
from jaxrun.protocol.shared_memory import remove_all_of_job
from jaxrun.records.event_log.event_log import LoggedEvent
from jaxrun.records.event_log.events import AttemptEnded, AttemptStarted
from jaxrun.records.output.screen import HeldScreen
from jaxrun.records.rundir.rundir import RunDir
from jaxrun.spec.job.plan import Plan

if TYPE_CHECKING:
    from jaxrun.controller.head.agent_registry import AgentRegistry
    from jaxrun.controller.supervisor.local import LocalAgent
    from jaxrun.controller.supervisor.remote import RemoteAgents


def run_attempts(
    plan: Plan, shared: Supervision, agents: LocalAgent | RemoteAgents, started: float
) -> tuple[Verdict, JobOutcome]:
    """Run the job, begun at `started` (seconds since the epoch), until it has ended well or is not to go on.

    Returns the verdict on the job, and the outcome of its last attempt.
    """
    job, first = plan.job, plan.attempt
    history: tuple[AttemptEnd, ...] = ()
    earlier = shared.directory.earlier
    began = started
    while True:
        verdict, outcome = _run_attempt(plan, shared, agents, began, began - started)
        history = (*history, summarize_end(outcome, has_run_before=any(v.run is not None for v in earlier)))
        decision = decide_restart(history, job.max_restarts, job.restart_on, first_attempt=first)
        began = time.time()
        if isinstance(decision, Restart) and job.timeout is not None and began >= started + job.timeout:
            decision = Stop("--timeout is over, which counts over all attempts")
        following = agents.next_plan(plan, outcome) if isinstance(decision, Restart) else decision
        if isinstance(following, Stop):
            return replace(verdict, earlier=earlier, no_restart=following.why), outcome
        assert isinstance(decision, Restart)
        code, seen = verdict.exit_code, (verdict.divergence, verdict.details)
        end = AttemptEnded(verdict.outcome, code, verdict.headline, verdict.log, *seen)
        shared.directory.record(LoggedEvent(began, end, verdict.attempt))  # verdict.json is that of the whole job
        news = following.host_notes[len(plan.host_notes) :]
        shared.output.print_line(describe_restart(verdict, decision, shared.directory.shown_path, news))
        earlier = (*earlier, verdict)
        plan = replace(
            following,
            job=replace(following.job, chaos=outcome.faults_left),
            attempt=plan.attempt + 1,
            restart_reason=verdict.headline.partition("\n")[0],
        )


def _run_attempt(
    plan: Plan, shared: Supervision, agents: LocalAgent | RemoteAgents, began: float, before: float
) -> tuple[Verdict, JobOutcome]:
    """Run one attempt; `before` is how many seconds after the start of the job it has begun."""
    directory, output = shared.directory, shared.output
    log_dir = directory.make_attempt_directory(plan.attempt)
    if before:
        output.begin_attempt(log_dir)
    attempt = AttemptStarted(agents.listen_addresses, plan.restart_reason, len(plan.hosts), plan.agents)
    directory.record(LoggedEvent(began, attempt, plan.attempt))
    head = _make_head(plan, agents.make_registry(plan), began, before)
    dispatcher = Dispatcher(head, directory, shared.clock, plan.attempt)
    parent = ParentLink.from_env(shared.environ, dispatcher)
    outcome = agents.run(
        AttemptContext(**field_values(shared), plan=plan, log_dir=log_dir, dispatcher=dispatcher, parent=parent)
    )
    verdict = decide.decide(outcome, dispatcher.hosts, started=began, ended=time.time(), timeout=plan.job.timeout)
    verdict = replace(verdict, details=(*verdict.details, *(f"{note}." for note in plan.host_notes)))
    return replace(verdict, attempt=plan.attempt, before=before, left_out=plan.left_out), outcome


def _make_head(plan: Plan, registry: AgentRegistry | None, began: float, before: float) -> Head:
    """Make the head; a `registry` decides the devices and the coordinator's interface once all agents report."""
    job = plan.job
    nonce = attempt_nonce(plan.job_id, plan.attempt)
    expected = Expected(len(plan.workers), nonce, job.platform, plan.local_devices)
    limits = TimeLimits(
        init=job.init_timeout,
        job=None if job.timeout is None else job.timeout - before,
        grace=job.failure_grace,
        signal_grace=job.signal_grace,
        stall=job.stall_timeout,
        stall_notice=job.stall_notice,
        save=job.save_time,
        ends_at=plan.ends_at,
        unhurried=bool(job.wrap) and job.grace is None,
        grow=job.grow_after if plan.is_smaller else None,
    )
    interface = "" if registry else loopback_address()
    return Head(
        plan.host_of,
        expected,
        limits,
        interface,
        began,
        registry,
        lockstep=job.lockstep,
        chaos=job.chaos,
        no_terminal=why_no_terminal(plan),
        agents=plan.agents,
        requeue=job.requeue,
    )


def supervise(
    plan: Plan,
    environ: Mapping[str, str],
    directory: RunDir,
    guard: Guard,
    agents: LocalAgent | RemoteAgents,
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
            verdict, outcome = run_attempts(plan, shared, agents, started)
            exit_code = report_verdict(verdict, outcome, directory, output, signals)
        finally:
            agents.stop(exit_code)
            kill_all(keep=(guard.pid,))
            remove_all_of_job(plan.job_id)
            guard.disarm()
    return exit_code
