"""The commands: flags become a Job, a backend makes it a Plan, the supervisor runs it; errors become exit codes.

Only what every command needs is imported here, so that `jaxrun` itself starts fast.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import click

from jaxrun.backends import ATTACH
from jaxrun.cli.help import ATTACH_USAGE, Command
from jaxrun.cli.options import attach_parameters, make_job, parameters
from jaxrun.errors import EXIT_SIGNAL_BASE, JaxrunError, UsageError

if TYPE_CHECKING:
    from jaxrun.forkserver.early import EarlyServer
    from jaxrun.job.job import Job

_EXIT_INTERRUPTED = EXIT_SIGNAL_BASE + 2


@dataclass(frozen=True, slots=True)
class _Invocation:
    """What a command gets besides its options: all words after `jaxrun`, and the early fork server."""

    words: tuple[str, ...]
    early_server: EarlyServer | None


def main(arguments: Sequence[str] | None = None, early_server: EarlyServer | None = None) -> int:
    """Run the command line; returns the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    invocation = _Invocation(tuple(words), early_server)
    command = _SUBCOMMANDS[words.pop(0)]() if words and words[0] in _SUBCOMMANDS else _run_command()
    try:
        return command.main(words, prog_name=command.name, standalone_mode=False, obj=invocation) or 0
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except JaxrunError as error:
        print(f"jaxrun: {error}", file=sys.stderr)
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return _EXIT_INTERRUPTED


def run_and_exit(arguments: Sequence[str], early_server: EarlyServer | None) -> NoReturn:
    """Run the command line and end this process, without Python's own teardown, which would cost 20 ms."""
    status = main(arguments, early_server)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def _run_command() -> click.Command:
    settings = {"allow_interspersed_args": False}
    return Command("jaxrun", params=parameters(), callback=_run, context_settings=settings)


def _run(dry_run: bool, **values: Any) -> int:
    from jaxrun.backends import make_plan
    from jaxrun.job.program import check_program

    environ = dict(os.environ)
    job = check_program(make_job(values, environ), os.getcwd())
    invocation: _Invocation = click.get_current_context().obj
    if job.sbatch or job.submit:
        return _run_sbatch(job, invocation.words, environ, dry_run=dry_run)
    job_id = invocation.early_server.job_id if invocation.early_server else os.urandom(16).hex()
    plan = make_plan(job, environ, job_id)
    if dry_run:
        from jaxrun.job.render import render_plan

        click.echo(os.fsencode(render_plan(plan, environ)), nl=False)
        return 0
    from jaxrun.supervisor.run import run

    return run(plan, environ, invocation.early_server)


def _run_sbatch(job: Job, words: Sequence[str], environ: Mapping[str, str], *, dry_run: bool) -> int:
    """Write the batch script of the job, or hand it to Slurm."""
    from pathlib import Path

    from jaxrun.backends import follow, sbatch

    path = job.sbatch or Path(f"{job.name}.sbatch")
    text = sbatch.sbatch_script(job, words, directory=os.getcwd(), file=str(path))
    if dry_run:
        click.echo(os.fsencode(text), nl=False)
        return 0
    if job.submit:
        return follow.submit_and_follow(text, path, environ)
    sbatch.write_script(path, text)
    return 0


def _attach_command() -> click.Command:
    settings = {"allow_interspersed_args": False}
    parameters = attach_parameters()
    return Command("jaxrun attach", params=parameters, callback=_attach, context_settings=settings, help=ATTACH_USAGE)


def _attach(
    rank: int | None, size: int | None, head: str | None, rendezvous: str | None, check: str | None, **values: Any
) -> int:
    from pathlib import Path

    from jaxrun.job.program import check_program
    from jaxrun.supervisor.attach import AttachOptions, attach

    if check:
        from jaxrun.channel.reachability import check_reachable

        return check_reachable(check)
    environ = dict(os.environ)
    job = check_program(make_job({**values, "backend": ATTACH}, environ), os.getcwd())
    return attach(job, AttachOptions(rank, size, head or "", Path(rendezvous) if rendezvous else None), environ)


def _explain_command() -> click.Command:
    return click.Command(
        "jaxrun explain",
        params=[click.Argument(["run_dir"], type=click.Path(exists=True, file_okay=False))],
        callback=_explain,
        help="Say how the job that left RUN_DIR went: its verdict, and when each rank did what.",
    )


def _explain(run_dir: str) -> int:
    from pathlib import Path

    from jaxrun.rundir.explain import explain_run

    click.echo(os.fsencode(explain_run(Path(run_dir)).rstrip("\n")))
    return 0


def _stacks_command() -> click.Command:
    native = "C frames, too, by py-spy, which halts each rank for a second."
    return click.Command(
        "jaxrun stacks",
        params=[
            click.Argument(["run_dir"], required=False, type=click.Path(exists=True, file_okay=False)),
            click.Option(["--full"], is_flag=True, help="All frames of each group, too."),
            click.Option(["--native"], is_flag=True, help=native),
            click.Option(["--watch"], is_flag=True, help="Again every two seconds, until the job is over."),
        ],
        callback=_stacks,
        help="Show where all ranks of the running job of RUN_DIR are, in groups; of the latest job here without it. "
        "The job is not disturbed, save by --native.",
    )


def _stacks(run_dir: str | None, full: bool, native: bool, watch: bool) -> int:
    from pathlib import Path

    from jaxrun.rundir import stacks_request

    if native and watch:
        raise UsageError("--native halts every rank while it looks; not with --watch")
    job = stacks_request.find_running_job(Path(run_dir) if run_dir else None)
    if watch:
        stacks_request.watch_stacks(job)
    else:
        click.echo(os.fsencode(stacks_request.request_stacks(job, full=full, native=native)))
    return 0


_SUBCOMMANDS = {"attach": _attach_command, "explain": _explain_command, "stacks": _stacks_command}
