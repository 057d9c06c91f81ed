"""The options of `jaxrun`, `jaxrun attach` and `jaxrun doctor`, for click, made from Job's declarations."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import click

from jaxrun.cli.job_option import JobOption
from jaxrun.errors import UsageError
from jaxrun.protocol.names import SUBCOMMANDS, VERSION
from jaxrun.protocol.settings import WorkerSettings
from jaxrun.spec.backends import ATTACH, understands
from jaxrun.spec.job.job import Job
from jaxrun.spec.job.option_declaration import ABOUT, FAILURE, GROUPS, OUTPUT, SHAPE, START, Option, options_of
from jaxrun.spec.job.option_kinds import COUNT, DIRECTORY, FLAG, TEXT, Kind, count_or
from jaxrun.terminal import in_one_line

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

PER_GPU = "gpu"  # a process for each GPU
PER_CORE = "cpu"  # a process for each core that this process may use, on CPU
AUTOMATIC = "auto"  # the default behaviour
_TAKEN_FOR_HELP = ("-host", "-hosts", "-hostfile")


class RunDirectory(click.Path):
    """A run directory, or the number or name of a job that `jaxrun list` shows."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, str):
            from jaxrun.records.rundir.jobs import find_job

            if found := find_job(value):
                value = str(found)
        return super().convert(value, param, ctx)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Complete the numbers and names of jobs here, the newest first; else directories."""
        from click.shell_completion import CompletionItem

        from jaxrun.records.rundir.jobs import list_jobs

        try:
            jobs = list_jobs(None)[1]
        except UsageError:
            jobs = []
        found = []
        for job in reversed(jobs):
            names = [job.path.name] if job.number is None else [str(job.number), job.path.name]
            about = f"{' '.join(job.command)}: {job.state}"
            found += [CompletionItem(name, help=in_one_line(about)) for name in names if name.startswith(incomplete)]
        return found or super().shell_complete(ctx, param, incomplete)


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
    as_json = _own("as_json", FLAG, "--json", text, OUTPUT, main=True, configurable=False)
    return [as_json, *chosen, *_about()]


def _job_options() -> list[JobOption]:
    """Return the options of every command that runs a job, by group; options for its workers follow its own."""
    of_workers = set(WorkerSettings.__struct_fields__)
    made = [JobOption([*declared.flags, each.name], declared, each.default) for each, declared in options_of(Job)]
    made.sort(key=lambda each: each.name in of_workers)
    return sorted([*made, *_words()], key=lambda each: GROUPS.index(each.declared.group))


def _words() -> list[JobOption]:
    """Return the options that no field of Job has."""
    per_node = "torchrun's name for --processes-per-host, or for -n on one machine."
    dry_run = "Print what would be started, and start nothing."
    as_json = "With --dry-run: print it as JSON, for programs."
    once = {"configurable": False, "attach": False, "doctor": False}
    count = count_or(AUTOMATIC, PER_GPU, PER_CORE)
    return [
        _own("processes_per_node", count, "--nproc-per-node", per_node, SHAPE, attach=False),
        _own("dry_run", FLAG, "--dry-run", dry_run, START, main=True, **once),
        _own("as_json", FLAG, "--json", as_json, START, **once),
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
        _own("rank", COUNT, "--rank", rank, group, metavar="R", main=True, configurable=False),
        _own("size", COUNT, "--size", size, group, main=True, configurable=False),
        _own("head", TEXT, "--head", head, group, metavar="HOST:PORT", main=True),
        _own("rendezvous", DIRECTORY, "--rendezvous", rendezvous, group, main=True),
        _own("check", TEXT, "--check", check, group, metavar="HOST:PORT", configurable=False),
    ]


def _own(name: str, kind: Kind, title: str, text: str, group: str, **attributes: Any) -> JobOption:
    declared = Option(title, kind, text, group, **attributes)
    return JobOption([*declared.flags, name], declared)


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
        declared = Option(title, FLAG, text, ABOUT, configurable=False)
        yield JobOption(declared.flags, declared, is_eager=True, expose_value=False, callback=callback)


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
