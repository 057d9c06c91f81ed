"""The commands: flags become a Job, a backend makes a Plan from it, the supervisor runs it; errors become exit codes.

Only what every command needs is imported here, so that `jaxrun` itself starts fast.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import click
from msgspec import Struct, field
from msgspec.structs import replace

from jaxrun.cli import torchrun
from jaxrun.cli.click_options import attach_parameters, doctor_parameters, parameters
from jaxrun.cli.colours import colour_variables
from jaxrun.cli.defaults import Defaults, read_defaults, used_defaults
from jaxrun.cli.help import ATTACH_USAGE, COMPLETION_VARIABLE, DOCTOR_USAGE, Command, command_to_complete
from jaxrun.cli.job_option import job_options
from jaxrun.cli.make_job import make_job, without_effect
from jaxrun.errors import (
    EXIT_SIGNAL_BASE,
    EXIT_UNAVAILABLE,
    JaxrunError,
    ModuleMissingError,
    UsageError,
    describe_shortage,
)
from jaxrun.node.early_signals import raise_interrupts
from jaxrun.protocol.names import CONTROL_FD, GANG_ADDRESS, SUBCOMMANDS, WORDS_OF_OTHERS
from jaxrun.spec.backends import ATTACH, HOSTS, KUBERNETES
from jaxrun.text import clip_lines

if TYPE_CHECKING:
    from pathlib import Path

    from jaxrun.node.forkserver.prestart import PrestartedServer
    from jaxrun.spec.job.job import Job
    from jaxrun.spec.job.plan import Plan

_DOCTOR = "doctor"
_RANK_0_TIME_S = 2.0  # for rank 0 to print an error about the words that all ranks have
_EXIT_INTERRUPTED = EXIT_SIGNAL_BASE + 2
_SETTINGS: dict[str, Any] = {
    "allow_interspersed_args": False,
    "help_option_names": ["-h", "--help"],
    "token_normalize_func": lambda name: name.replace("_", "-"),  # torchrun accepts either
}


class _Invocation(Struct):
    """The context of a command besides its options: all words after `jaxrun`, the early fork server, the defaults."""

    words: tuple[str, ...]
    prestarted: PrestartedServer | None
    defaults: Defaults = field(default_factory=Defaults)


def main(arguments: Sequence[str] | None = None, prestarted: PrestartedServer | None = None) -> int:
    """Run the command line; returns the exit status."""
    words = _own_words(sys.argv[1:] if arguments is None else arguments)
    invocation = _Invocation(tuple(words), prestarted)
    try:
        command = _command(_pop_name(words))
        settings: dict[str, Any] = {}
        if isinstance(command, Command):
            from jaxrun.spec.job.program_check import working_directory

            invocation.defaults = read_defaults(job_options(command), os.environ, working_directory())
            settings["default_map"] = invocation.defaults.values
        settings["complete_var"] = COMPLETION_VARIABLE
        return command.main(words, prog_name=command.name, standalone_mode=False, obj=invocation, **settings) or 0
    except click.ClickException as error:
        if invocation.words[:1] == (ATTACH,) and _is_other_rank():
            time.sleep(_RANK_0_TIME_S)  # mpirun ends all ranks when the first one exits: rank 0 must have printed it
            return error.exit_code
        from jaxrun.cli.usage_errors import describe

        return _print_error(describe(error, words, invocation.defaults), error.exit_code, invocation.words)
    except JaxrunError as error:
        return _print_error(f"{error}{_other_python(error)}", error.exit_code, invocation.words)
    except (click.Abort, KeyboardInterrupt):
        return _EXIT_INTERRUPTED
    except (OSError, RuntimeError) as error:
        text = describe_shortage(error)
        if not text:
            raise
        return _print_error(text, EXIT_UNAVAILABLE, invocation.words)


def _other_python(error: JaxrunError) -> str:
    """Return how to start the job with another Python at hand that has the module of -m; empty if there is none."""
    if not isinstance(error, ModuleMissingError):
        return ""
    from jaxrun.node.other_pythons import describe_other_python, find_other_python

    other = find_other_python(error.module, os.environ)
    return "\n" + "\n".join(describe_other_python(error.module, other)) if other else ""


def _own_words(words: Sequence[str]) -> list[str]:
    """Replace a first word that other tools have, such as `run`, unless a program has that name."""
    first, *rest = words or ("",)
    instead = WORDS_OF_OTHERS.get(first)
    if instead is None or os.path.lexists(first):
        return list(words)
    if first == "help" and rest[:1] and rest[0] in SUBCOMMANDS:
        return [rest[0], "--help"]
    return [*instead, *rest]


def _is_other_rank() -> bool:
    """Return whether an MPI or Slurm has started this process as another rank than 0, which has the same words."""
    from jaxrun.spec.engines.rank_info import find_rank_info

    try:
        found = find_rank_info(os.environ)
    except UsageError:
        return False
    return found is not None and found.rank > 0


def _print_error(text: str, exit_code: int, words: Sequence[str]) -> int:
    """Print what was wrong: on stderr, or, for a command line with --json, as a document. Returns the exit code."""
    is_job = not words or words[0] not in SUBCOMMANDS
    if CONTROL_FD in os.environ:
        from jaxrun.controller.supervisor.job_server import report_not_started

        if report_not_started(text, exit_code, os.environ):
            return exit_code
    if "--json" in words and ("--dry-run" in words or not is_job):
        from jaxrun.cli import documents

        click.echo(os.fsencode(documents.format_error(text, exit_code)))
    else:
        print(f"jaxrun: {clip_lines(text)}", file=sys.stderr)
    return exit_code


def run_and_exit(arguments: Sequence[str], prestarted: PrestartedServer | None) -> NoReturn:
    """Run the command line and end this process, without Python's own teardown, which would take 20 ms."""
    try:
        raise_interrupts()
        status = main(arguments, prestarted)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the exit status is already decided
    except KeyboardInterrupt:
        status = _EXIT_INTERRUPTED
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def _pop_name(words: list[str]) -> str:
    """Remove the name of a subcommand from `words` and return it; empty if there is none."""
    if COMPLETION_VARIABLE in os.environ:
        return command_to_complete(SUBCOMMANDS)
    return words.pop(0) if words and words[0] in SUBCOMMANDS else ""


