"""The options of `jaxrun`, `jaxrun attach` and `jaxrun doctor`, for click: made of what Job and its like declare."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import Field, dataclass, fields
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
    option,
    options_of,
)
from jaxrun.spec.backends import ATTACH, backends_with, understands
from jaxrun.spec.job.job import Job

_PLACE = "This process's place"
_FROM_ENGINE = "[default: what mpirun, srun or flux says]"
_TYPES = {"int": int, "float": Time(), "int | str": ProcessesPerNode()}  # by annotation; others are texts
_METAVARS = {"int": "N", "float": "TIME"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _JobWords:
    """What a command line says in words that no field of Job has."""

    processes_per_node: int | str | None = option(
        "--nproc-per-node",
        "torchrun's name: --processes-per-host, or -n on one machine.",
        group=SHAPE,
        metavar="N",
        attach=False,
    )
    assignments: tuple[str, ...] = option(
        "--env",
        "Set this variable in every process, or pass it on. May be repeated.",
        group=START,
        metavar="NAME[=VALUE]",
    )
    env_files: tuple[str, ...] = option(
        "--env-file", "The same from a file of NAME=VALUE lines; --env wins.", group=START, metavar="FILE"
    )
    dry_run: bool = option(
        "--dry-run",
        "Print what would be started, and start nothing.",
        group=START,
        main=True,
        configurable=False,
        attach=False,
        doctor=False,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _AttachOptions:
    """What `jaxrun attach` may be told of its process."""

    rank: int | None = option(
        "--rank",
        f"This process's rank, from 0. {_FROM_ENGINE}",
        group=_PLACE,
        main=True,
        metavar="R",
        configurable=False,
    )
    size: int | None = option(
        "--size", f"Processes of the job. {_FROM_ENGINE}", group=_PLACE, main=True, configurable=False
    )
    head: str | None = option(
        "--head",
        "Where rank 0 listens, alike on all ranks. [default: as the rendezvous says]",
        group=_PLACE,
        main=True,
        metavar="HOST:PORT",
    )
    rendezvous: str | None = option(
        "--rendezvous",
        "A directory that all hosts share, where rank 0 leaves its address. [default: the current one]",
        group=_PLACE,
        main=True,
        metavar="DIR",
    )
    check: str | None = option(
        "--check",
        "Only see whether a head can be reached at this address; start nothing.",
        group=_PLACE,
        metavar="HOST:PORT",
        configurable=False,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _DoctorOptions:
    """What `jaxrun doctor` may be told of its output."""

    as_json: bool = option("--json", "Print all that was found as JSON.", group=OUTPUT, main=True, configurable=False)


def parameters() -> list[click.Parameter]:
    """Return all options in the order of --help-all, and the program."""
    return [*_job_options(), *_about(), _program()]


def attach_parameters() -> list[click.Parameter]:
    """Return the options of `jaxrun attach`, without those of what somebody else has decided."""
    taken = [each for each in _job_options() if each.declared.attach and understands(ATTACH, each.declared)]
    return [*_make(_AttachOptions), *taken, *_about(), _program()]


def doctor_parameters() -> list[click.Parameter]:
    """Return the options of `jaxrun doctor`: those that say where and how a job runs, and its own."""
    chosen = [each for each in _job_options() if each.declared.doctor and each.declared.group not in (OUTPUT, FAILURE)]
    return [*_make(_DoctorOptions), *chosen, *_about()]


def _job_options() -> list[JobOption]:
    """The options of every command that runs a job, group by group; those of its workers follow its own."""
    of_workers = {each.name for each in fields(WorkerSettings)}
    made = sorted(_make(Job), key=lambda each: each.name in of_workers)
    return sorted([*made, *_make(_JobWords)], key=lambda each: GROUPS.index(each.declared.group))


def _make(record: Any) -> list[JobOption]:
    return [_make_option(field, declared) for field, declared in options_of(record)]


def _make_option(field: Field[Any], declared: Option) -> JobOption:
    """Make the option that a field declares; an option that is not given is None, False or empty."""
    kind = str(field.type).removesuffix(" | None")
    default = f"{field.default:g}" if isinstance(field.default, float) else str(field.default)
    attributes: dict[str, Any] = {"type": _TYPES.get(kind)}
    if declared.flag_value:
        attributes = {"is_flag": True, "flag_value": declared.flag_value}
    elif kind == "bool":
        attributes = {"is_flag": True}
    elif declared.choices:
        attributes = {"type": click.Choice(tuple(declared.choices))}
    return JobOption(
        [*declared.flags, field.name],
        declared,
        multiple=kind.startswith("tuple"),
        metavar=declared.metavar or "|".join(declared.choices) or _METAVARS.get(kind),
        help=declared.help.format(default=default, backends=", ".join(backends_with(declared))),
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
