"""The command line: each option is declared once, with its group and its help.

The defaults stand in Job; an option that is not given is None, False or empty.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import click

from jaxrun.helppages import Option, all_help
from jaxrun.planning.job import PLATFORMS, Job

BACKENDS = ("local", "mpirun", "slurm")
_DEFAULTS = {field.name: field.default for field in fields(Job)}
_SECONDS: dict[str, Any] = {"type": float, "metavar": "SECONDS"}


def parameters() -> list[click.Parameter]:
    """All options in the order of --help-all, and the program."""
    program = click.Argument(
        ["program"],
        nargs=-1,
        type=click.UNPROCESSED,
        metavar="PROGRAM [ARGS]...",
        shell_complete=_file_names,
    )
    return [*_shape(), *_start(), *_output(), *_failure(), *_about(), program]


def _shape() -> list[click.Parameter]:
    group = "The job's shape"
    processes = "Processes to start. [default: one per GPU, else one per host]"
    devices = "GPUs of each process, or simulated devices on CPU. [default: 1]"
    module = "PROGRAM is the name of a module, as in python -m."
    platform = "Take cpu, cuda, rocm or tpu, and no other. [default: what is there]"
    hosts = "Act as H hosts on this machine; processes are dealt equally."
    return [
        Option("-n", "--processes", group=group, main=True, type=int, metavar="N", help=processes),
        Option("-d", "--devices-per-process", group=group, main=True, type=int, metavar="D", help=devices),
        Option("-m", "module", group=group, main=True, is_flag=True, help=module),
        Option(
            "--platform",
            group=group,
            main=True,
            type=click.Choice(PLATFORMS),
            metavar="NAME",
            help=platform,
        ),
        Option("--simulate-hosts", "simulated_hosts", group=group, type=int, metavar="H", help=hosts),
    ]


def _start() -> list[click.Parameter]:
    group = "Backends and environment"
    backend = f"What starts the processes. [default: {_DEFAULTS['backend']}; the others are to come]"
    env = "Set this variable in every process, or pass it on. May be repeated."
    env_file = "The same from a file of NAME=VALUE lines; --env wins."
    no_fork = "A fresh interpreter for each process. So does '# jaxrun: no-fork' in the program's first 20 lines."
    dry_run = "Print what would be started, and start nothing."
    choice = click.Choice(BACKENDS)
    return [
        Option("--backend", group=group, type=choice, metavar="|".join(BACKENDS), help=backend),
        Option("--env", "assignments", group=group, multiple=True, metavar="NAME[=VALUE]", help=env),
        Option("--env-file", "env_files", group=group, multiple=True, metavar="FILE", help=env_file),
        Option("--no-fork", group=group, is_flag=True, help=no_fork),
        Option("--dry-run", group=group, main=True, is_flag=True, help=dry_run),
    ]


def _output() -> list[click.Parameter]:
    group = "Output"
    run_dir = "Where logs, events and verdict go. [default: a new one in jaxrun-runs]"
    quiet = "Keep ranks such as 1-3,7 off the screen."
    only = "Show the output of these ranks only."
    return [
        Option("--run-dir", group=group, metavar="DIR", help=run_dir),
        Option("--no-run-dir", group=group, is_flag=True, help="Leave no files."),
        Option("--quiet-ranks", group=group, metavar="RANKS", help=quiet),
        Option("--only-rank", "only_ranks", group=group, metavar="RANKS", help=only),
        Option("--tag", group=group, metavar="TEXT", help="A remark to keep in the job's files."),
        Option("-v", "--verbose", group=group, is_flag=True, help="Say what is being done."),
    ]


def _failure() -> list[click.Parameter]:
    group = "Failure"
    timeout = "Stop the job after this time. [default: no limit]"
    init = f"Stop it if not all have joined by then. [default: {_DEFAULTS['init_timeout']:g}]"
    grace = f"From SIGTERM to SIGKILL when the job is stopped. [default: {_DEFAULTS['grace']:g}]"
    return [
        Option("--timeout", group=group, main=True, help=timeout, **_SECONDS),
        Option("--init-timeout", group=group, help=init, **_SECONDS),
        Option("--grace", group=group, help=grace, **_SECONDS),
    ]


def _about() -> list[click.Parameter]:
    kind: dict[str, Any] = {"group": "About", "is_flag": True, "is_eager": True, "expose_value": False}
    return [
        Option("--version", callback=_version, help="Show the version.", **kind),
        Option("--help-all", callback=_help_all, help="Show this; --help shows what most need.", **kind),
    ]


def _version(ctx: click.Context, param: click.Parameter, wanted: bool) -> None:
    if wanted:
        from jaxrun import __version__

        click.echo(f"jaxrun {__version__}")
        ctx.exit()


def _help_all(ctx: click.Context, param: click.Parameter, wanted: bool) -> None:
    if wanted:
        click.echo(all_help(ctx))
        ctx.exit()


def _file_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[Any]:
    from click.shell_completion import CompletionItem

    return [CompletionItem(incomplete, type="file")]