def _command(name: str) -> click.Command:
    if not name:
        params = [*parameters(), *torchrun.parameters()]
        return Command("jaxrun", params=params, callback=_run, context_settings=_SETTINGS)
    if name == ATTACH:
        return Command(
            "jaxrun attach",
            params=attach_parameters(),
            callback=_attach,
            context_settings=_SETTINGS,
            help=ATTACH_USAGE,
        )
    if name == _DOCTOR:
        settings = {**_SETTINGS, "allow_interspersed_args": True}
        params = doctor_parameters()
        return Command("jaxrun doctor", params=params, callback=_doctor, context_settings=settings, help=DOCTOR_USAGE)
    from jaxrun.cli import run_dir_commands

    return run_dir_commands.COMMANDS[name]


def _run(dry_run: bool, as_json: bool, **values: Any) -> int:
    from jaxrun.spec.backends.planning import make_plan
    from jaxrun.spec.job.isolation import describe_isolation
    from jaxrun.spec.job.program_check import check_program

    environ = dict(os.environ)
    context = click.get_current_context()
    invocation: _Invocation = context.obj
    values, note = torchrun.translate(values, environ)
    job = _make_job(context, values, environ)
    if as_json and (not dry_run or job.sbatch or job.qsub or job.submit or job.backend == KUBERNETES):
        raise UsageError(
            "--json prints what --dry-run of a job shows; leave it out. To see how a job goes, or went: "
            "jaxrun top --json, jaxrun explain --json"
        )
    if note and not job.host_rank:  # the other hosts have the same words as host 0
        print(f"jaxrun: {note}", file=sys.stderr)
    if job.backend == KUBERNETES and (job.manifest or job.submit or dry_run):
        return _run_manifest(job, dry_run=dry_run)  # the program is in the image
    job, source = check_program(job, os.getcwd(), SUBCOMMANDS)
    _warn_of_misplaced(context, job, source)
    if isolation := describe_isolation(sys.prefix):
        print(f"jaxrun: {isolation}", file=sys.stderr)
    if job.sbatch or job.qsub or job.submit:
        return _run_batch(job, environ, dry_run=dry_run)
    _refuse_task_of_several(context, job, environ)
    job_id = invocation.prestarted.job_id if invocation.prestarted else os.urandom(16).hex()
    job = replace(job, env={**colour_variables(job, environ), **job.env})
    plan = make_plan(job, environ, job_id)
    if dry_run:
        from jaxrun.spec.job.leading_imports import preloaded_modules
        from jaxrun.spec.job.render import render_plan

        modules = preloaded_modules(job.preload, plan.program_argv, os.getcwd()) if plan.fork else []
        if as_json:
            from jaxrun.cli import documents

            click.echo(os.fsencode(documents.plan(plan, modules)))
        else:
            click.echo(os.fsencode(render_plan(plan, environ, modules)), nl=False)
            if plan.launch_command is not None and not all(plan.placement.agents.values()):  # some wait for ranks
                from jaxrun.controller.roster import Roster

                click.echo(os.fsencode(f"\nagents: {Roster.of(plan).describe()}"))
        return 0
    if job.requeue:
        from jaxrun.spec.engines.lookup import scheduler_of

        return scheduler_of(job.backend).run_requeued(environ, lambda: _run_plan(plan, environ, invocation.prestarted))
    return _run_plan(plan, environ, invocation.prestarted)


