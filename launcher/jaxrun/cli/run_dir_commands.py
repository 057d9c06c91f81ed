"""The commands that read what jobs have left, or ask a running one: explain, stacks."""

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
        help="Say how the job that left RUN_DIR went: its verdict, and when each rank did what; of the latest job here "
        "without it.",
    )


def _explain(run_dir: str | None) -> int:
    from jaxrun.rundir.explain import explain_run

    click.echo(os.fsencode(explain_run(Path(run_dir) if run_dir else None).rstrip("\n")))
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
    from jaxrun.rundir import stacks_request

    if native and watch:
        raise UsageError("--native halts every rank while it looks; not with --watch")
    job = stacks_request.find_running_job(Path(run_dir) if run_dir else None)
    if watch:
        stacks_request.watch_stacks(job)
    else:
        click.echo(os.fsencode(stacks_request.request_stacks(job, full=full, native=native)))
    return 0


COMMANDS = {"explain": _explain_command, "stacks": _stacks_command}
