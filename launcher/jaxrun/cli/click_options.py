"""The options of `jaxrun`, `jaxrun attach` and `jaxrun doctor`, for click, made from Job's declarations."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import click

from jaxrun.cli.job_option import JobOption
from jaxrun.errors import UsageError
from jaxrun.protocol.names import SUBCOMMANDS, VERSION
from jaxrun.protocol.settings import WorkerSettings
from jaxrun.spec.backends import ATTACH, backends_with, understands
from jaxrun.spec.job.job import Job
from jaxrun.spec.job.option_declaration import ABOUT, FAILURE, GROUPS, OUTPUT, SHAPE, START, Option, options_of
from jaxrun.text import parse_seconds

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

PER_GPU = "gpu"  # a process for each GPU
AUTOMATIC = "auto"  # the default behaviour
_TAKEN_FOR_HELP = ("-host", "-hosts", "-hostfile")


class Time(click.ParamType):  # type: ignore[type-arg]  # click 8.1 has none
    """Seconds as a number, or with units: 90s, 5m, 1h30m; "never" is 0, for options that allow it."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        seconds = value if isinstance(value, float) else 0.0 if value == "never" else parse_seconds(str(value))
        if seconds is None:
            self.fail(f"{value!r} is not a time; write seconds, or 90s, 5m, 1h30m", param, ctx)
        return seconds


class NumberOrWord(click.ParamType):  # type: ignore[type-arg]  # click 8.1 has none
    """A number, or one of a few words, which stay words; with `has_ranges` also MIN:MAX, which stays a text."""

    name = "number"

    def __init__(self, words: Sequence[str], *, has_ranges: bool = False) -> None:
        self._words = words
        self._has_ranges = has_ranges

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        if value in self._words or (self._has_ranges and re.fullmatch("[0-9]+:[0-9]+", str(value))):
            return str(value)
        try:
            return int(value)
        except ValueError:
            self.fail(f"{value!r} is neither a number nor {' or '.join(self._words)}", param, ctx)


