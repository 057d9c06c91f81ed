"""Supervises a job from its first process to its exit code, in attempts, each with a head of its own.

    LocalJob   (local_job.py)    agents in this process, one for each host      ─┐
                                                                                 ├─▶ AttemptLoop ─▶ Dispatcher ─▶ Head
    RemoteJob  (remote_job.py)   a launch command starts agents, which connect  ─┘

The head's Finish action ends an attempt; verdict/restarts.py decides whether there is another, and verdict/decide.py
makes the verdict and the exit code of the last attempt's outcome.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from typing import Protocol

from msgspec.structs import replace

from jaxrun.analysis.diagnosis.job_outcome import JobOutcome
from jaxrun.analysis.lockstep.told_progress import find_told_step
from jaxrun.analysis.verdict import decide
from jaxrun.analysis.verdict.restarts import Restart, Stop, summarize_end
from jaxrun.analysis.verdict.verdict import Verdict
from jaxrun.controller.supervisor.job_history import JobHistory
from jaxrun.controller.supervisor.job_report import (
    describe_restart,
    explain_missing_module,
    open_output,
    report_verdict,
)
from jaxrun.controller.supervisor.job_server import JobServer, open_sockets
from jaxrun.controller.supervisor.job_terminal import Terminal, why_no_terminal
from jaxrun.controller.supervisor.notifier import Notifier
from jaxrun.controller.supervisor.supervision import Outside, Supervision
from jaxrun.controller.supervisor.train_job_status import TrainJobStatus
from jaxrun.errors import EXIT_SOFTWARE
from jaxrun.files.shared_memory import remove_all_of_job
from jaxrun.job_events.events import AttemptEnded, AttemptStarted, Event, TerminalLine
from jaxrun.node import early_signals
from jaxrun.node.agent.agent import SIGNALS
from jaxrun.node.agent.guard import Guard
from jaxrun.node.agent.process_tree import become_subreaper, kill_all
from jaxrun.node.agent.signals import LAUNCHER_SIGNALS, SignalPipe
from jaxrun.node.channel.event_loop import EventLoop
from jaxrun.protocol.job_record import JobRecord
from jaxrun.records.event_log.event_log import LoggedEvent
from jaxrun.records.output.screen import HeldScreen
from jaxrun.records.rundir.rundir import RunDir
from jaxrun.records.termination_log import write_termination_log
from jaxrun.spec.job.plan import Plan
from jaxrun.terminal import print_notice


class AttemptRunner(Protocol):
    """Runs the attempts of a job with its agents, wherever these are.

    listen_addresses:  where agents on other hosts connect, as text for people
    """

    @property
    def listen_addresses(self) -> str: ...

    def run_attempt(self, plan: Plan, record: JobRecord) -> JobOutcome:
        """Serve the agents until the head decides that the attempt is over.

        record:  what is known of the job as the attempt begins
        """
        ...

    def placed(self, plan: Plan) -> Plan:
        """Return the plan of an attempt that is over, with the spare hosts that have taken places while it ran."""
        ...

    def next_plan(self, plan: Plan, outcome: JobOutcome) -> Plan | Stop:
        """Return the plan of another attempt, or why there can be none."""
        ...

    def stop(self, exit_code: int, headline: str = "", culprits: Collection[int] = ()) -> None:
        """End the agents, and release what was kept for another attempt.

        headline:  why the job failed; empty if it did not
        culprits:  the ranks that caused the failure
        """
        ...


@contextlib.contextmanager
def supervision(
    plan: Plan,
    environ: Mapping[str, str],
    directory: RunDir,
    guard: Guard,
    history: JobHistory,
    loop: EventLoop,
    held: HeldScreen | None = None,
) -> Iterator[Supervision]:
    """Open the resources that a job's attempts share; at the end nothing of the job is left on this host.

    loop:  serves the job, and is closed at its end
    held:  the screen, if another process has it
    """
    with SignalPipe(LAUNCHER_SIGNALS) as signals:
        if early_signals.was_interrupted():
            signals.put_back((signal.SIGINT,))
        become_subreaper()
        sockets = server = None
        try:
            sockets = open_sockets(plan.job_id, environ, is_named=directory.path is not None)
            output, events = open_output(plan, environ, directory, held, sockets.path), deque[Event]()

            def notify(text: str) -> None:
                output.print_line(f"jaxrun: {text}")

            server = JobServer(plan.job_id, sockets, loop, SIGNALS, events.append, notify)
            server.announce(directory.name)
            notifier = Notifier.of_job(loop, plan, directory.name, environ, notify)
            directory.on_event(partial(_publish, server, notifier))
            if sockets.trouble:
                notify(sockets.trouble)
            if plan.job.pdb and (why := why_no_terminal(plan)):
                notify(f"--pdb does nothing: {why}")
            terminal = Terminal(output, loop, SIGNALS, lambda line: events.append(TerminalLine(line)))
            guard.attach(loop, SIGNALS, notify)
            outside = Outside(signals, terminal, server, notifier, TrainJobStatus(environ, notify), events)
            yield Supervision(environ, directory, output, loop, guard, outside, history)
        finally:
            if server is not None:
                server.close()
            elif sockets is not None:
                sockets.close()
            loop.close()
            kill_all(keep=(guard.pid,))
            remove_all_of_job(plan.job_id)
            guard.disarm()


def _publish(server: JobServer, notifier: Notifier, event: LoggedEvent, line: str) -> None:
    server.publish(line)
    notifier.on_event(event)


def supervise(plan: Plan, shared: Supervision, runner: AttemptRunner) -> int:
    """Run a job to its end, and report how it ended; returns the exit status of `jaxrun`."""
    outside = shared.outside
    exit_code, headline, culprits = EXIT_SOFTWARE, "", tuple[int, ...]()
    try:
        verdict, outcome = run_attempts(plan, shared, runner)
        verdict = explain_missing_module(verdict, outcome, plan.job, shared.environ)
        headline, culprits = "\n".join(filter(None, (verdict.headline, verdict.reached))), verdict.culprits
        headline = headline if verdict.exit_code else ""
        outside.train_job.end(find_told_step(outcome.flights), time.time())
        write_termination_log(plan.job.termination_log, headline, shared.environ)
        outside.notifier.on_end(verdict)
        exit_code = report_verdict(
            verdict,
            outcome,
            shared.directory,
            shared.output,
            outside.signals,
            outside.server,
            quiet=plan.job.quiet,
        )
        outside.notifier.wait(outside.signals, print_notice)
        outside.signals.ignore_rest()
    finally:
        runner.stop(exit_code, headline, culprits)
    return exit_code


def run_attempts(plan: Plan, shared: Supervision, runner: AttemptRunner) -> tuple[Verdict, JobOutcome]:
    """Run the job until it has ended well or must not be started again.

    Returns the verdict on the job, and the outcome of its last attempt.
    """
    asked, history = plan.job, shared.history
    known: Mapping[int, str] = {}  # the host of each rank in the attempt before
    while True:
        earlier, record = history.verdicts, history.make_record(plan, shared.directory.name, known)
        verdict, outcome = _run_attempt(plan, shared, runner, record)
        plan = runner.placed(plan)
        history = history.add(verdict, summarize_end(outcome, has_run_before=history.has_run), time.time())
        decision = history.decide(asked, plan.attempt)
        over = asked.timeout is not None and history.began >= history.started + asked.timeout
        if isinstance(decision, Restart) and over:
            decision = Stop("--timeout is over, which counts over all attempts")
        following = runner.next_plan(plan, outcome) if isinstance(decision, Restart) else decision
        if isinstance(following, Stop):
            return replace(verdict, earlier=earlier, no_restart=following.why), outcome
        assert isinstance(decision, Restart)
        code, seen = verdict.exit_code, (verdict.divergence, verdict.details)
        end = AttemptEnded(verdict.outcome, code, verdict.headline, verdict.log, *seen)
        # Verdict.json has the verdict on the whole job.
        shared.directory.record(LoggedEvent(history.began, end, verdict.attempt))
        news = following.placement.notes[len(plan.placement.notes) :]
        shared.output.print_line(describe_restart(verdict, decision, shared.directory.shown_path, news))
        plan = replace(
            following,
            job=replace(following.job, chaos=outcome.faults_left),
            attempt=plan.attempt + 1,
            restart_reason=verdict.headline.partition("\n")[0],
        )
        known = verdict.hosts if len(verdict.hosts) == len(plan.workers) else {}


def _run_attempt(
    plan: Plan, shared: Supervision, runner: AttemptRunner, record: JobRecord
) -> tuple[Verdict, JobOutcome]:
    directory, began = shared.directory, record.began
    before = began - shared.started
    log_dir = directory.make_attempt_directory(plan.attempt)
    if before:
        shared.output.begin_attempt(log_dir)
    attempt = AttemptStarted(runner.listen_addresses, plan.restart_reason, len(plan.hosts), plan.placement.agents)
    directory.record(LoggedEvent(began, attempt, plan.attempt))
    outcome = runner.run_attempt(plan, record)
    plan = runner.placed(plan)
    verdict = decide.decide(outcome, started=began, ended=time.time(), timeout=plan.job.timeout)
    verdict = replace(verdict, details=(*verdict.details, *(f"{note}." for note in plan.placement.notes)))
    return replace(verdict, attempt=plan.attempt, before=before, left_out=tuple(plan.placement.left_out)), outcome