def _refuse_task_of_several(context: click.Context, job: Job, environ: Mapping[str, str]) -> None:
    """Raise UsageError if `attach` was forgotten after mpirun or srun.

    A command for each host is intended, and so is a gang, or a job whose size was typed.
    """
    is_typed = context.get_parameter_source("processes") is click.core.ParameterSource.COMMANDLINE
    if is_typed or job.backend == HOSTS or GANG_ADDRESS in environ:
        return
    from jaxrun.node.agent.process_tree import command_lines_above
    from jaxrun.spec.engines.rank_info import refuse_task_of_several

    refuse_task_of_several(environ, command_lines_above, context.obj.words)


def _run_plan(plan: Plan, environ: Mapping[str, str], prestarted: PrestartedServer | None = None) -> int:
    """Run the job, or this host's part where each host has a command of its own."""
    if plan.job.backend == HOSTS:
        from jaxrun.controller.supervisor.attach import run_host

        return run_host(plan, environ)
    from jaxrun.controller.supervisor.run_job import run

    return run(plan, environ, prestarted)


def _make_job(context: click.Context, values: Mapping[str, Any], environ: Mapping[str, str]) -> Job:
    """Make the Job of the options, without defaults from elsewhere that have no effect."""
    defaults: Defaults = context.obj.defaults
    dropped = without_effect(values, used_defaults(context, defaults), environ)
    return make_job({name: value for name, value in values.items() if name not in dropped}, environ, defaults.env)


def _warn_of_misplaced(context: click.Context, job: Job, source: Path | None) -> None:
    """Ask about an option of ours that the program would get."""
    if any(word.startswith("-") for word in job.program[1:]):
        from jaxrun.cli.usage_errors import describe_misplaced

        line = describe_misplaced(context, context.obj.words, job.program, source)
        if line:
            print(f"jaxrun: {line}", file=sys.stderr)


