"""The commands that read what jobs have left, or ask a running one: explain, stacks, list, clean."""

from __future__ import annotations

import os
from pathlib import Path

import click

from jaxrun.errors import UsageError

_SETTINGS = {"help_option_names": ["-h", "--help"]}


def _explain_command() -> click.Command:
    return click.Command(
        "jaxrun explain",
        params=[click.Argument(["run_dir"], required=False, type=click.Path(exists=True, file_okay=False))],
        callback=_explain,
        context_settings=_SETTINGS,
        help="Say how the job that left RUN_DIR went: its verdict, and when each rank did what; of the latest job here "
        "without it.",
    )


def _explain(run_dir: str | None) -> int:
    from jaxrun.rundir.explain import explain_run
    from jaxrun.terminal import TerminalFormat

    text = explain_run(Path(run_dir) if run_dir else None, TerminalFormat.at(1, os.environ))
    click.echo(os.fsencode(text.rstrip("\n")))
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
        context_settings=_SETTINGS,
        help="Show where all ranks of the running job of RUN_DIR are, in groups; of the latest job here without it. "
        "The job is not disturbed, save by --native.",
    )


def _stacks(run_dir: str | None, full: bool, native: bool, watch: bool) -> int:
    from jaxrun.rundir import stacks_request

    if native and watch:
        raise UsageError("--native halts every rank while it looks; not with --watch")
    job = stacks_request.find_running_job(Path(run_dir) if run_dir else None)
    if watch:
        stacks_request.watch_stacks(job)
    else:
        click.echo(os.fsencode(stacks_request.request_stacks(job, full=full, native=native)))
    return 0


def _list_command() -> click.Command:
    return click.Command(
        "jaxrun list",
        params=[_directory()],
        callback=_list,
        context_settings=_SETTINGS,
        help="List the jobs whose run directories lie in DIR, or in jaxrun-runs here without it; the newest last.",
    )


def _list(directory: str | None) -> int:
    from jaxrun.rundir import jobs

    collection, found = jobs.list_jobs(Path(directory) if directory else None)
    click.echo(os.fsencode(jobs.format_jobs(found) if found else f"{collection} holds no run directory"))
    return 0


def _clean_command() -> click.Command:
    return click.Command(
        "jaxrun clean",
        params=[
            click.Option(["--keep"], type=click.IntRange(min=0), metavar="N", help="Keep the newest N."),
            click.Option(["--dry-run"], is_flag=True, help="Only say what would be deleted."),
            _directory(),
        ],
        callback=_clean,
        context_settings=_SETTINGS,
        help="Delete the run directories in DIR, or in jaxrun-runs here without it, but for the newest ones. "
        "Those of jobs that still run are kept, too.",
    )


def _clean(keep: int | None, dry_run: bool, directory: str | None) -> int:
    from jaxrun.rundir import jobs

    if keep is None:
        raise UsageError("say how many of the newest run directories to keep: jaxrun clean --keep 20")
    collection, found = jobs.list_jobs(Path(directory) if directory else None)
    lines, failed = jobs.clean(collection, found, keep, dry_run=dry_run)
    click.echo(os.fsencode("\n".join(lines)))
    return 1 if failed else 0


def _directory() -> click.Argument:
    return click.Argument(["directory"], required=False, metavar="[DIR]", type=click.Path(exists=True, file_okay=False))


COMMANDS = {
    "clean": _clean_command,
    "explain": _explain_command,
    "list": _list_command,
    "stacks": _stacks_command,
}
