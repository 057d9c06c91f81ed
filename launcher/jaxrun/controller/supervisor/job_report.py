"""Reports a job to people: its first line, its output, and the verdict at its end."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from jaxrun.analysis.diagnosis.job_end import EndedBySignal, Grown, Preempted
from jaxrun.analysis.diagnosis.job_outcome import JobOutcome
from jaxrun.analysis.verdict import verdict_text
from jaxrun.analysis.verdict.decide import format_divergences, leave_out_told
from jaxrun.analysis.verdict.goodput_text import Goodput
from jaxrun.analysis.verdict.restarts import Restart
from jaxrun.analysis.verdict.verdict import Verdict
from jaxrun.analysis.verdict.verdict import to_json as verdict_to_json
from jaxrun.controller.supervisor.job_server import JobServer
from jaxrun.controller.supervisor.job_terminal import find_prompting_rank
from jaxrun.errors import EXIT_SIGNAL_BASE, UsageError
from jaxrun.node.agent.signals import STOPPING, SignalPipe
from jaxrun.protocol.names import GANG_ADDRESS
from jaxrun.records.job_file import format_job_file
from jaxrun.records.output.output import Output
from jaxrun.records.output.rank_logs import STREAMS
from jaxrun.records.output.screen import HeldScreen
from jaxrun.records.rundir import rundir
from jaxrun.records.rundir.recorded_files import RecordedLauncher
from jaxrun.records.rundir.rundir import RunDir
from jaxrun.spec.job.env_options import mask_secret
from jaxrun.spec.job.job import Job
from jaxrun.spec.job.options import OUTPUT_AUTO, OUTPUT_GROUPED, PREFIX_HOST
from jaxrun.spec.job.plan import Plan
from jaxrun.spec.job.rank_placement import describe_left_out
from jaxrun.spec.job.render import plan_summary
from jaxrun.terminal import TerminalFormat

_MIN_ACCOUNTED_S = 55.0  # a shorter job of one attempt ends at once
_SIGNAL_CHECK_S = 0.1  # while a stuck screen holds up the last lines


def open_output(
    plan: Plan, environ: Mapping[str, str], directory: RunDir, held: HeldScreen | None = None, socket: str = ""
) -> Output:
    """Open the screen and the logs, write job.json, and print the first line of the job.

    `held` is the screen if another process has it; `socket` is the path of the job's socket.
    """
    command = plan.launch_command
    # mpirun may show its ranks a terminal of its own, so `attach` prints no colours.
    plain = command is not None and command.attached
    colour_out, colour_err = (not plain and TerminalFormat.at(fd, environ).colour for fd in (1, 2))
    ranks = [worker.rank for worker in plan.workers]
    output = Output(
        len(ranks),
        log_dir=directory.make_attempt_directory(plan.attempt),
        colour=(colour_out, colour_err),
        # The output of a gang's ranks goes to the Python process that started the gang.
        shown=frozenset(rank for rank in ranks if plan.job.shows(rank) and GANG_ADDRESS not in environ),
        open_logs=command is None,  # agents on other hosts write the logs themselves, if they can
        held=held,
        quiet=plan.job.quiet,
        prompting=find_prompting_rank(plan.job),
        grouped=_grouped_streams(plan.job.output),
        names_hosts=plan.job.prefix == PREFIX_HOST,
    )
    directory.on_write_error(lambda text: output.print_line(f"jaxrun: {text}"))
    launcher = RecordedLauncher(os.uname().nodename, os.getpid(), socket)
    directory.write_text(rundir.JOB_FILE, format_job_file(plan, launcher))
    where = [f"run dir {directory.shown_path}"] if directory.path else []
    excluded = describe_left_out(plan.placement.left_out, plan.job.quarantine)
    lines = (plan_summary(plan), *where, excluded, *(_notes(plan) if plan.job.verbose else ()))
    for line in filter(None, lines):
        output.print_line(f"jaxrun: {line}", dim=True)
    return output


def _grouped_streams(choice: str) -> tuple[str, ...]:
    """Return the streams whose lines are grouped: stdout may carry results, and only if that was asked for."""
    if choice == OUTPUT_GROUPED:
        return STREAMS
    return ("err",) if choice == OUTPUT_AUTO and os.isatty(2) else ()


def _notes(plan: Plan) -> Iterator[str]:
    """Yield the lines of --verbose: remarks on the plan, and variables of the user that the program does not see."""
    yield from plan.notes
    yield f"each rank runs: {shlex.join(plan.argv)}"
    if plan.set_env:
        values = (f"{name}={mask_secret(name, value)}" for name, value in sorted(plan.set_env.items()))
        yield f"variables that jaxrun sets: {' '.join(values)}"
    if plan.unset_env:
        yield f"variables not passed on to the program: {', '.join(plan.unset_env)}"
    if plan.launch_command and plan.launch_command.unset_env:
        yield f"variables not passed on to {plan.launch_command.title}: {', '.join(plan.launch_command.unset_env)}"


def describe_restart(verdict: Verdict, restart: Restart, run_dir: Path | None, news: Sequence[str] = ()) -> str:
    """Return the text between two attempts: how the one ended, where its log is, and what has changed."""
    headline = verdict.headline.rstrip(".")  # may quote mpirun
    then = "\njaxrun: restarting" if "\n" in headline else "; restarting"
    text = f"attempt {verdict.attempt} of {restart.most} failed: {headline}{then}"
    if verdict.outcome == Grown.reason:
        text = f"attempt {verdict.attempt} is over: {verdict.headline}; starting on more hosts"
    if verdict.outcome in (Preempted.reason, EndedBySignal.reason):
        text = f"attempt {verdict.attempt} is over: {headline}; starting again once another pod is there"
    where = f"its log: {run_dir / verdict.log}" if run_dir is not None and verdict.log else ""
    more = "; ".join(filter(None, (_error_line(verdict.traceback), where, *news)))
    return f"jaxrun: {text}" + (f"\n  {more}" if more else "")


def _error_line(traceback: str) -> str:
    """Return the first line of the error below the last frame; empty for a crashed rank's stack, which has no error."""
    lines = traceback.rstrip("\n").split("\n")
    frames = [number for number, line in enumerate(lines) if line.startswith('  File "')]
    if not frames:
        return lines[-1]
    return next((line for line in lines[frames[-1] + 1 :] if line and not line.startswith(" ")), "")