def _run_batch(job: Job, environ: Mapping[str, str], *, dry_run: bool) -> int:
    """Write the batch script of the job, or submit it to the scheduler."""
    from pathlib import Path

    from jaxrun.spec.backends import submit
    from jaxrun.spec.engines.lookup import scheduler_of

    scheduler = scheduler_of(job.backend)
    path = job.sbatch or job.qsub or Path(f"{job.name}{scheduler.suffix}")
    text = scheduler.write(job, os.getcwd(), str(path))
    if dry_run:
        click.echo(os.fsencode(text), nl=False)
        return 0
    secrets, command = scheduler.find_secrets(job), scheduler.submit[0]
    if job.submit:
        return submit.submit_and_follow(scheduler, text, path, {**environ, **secrets})
    submit.write_script(scheduler, path, text)
    for name in (name for name, value in secrets.items() if environ.get(name) != value):
        print(f"jaxrun: {path} does not hold the value of {name}; before {command}: export {name}=…", file=sys.stderr)
    script = shlex.quote(str(path))
    print(f"jaxrun: {path} written; hand it to {scheduler.title} with: {command} {script}", file=sys.stderr)
    return 0


def _run_manifest(job: Job, *, dry_run: bool) -> int:
    """Write the manifest of the job, and with --submit pass it to kubectl; --dry-run shows it without its secrets."""
    from pathlib import Path

    from jaxrun.protocol.auth import new_token
    from jaxrun.spec.backends import kubectl
    from jaxrun.spec.engines import kubernetes

    name = kubernetes.object_name(job, os.urandom(2).hex())
    path = job.manifest or Path(f"{name}.yaml")
    if dry_run:
        click.echo(os.fsencode(kubernetes.manifest(job, None, name=name, file=str(path))), nl=False)
        return 0
    kubectl.write_manifest(path, kubernetes.manifest(job, new_token(), name=name, file=str(path)))
    if job.submit:
        kubectl.apply(path, name, job.namespace)
    else:
        print(f"jaxrun: {path} written; hand it to the cluster with: kubectl apply -f {path}", file=sys.stderr)
    return 0


def _attach(
    rank: int | None, size: int | None, head: str | None, rendezvous: Path | None, check: str | None, **values: Any
) -> int:
    from jaxrun.controller.supervisor.attach import attach
    from jaxrun.spec.job.program_check import check_program

    if check:
        from jaxrun.node.channel.rendezvous import check_reachable

        return check_reachable(check)
    environ = dict(os.environ)
    context = click.get_current_context()
    job = _make_job(context, {**values, "backend": ATTACH}, environ)
    job, source = check_program(job, os.getcwd())
    _warn_of_misplaced(context, job, source)
    return attach(job, environ, rank=rank, size=size, head=head or "", directory=rendezvous)


def _doctor(as_json: bool, **values: Any) -> int:
    from jaxrun.frontends.doctor import doctor_report
    from jaxrun.frontends.doctor.examine import INIT_TIMEOUT_S, PROGRAM, TIMEOUT_S, examine
    from jaxrun.spec.backends.planning import make_plan
    from jaxrun.terminal import TerminalFormat

    environ = dict(os.environ)
    of_program = {"program": PROGRAM, "module": True, "init_timeout": INIT_TIMEOUT_S, "timeout": TIMEOUT_S}
    job = _make_job(click.get_current_context(), {**values, **of_program}, environ)
    plan = make_plan(replace(job, probe_hosts=True), environ, os.urandom(16).hex())
    if job.host_rank:
        return _run_plan(plan, environ)
    seen = examine(plan, lambda plan: _run_plan(plan, environ), environ, sys.stderr)
    findings = doctor_report.judge(seen)
    terminal = TerminalFormat.at(1, environ)
    text = doctor_report.to_json(seen, findings) if as_json else doctor_report.format_report(seen, findings, terminal)
    click.echo(os.fsencode(text))
    return doctor_report.exit_code(seen, findings)