class RunDirectory(click.Path):
    """A directory, or a number: the run directory of the Nth latest job of those that `jaxrun list` shows."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, str) and re.fullmatch("[0-9]{1,9}", value):
            from jaxrun.records.rundir.jobs import latest_job

            if found := latest_job(int(value)):
                value = str(found)
        return super().convert(value, param, ctx)


def split_words(text: str, option: str) -> list[str]:
    """Split `text` as a shell does. Raises UsageError that names `option`."""
    import shlex

    try:
        return shlex.split(text)
    except ValueError as error:
        from jaxrun.spec.job.env_options import shown_assignment

        raise UsageError(
            f"{option} {shown_assignment(text)!r} cannot be split into words: {str(error).lower()}"
        ) from None


_TYPES = {"int": int, "float": Time()}  # by annotation; other types are texts
_METAVARS = {"int": "N", "float": "TIME"}


def parameters() -> list[click.Parameter]:
    """Return all options in the order of --help-all, and the program."""
    return [*_job_options(), *_about(), *_refused(), _program()]


def attach_parameters() -> list[click.Parameter]:
    """Return the options of `jaxrun attach`, without those that whoever started the processes has already decided."""
    taken = [each for each in _job_options() if each.declared.attach and understands(ATTACH, each.declared)]
    return [*_place(), *taken, *_about(), _program()]


def doctor_parameters() -> list[click.Parameter]:
    """Return the options of `jaxrun doctor`: those that say where and how a job runs, and its own."""
    chosen = [each for each in _job_options() if each.declared.doctor and each.declared.group not in (OUTPUT, FAILURE)]
    text = "Print all findings as JSON."
    as_json = _own("as_json", "bool", "--json", text, OUTPUT, main=True, configurable=False)
    return [as_json, *chosen, *_about()]


def _job_options() -> list[JobOption]:
    """Return the options of every command that runs a job, by group; options for its workers follow its own."""
    of_workers = {each.name for each in fields(WorkerSettings)}
    made = [_make(each.name, str(each.type), declared, each.default) for each, declared in options_of(Job)]
    made.sort(key=lambda each: each.name in of_workers)
    return sorted([*made, *_words()], key=lambda each: GROUPS.index(each.declared.group))


def _words() -> list[JobOption]:
    """Return the options that no field of Job has."""
    per_node = "torchrun's name for --processes-per-host, or for -n on one machine."
    env = "Set this variable in every process, or without a value pass yours on. May be repeated."
    env_file = "The same from a file of NAME=VALUE lines; --env wins."
    dry_run = "Print what would be started, and start nothing."
    as_json = "With --dry-run: print it as JSON, for programs."
    several, once = "tuple[str, ...]", {"configurable": False, "attach": False, "doctor": False}
    words = (AUTOMATIC, PER_GPU)
    return [
        _own("processes_per_node", "int", "--nproc-per-node", per_node, SHAPE, words=words, attach=False),
        _own("assignments", several, "--env", env, START, metavar="NAME[=VALUE]", common=True),
        _own("env_files", several, "--env-file", env_file, START, metavar="FILE"),
        _own("dry_run", "bool", "--dry-run", dry_run, START, main=True, **once),
        _own("as_json", "bool", "--json", as_json, START, **once),
    ]


def _place() -> list[JobOption]:
    """Return the options that tell `jaxrun attach` about its process."""
    group = "This process's place"
    size = "How many processes the job has. [default: what mpirun, srun or flux says]"
    head = "Where rank 0 listens; give the same on all ranks. [default: read from --rendezvous]"
    rendezvous = "A directory that all hosts share, where rank 0 writes its address. [default: the current one]"
    check = "Only test whether this host can reach the head at this address; start nothing."
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
    """Make the option with a value of type `annotation`; if not given, it is None, False or empty."""
    kind = annotation.removesuffix(" | None")
    shown = f"{default:g}" if isinstance(default, float) else str(default)
    attributes: dict[str, Any] = {"type": _TYPES.get(kind)}
    if kind == "bool" or declared.flag_value:
        attributes = {"is_flag": True}
    elif declared.choices:
        attributes = {"type": click.Choice(tuple(declared.choices))}
    elif declared.words:
        attributes = {"type": NumberOrWord(declared.words, has_ranges="MIN:MAX" in (declared.metavar or ""))}
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


def complete_program(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete files and, as the very first word, the commands of jaxrun."""
    from click.shell_completion import CompletionItem

    typed = click.core.ParameterSource.COMMANDLINE
    given = (name for name, value in ctx.params.items() if value and ctx.get_parameter_source(name) is typed)
    first = next(given, None) is None
    names = [name for name in SUBCOMMANDS if name.startswith(incomplete)] if first and ctx.info_name == "jaxrun" else []
    if not names:
        return [CompletionItem(incomplete, type="file")]
    # click's script for bash drops everything that came before an item of type "file".
    return [*map(CompletionItem, names), *map(CompletionItem, _files(incomplete))]


def _files(incomplete: str) -> list[str]:
    """Return the files and directories that begin with a word that has no slash."""
    try:
        with os.scandir() as entries:
            found = [f"{entry.name}/" if entry.is_dir() else entry.name for entry in entries]
    except OSError:
        return []
    return sorted(name for name in found if name.startswith(incomplete) and name.startswith(".") <= bool(incomplete))


def _about() -> Iterable[JobOption]:
    for title, text, callback in (
        ("-V/--version", "Show the version.", _version),
        ("--help-all", "Show all options; --help shows what you need most.", _help_all),
    ):
        declared = Option(title, text, ABOUT, configurable=False)
        yield JobOption(
            declared.flags, declared, help=text, is_flag=True, is_eager=True, expose_value=False, callback=callback
        )


def _refused() -> Iterable[click.Option]:
    """Yield hidden options that stop click from reading mpirun's `-host h1` as -h and showing the help."""
    for name in _TAKEN_FOR_HELP:
        own_name = f"refused_{name[1:]}"
        yield click.Option(
            [name, own_name], is_flag=True, is_eager=True, expose_value=False, hidden=True, callback=_refuse
        )


def _refuse(ctx: click.Context, param: click.Parameter, typed: bool) -> None:
    if typed:
        raise click.NoSuchOption(param.opts[0], ctx=ctx)


def _version(ctx: click.Context, param: click.Parameter, wanted: bool) -> None:
    if wanted:
        if "--json" in ctx.obj.words:
            from jaxrun.cli import documents

            click.echo(documents.version())
        else:
            click.echo(f"jaxrun {VERSION}")
        ctx.exit()


def _help_all(ctx: click.Context, param: click.Parameter, wanted: bool) -> None:
    if wanted:
        from jaxrun.cli.help import all_help

        click.echo(all_help(ctx))
        ctx.exit()