def _account(verdict: Verdict, directory: RunDir) -> Goodput | None:
    """Return what the time of a longer job was worth; None if its event log is not there."""
    if directory.path is None or not (verdict.earlier or verdict.seconds >= _MIN_ACCOUNTED_S):
        return None
    from jaxrun.records.history.goodput import account  # takes time that a short job should not
    from jaxrun.records.history.job_log import read_attempts
    from jaxrun.records.rundir.recorded_files import read_job_events

    try:
        return account(read_attempts(read_job_events(directory.path)))
    except (OSError, UsageError):
        return None


def explain_missing_module(verdict: Verdict, outcome: JobOutcome, job: Job, environ: Mapping[str, str]) -> Verdict:
    """Add whether a module that a rank could not import is installed for another Python that the user has at hand."""
    failures = [worker.failure for worker in outcome.workers if worker.rank in verdict.culprits[:1]]
    if verdict.means or job.remote_python or not (failures and failures[0]):
        return verdict
    from jaxrun.node.other_pythons import describe_other_python, find_other_python, missing_module

    module = missing_module(failures[0])
    other = find_other_python(module, environ) if module else None
    if other is None:
        return verdict
    means, advice = describe_other_python(module, other)
    return replace(verdict, means=means, advice=advice)


def report_verdict(
    verdict: Verdict,
    outcome: JobOutcome,
    directory: RunDir,
    output: Output,
    signals: SignalPipe,
    server: JobServer,
    *,
    quiet: bool = False,
) -> int:
    """Print the verdict, save it, and send it to the `server`'s clients; wait until the screen has shown all output.

    With `quiet`, a verdict is only printed if it tells more than that all went well.

    Returns the exit status of `jaxrun`: if a signal ends the wait for a stuck screen, the status of that signal.
    """
    verdict = replace(verdict, goodput=_account(verdict, directory))
    text = verdict_to_json(verdict)
    directory.write_text(rundir.VERDICT_FILE, text)
    directory.close()
    server.end(text)
    left = format_divergences(outcome, but=outcome.shown_divergences)
    if not (quiet and verdict.is_ok and not verdict.details and not verdict.divergence):
        shown = leave_out_told(verdict, outcome)
        output.print_text(verdict_text.format_report(shown, directory.shown_path, output.terminal, left))
    signals.receive()  # the job's own signals have been handled
    while not output.close(_SIGNAL_CHECK_S):
        for signum in signals.receive():
            if signum in STOPPING:
                return EXIT_SIGNAL_BASE + signum
    return verdict.exit_code
