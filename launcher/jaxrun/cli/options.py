"""The options of `jaxrun`, `jaxrun attach` and `jaxrun doctor`, for click: made of what Job and its like declare."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

import click

from jaxrun.cli.help import all_help, complete_program
from jaxrun.cli.option_types import JobOption, ProcessesPerNode, Time
from jaxrun.protocol.settings import (
    ABOUT,
    FAILURE,
    GROUPS,
    OUTPUT,
    SHAPE,
    START,
    Option,
    WorkerSettings,
    options_of,
)
from jaxrun.spec.backends import ATTACH, backends_with, understands
from jaxrun.spec.job.job import Job

_TYPES = {"int": int, "float": Time(), "int | str": ProcessesPerNode()}  # by annotation; others are texts
_METAVARS = {"int": "N", "float": "TIME"}


def parameters() -> list[click.Parameter]:
    """Return all options in the order of --help-all, and the program."""
    return [*_job_options(), *_about(), _program()]


def attach_parameters() -> list[click.Parameter]:
    """Return the options of `jaxrun attach`, without those of what somebody else has decided."""
    taken = [each for each in _job_options() if each.declared.attach and understands(ATTACH, each.declared)]
    return [*_place(), *taken, *_about(), _program()]


def doctor_parameters() -> list[click.Parameter]:
    """Return the options of `jaxrun doctor`: those that say where and how a job runs, and its own."""
    chosen = [each for each in _job_options() if each.declared.doctor and each.declared.group not in (OUTPUT, FAILURE)]
    text = "Print all that was found as JSON."
    as_json = _own("as_json", "bool", "--json", text, OUTPUT, main=True, configurable=False)
    return [as_json, *chosen, *_about()]


def _job_options() -> list[JobOption]:
    """The options of every command that runs a job, group by group; those of its workers follow its own."""
    of_workers = {each.name for each in fields(WorkerSettings)}
    made = [_make(each.name, str(each.type), declared, each.default) for each, declared in options_of(Job)]
    made.sort(key=lambda each: each.name in of_workers)
    return sorted([*made, *_words()], key=lambda each: GROUPS.index(each.declared.group))


def _words() -> list[JobOption]:
    """What a command line says in words that no field of Job has."""
    per_node = "torchrun's name: --processes-per-host, or -n on one machine."
    env = "Set this variable in every process, or pass it on. May be repeated."
    env_file = "The same from a file of NAME=VALUE lines; --env wins."
    dry_run = "Print what would be started, and start nothing."
    several, once = "tuple[str, ...]", {"configurable": False, "attach": False, "doctor": False}
    return [
        _own("processes_per_node", "int | str", "--nproc-per-node", per_node, SHAPE, metavar="N", attach=False),
        _own("assignments", several, "--env", env, START, metavar="NAME[=VALUE]"),
        _own("env_files", several, "--env-file", env_file, START, metavar="FILE"),
        _own("dry_run", "bool", "--dry-run", dry_run, START, main=True, **once),
    ]


def _place() -> list[JobOption]:
    """What `jaxrun attach` may be told of its process."""
    group = "This process's place"
    size = "Processes of the job. [default: what mpirun, srun or flux says]"
    head = "Where rank 0 listens, alike on all ranks. [default: as the rendezvous says]"
    rendezvous = "A directory that all hosts share, where rank 0 leaves its address. [default: the current one]"
    check = "Only see whether a head can be reached at this address; start nothing."
    rank = "This process's rank, from 0. [default: what mpirun, srun or flux says]"
    return [
        _own("rank", "int", "--rank", rank, group, metavar="R", main=True, configurable=False),
        _own("size", "int", "--size", size, group, main=True, configurable=False),
        _own("head", "str", "--head", head, group, metavar="HOST:PORT", main=True),
        _own("rendezvous", "str", "--rendezvous", rendezvous, group, metavar="DIR", main=True),
        _own("check", "str", "--check", check, group, metavar="HOST:PORT", configurable=False),
    ]


def _own(name: str, kind: str, title: str, text: str, group: str, **attributes: Any) -> JobOption:
    return _make(name, kind, Option(title, text, group, **attributes))


def _make(name: str, annotation: str, declared: Option, default: Any = None) -> JobOption:
    """Make the option whose value is of the type `annotation`; one that is not given is None, False or empty."""
    kind = annotation.removesuffix(" | None")
    shown = f"{default:g}" if isinstance(default, float) else str(default)
    attributes: dict[str, Any] = {"type": _TYPES.get(kind)}
    if kind == "bool" or declared.flag_value:
        attributes = {"is_flag": True}
    elif declared.choices:
        attributes = {"type": click.Choice(tuple(declared.choices))}
    return JobOption(
        [*declared.flags, name],
        declared,
        multiple=kind.startswith("tuple"),
        metavar=declared.metavar or "|".join(declared.choices) or _METAVARS.get(kind),
        help=declared.help.format(default=shown, backends=", ".join(backends_with(declared))),
        **attributes,
    )


def _program() -> click.Argument:
    return click.Argument(
        ["program"],
        nargs=-1,
        type=click.UNPROCESSED,
        metavar="PROGRAM [ARGS]...",
        shell_complete=complete_program,
    )


def _about() -> Iterable[JobOption]:
    for title, text, callback in (
        ("-V/--version", "Show the version.", _version),
        ("--help-all", "Show this; --help shows what most need.", _help_all),
    ):
        declared = Option(title, text, ABOUT, configurable=False)
        yield JobOption(
            declared.flags, declared, help=text, is_flag=True, is_eager=True, expose_value=False, callback=callback
        )


def _version(ctx: click.Context, param: click.Parameter, wanted: bool) -> None:
    if wanted:
        from jaxrun import __version__

        click.echo(f"jaxrun {__version__}")
        ctx.exit()


def _help_all(ctx: click.Context, param: click.Parameter, wanted: bool) -> None:
    if wanted:
        click.echo(all_help(ctx))
        ctx.exit()
