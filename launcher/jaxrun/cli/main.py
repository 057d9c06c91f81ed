"""The command: flags become a Job, a backend makes it a Plan, supervise runs it; errors become exit codes.

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

from jaxrun.cli.help import ATTACH_USAGE, Command
from jaxrun.cli.options import attach_parameters, parameters
from jaxrun.errors import EXIT_SIGNAL_BASE, JaxrunError, UsageError
from jaxrun.job.job import Job
from jaxrun.protocol.flight_file import LOCKSTEP_STRICT
from jaxrun.protocol.names import GANG_ADDRESS, GANG_TOKEN
from jaxrun.text import parse_ranks

if TYPE_CHECKING:
    from jaxrun.forkserver.early import EarlyServer

_DEFAULT_STALL_TIMEOUT_S = 300.0  # seconds; where nobody looks, or where ranks that wait for each other are to be told
_EXIT_INTERRUPTED = EXIT_SIGNAL_BASE + 2


@dataclass(frozen=True, slots=True)
class _Invocation:
    """What a command is told besides its options: all words after `jaxrun`, and the early fork server."""

    words: tuple[str, ...]
    early_server: EarlyServer | None


def main(arguments: Sequence[str] | None = None, early_server: EarlyServer | None = None) -> int:
    """Run the command line; returns the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    command: click.Command = _RUN
    invocation = _Invocation(tuple(given), early_server)
    if given and given[0] in _SUBCOMMANDS:
        command, given = _SUBCOMMANDS[given[0]], given[1:]
    try:
        return command.main(given, prog_name=command.name, standalone_mode=False, obj=invocation) or 0
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


def make_job(values: Mapping[str, Any], environ: Mapping[str, str]) -> Job:
    """The Job for the parsed options; those that were not given keep the defaults of Job."""
    from pathlib import Path

    from jaxrun.job.environment import parse_assignment, read_env_file
    from jaxrun.job.fault_spec import parse_faults

    given = {name: value for name, value in values.items() if value is not None and value is not False}
    env: dict[str, str] = {}
    for path in given.pop("env_files", ()):
        env |= read_env_file(Path(path))
    env |= dict(parse_assignment(text, environ) for text in given.pop("assignments", ()))
    env |= {name: environ[name] for name in (GANG_ADDRESS, GANG_TOKEN) if name in environ}
    for name, option in (("quiet_ranks", "--quiet-ranks"), ("only_ranks", "--only-rank")):
        if name in given:
            given[name] = parse_ranks(given[name], option)
    given["chaos"] = tuple(fault for text in given.pop("chaos", ()) for fault in parse_faults(text))
    for name in ("run_dir", "hostfile", "sbatch"):
        if name in given:
            given[name] = Path(given[name])
    for name, option in (("mpi_args", "--mpi-args"), ("slurm_args", "--slurm-args")):
        given[name] = tuple(word for text in given.pop(name, ()) for word in _split_words(text, option))
    if given.pop("no_fork", False):
        given["no_fork"] = "--no-fork was given"
    unattended = environ.get("CI", "").lower() not in ("", "0", "false")
    if "stall_timeout" not in given and (unattended or given.get("lockstep") == LOCKSTEP_STRICT):
        given["stall_timeout"] = _DEFAULT_STALL_TIMEOUT_S
    return Job(**given, env=env)


def _split_words(text: str, option: str) -> list[str]:
    import shlex

    try:
        return shlex.split(text)
    except ValueError as error:
        raise UsageError(f"{option} {text!r} cannot be split into words: {str(error).lower()}") from None


def _run(dry_run: bool, **values: Any) -> int:
    from jaxrun.backends import backend
    from jaxrun.job.layout import wanted_platforms
    from jaxrun.job.machine import probe_machine
    from jaxrun.job.program import check_program

    environ = dict(os.environ)
    job = check_program(make_job(values, environ), os.getcwd())
    invocation: _Invocation = click.get_current_context().obj
    if job.sbatch or job.submit:
        return _run_sbatch(job, invocation.words, environ, dry_run=dry_run)
    given = {**environ, **job.env}
    # The devices of other hosts are for their agents to find.
    machine = probe_machine(wanted_platforms(job, given) if job.backend == "local" else (), given)
    job_id = invocation.early_server.job_id if invocation.early_server else os.urandom(16).hex()
    planned = backend(job.backend)(job, machine, environ, job_id)
    if dry_run:
        from jaxrun.job.render import render_plan

        click.echo(os.fsencode(render_plan(planned, environ)), nl=False)
        return 0
    from jaxrun.supervisor import run

    return run.run(planned, environ, invocation.early_server)


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
        return follow.submit(text, path, environ)
    follow.write_script(path, text)
    return 0


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
    job = check_program(make_job({**values, "backend": "attach"}, environ), os.getcwd())
    return attach(job, AttachOptions(rank, size, head or "", Path(rendezvous) if rendezvous else None), environ)


def _explain(run_dir: str) -> int:
    from pathlib import Path

    from jaxrun.rundir.explain import explain_run

    click.echo(os.fsencode(explain_run(Path(run_dir)).rstrip("\n")))
    return 0


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


_RUN = Command("jaxrun", params=parameters(), callback=_run, context_settings={"allow_interspersed_args": False})
_ATTACH = Command(
    "jaxrun attach",
    params=attach_parameters(),
    callback=_attach,
    context_settings={"allow_interspersed_args": False},
    help=ATTACH_USAGE,
)
_EXPLAIN = click.Command(
    "jaxrun explain",
    params=[click.Argument(["run_dir"], type=click.Path(exists=True, file_okay=False))],
    callback=_explain,
    help="Say how the job that left RUN_DIR went: its verdict, and when each rank did what.",
)
_STACKS = click.Command(
    "jaxrun stacks",
    params=[
        click.Argument(["run_dir"], required=False, type=click.Path(exists=True, file_okay=False)),
        click.Option(["--full"], is_flag=True, help="All frames of each group, too."),
        click.Option(["--native"], is_flag=True, help="C frames, too, by py-spy, which halts each rank for a second."),
        click.Option(["--watch"], is_flag=True, help="Again every two seconds, until the job is over."),
    ],
    callback=_stacks,
    help="Show where all ranks of the running job of RUN_DIR are, in groups; of the latest job here without it. "
    "The job is not disturbed, save by --native.",
)
_SUBCOMMANDS = {"explain": _EXPLAIN, "attach": _ATTACH, "stacks": _STACKS}
