"""The commands that read the files of past jobs, or query a running one: explain, logs, stop, top, list …"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn

import click

from jaxrun.cli import documents
from jaxrun.cli.click_options import RunDirectory
from jaxrun.errors import UsageError
from jaxrun.protocol.bounds import MAX_PROFILED_STEPS

_MAX_PORT = 65535

COMMANDS: dict[str, click.Command] = {}
_JOB = click.Argument(["run_dir"], required=False, type=RunDirectory(exists=True, file_okay=False))
_WHICH_JOB = "RUN_DIR is the job's run directory, or its number or name in jaxrun list. [default: the latest]"
_JSON = click.Option(["--json", "as_json"], is_flag=True, help="Print the same as JSON, for programs.")
_DIRECTORY = click.Argument(
    ["directory"], required=False, metavar="[DIR]", type=click.Path(exists=True, file_okay=False)
)


def _command(help_text: str, *params: click.Parameter) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Return a decorator that makes a function the command of the same name."""

    def add(function: Callable[..., int]) -> Callable[..., int]:
        name = function.__name__.strip("_")
        settings = {"help_option_names": ["-h", "--help"]}
        COMMANDS[name] = click.Command(
            f"jaxrun {name}", params=list(params), callback=function, context_settings=settings, help=help_text
        )
        return function

    return add


@_command(
    "Show how a job went: its verdict, what its time was worth, and how long each rank took to start; of several jobs, "
    f"what the time of all was worth. {_WHICH_JOB}",
    click.Argument(["run_dir"], nargs=-1, type=RunDirectory(exists=True, file_okay=False)),
    click.Option(
        ["--trace"],
        type=click.Path(),
        metavar="FILE",
        help="Write what all ranks did, for Perfetto: .json or .json.gz.",
    ),
    click.Option(["--html"], type=click.Path(), metavar="FILE", help="Write the same as a page for any browser."),
    _JSON,
)
def _explain(run_dir: tuple[str, ...], trace: str | None, html: str | None, as_json: bool) -> int:
    import gc

    from jaxrun.records.history.explain import explain_run, explain_runs, write_trace
    from jaxrun.records.rundir.recorded_files import find_run_dir
    from jaxrun.terminal import TerminalFormat

    gc.disable()  # a million events refer to each other in no circle, and to look for one would take most of the time
    if len(run_dir) > 1:
        if trace or html or as_json:
            raise UsageError("--trace, --html and --json are for one job; name one RUN_DIR")
        _show(explain_runs([Path(name) for name in run_dir]))
        return 0
    path = Path(run_dir[0]) if run_dir else None
    if not (trace or html or as_json):
        _show(explain_run(path, TerminalFormat.at(1, os.environ)).rstrip("\n"))
        return 0
    found = find_run_dir(path)
    if trace:
        click.echo(os.fsencode(write_trace(found, Path(trace))))
    if html:
        from jaxrun.frontends.job_page.page import write_page

        click.echo(os.fsencode(write_page(found, Path(html))))
    if not (trace or html):
        click.echo(os.fsencode(documents.explanation(found)))
    return 0


@_command(
    f"Show where all ranks of a running job are, in groups. The job is not disturbed, except by --native. {_WHICH_JOB}",
    _JOB,
    click.Option(["--full"], is_flag=True, help="Show all frames of each group."),
    click.Option(["--native"], is_flag=True, help="Show C frames too, by py-spy, which stops each rank for a second."),
    _JSON,
)
def _stacks(run_dir: str | None, full: bool, native: bool, as_json: bool) -> int:
    from jaxrun.job_client import job_requests, running_job

    job = running_job.find_running_job(_path(run_dir), "jaxrun stacks")
    stacks = job_requests.request_stacks(job, native=native)
    text = job_requests.format_stacks(stacks, full=full, native=native)
    if as_json:
        click.echo(os.fsencode(documents.stacks(job.run_dir, stacks, text)))
    else:
        _show(text)
    return 0


@_command(
    "Take a JAX profile of the next steps of a running job, on all ranks at the same calls, for xprof. " + _WHICH_JOB,
    _JOB,
    click.Option(
        ["--steps"],
        type=click.IntRange(1, MAX_PROFILED_STEPS),
        default=5,
        metavar="N",
        help="How many steps. [default: 5]",
    ),
    click.Option(
        ["--output"],
        type=click.Path(),
        metavar="DIR",
        help="A directory that all hosts share. [default: the run directory]",
    ),
)
def _profile(run_dir: str | None, steps: int, output: str | None) -> int:
    from jaxrun.job_client import job_requests, running_job

    job = running_job.find_running_job(_path(run_dir), "jaxrun profile")
    text = job_requests.take_profile(job, steps, _path(output), lambda text: click.echo(os.fsencode(f"jaxrun: {text}")))
    click.echo(os.fsencode(text))
    return 0


@_command(
    "Show how far each rank of a running job is, and what it uses, twice a second. Ranks that stand out come first. "
    f"The job is not disturbed. {_WHICH_JOB}",
    _JOB,
    click.Option(["--once"], is_flag=True, help="Print the table once, and end. So does output to a pipe."),
    _JSON,
    click.Option(["--follow"], is_flag=True, help="With --json: print a line each second until the job is over."),
    click.Option(
        ["--web"],
        is_flag=False,
        flag_value="0",
        metavar="[PORT]",
        help="Show a running or finished job as a page for a browser on this machine, at this port or any free one. "
        "Ctrl-C ends that.",
    ),
    click.Option(["--launcher"], type=int, hidden=True),  # the launcher that started this process, for --live
)
def _top(run_dir: str | None, once: bool, as_json: bool, follow: bool, web: str | None, launcher: int | None) -> int:
    from jaxrun.frontends.top import watch
    from jaxrun.job_client import running_job

    if launcher is not None:
        assert run_dir is not None
        watch.watch_from_start(Path(run_dir), launcher, os.environ)
        return 0
    if follow and not as_json:
        raise UsageError("--follow prints JSON lines; give --json as well, or leave it out to watch the job")
    if web and not web.isdecimal() and run_dir is None:  # click takes the word after --web for its value
        run_dir, web = web, "0"
    if web is not None:
        return _serve_page(_path(run_dir), web)
    job = running_job.find_running_job(_path(run_dir), "jaxrun top")
    if as_json:
        for view in watch.follow(job) if follow else [watch.read_once(job)]:
            click.echo(os.fsencode(documents.top(job.run_dir, view, in_one_line=follow)))
    elif once or not watch.is_terminal():
        watch.show_once(job, os.environ)
    else:
        watch.watch(job, os.environ)
    return 0


def _serve_page(run_dir: Path | None, port: str) -> NoReturn:
    """Serve the page until Ctrl-C: also when the job is over, so that its end can be looked at."""
    from jaxrun.frontends.job_page.server import find_job, serve_page

    if not port.isdecimal() or int(port) > _MAX_PORT:
        raise UsageError(f"--web {port} is not a port; give a number up to {_MAX_PORT}, or none for any free port")

    def announce(address: str) -> None:
        click.echo(f"jaxrun: open {address} in a browser on this machine; Ctrl-C ends this", err=True)

    serve_page(*find_job(run_dir), int(port), announce)


@_command(
    "Connect an editor's debugger (debugpy) with a rank of a running job, on any host, and print the launch.json for "
    f"it. It ends when the editor lets go, or by Ctrl-C; the job continues. {_WHICH_JOB}",
    _JOB,
    click.Option(["--rank"], type=click.IntRange(min=0), metavar="R", help="The rank to debug; required."),
    click.Option(["--go"], is_flag=True, help="Instead let a job that was started with --debug run without an editor."),
    click.Option(
        ["--port"],
        type=click.IntRange(0, _MAX_PORT),
        default=0,
        metavar="PORT",
        help="Where the editor connects on this host, at 127.0.0.1. [default: any free port]",
    ),
    _JSON,
)
def _debug(run_dir: str | None, rank: int | None, go: bool, port: int, as_json: bool) -> int:
    from jaxrun.frontends.debugger import session
    from jaxrun.job_client import running_job

    if go:
        session.start_programs(running_job.find_running_job(_path(run_dir), "jaxrun debug --go"))
        return 0
    if rank is None:
        raise UsageError("--rank is missing; say which rank to debug: jaxrun debug --rank 0")
    session.check_debugpy()
    job = running_job.find_running_job(_path(run_dir), "jaxrun debug")

    def show(port: int, staged: Mapping[str, str]) -> None:
        configuration = session.make_configuration(rank, port, staged)
        text = f"jaxrun: rank {rank} can be debugged; start this configuration (.vscode/launch.json), or Ctrl-C"
        click.echo(text, err=True)
        click.echo(os.fsencode(documents.debug(job.run_dir, rank, configuration, as_json=as_json)))

    def show_editor() -> None:
        click.echo(f"jaxrun: an editor debugs rank {rank}; the job's clocks stand still until it disconnects", err=True)

    debugger = session.DebugSession(job, rank, port, show, show_editor)
    try:
        why = debugger.wait()
    finally:
        debugger.close()
    click.echo(f"jaxrun: {why or f'the debugger has let go of rank {rank}'}", err=True)
    return 0


@_command(
    f"Print what the ranks of a job have printed, in its latest attempt: rank by rank; -f as it comes. {_WHICH_JOB}",
    _JOB,
    click.Option(["-f", "--follow"], is_flag=True, help="Continue until the job is over, and print how it ended."),
    click.Option(["--rank"], metavar="R,R", help="Only these ranks, such as 0,4-7."),
    click.Option(["--attempt"], type=click.IntRange(min=1), metavar="N", help="This attempt, from 1."),
    click.Option(
        ["-n", "--tail"], type=click.IntRange(min=0), metavar="N", help="Only the last N lines of each log file."
    ),
)
def _logs(run_dir: str | None, follow: bool, rank: str | None, attempt: int | None, tail: int | None) -> int:
    from jaxrun.records.history.rank_output import show_output
    from jaxrun.records.rundir.recorded_files import find_run_dir
    from jaxrun.text import parse_ranks

    ranks = parse_ranks(rank, "--rank") if rank is not None else None
    show_output(find_run_dir(_path(run_dir)), ranks=ranks, attempt=attempt, last_lines=tail, follow=follow)
    return 0


_STOP_HELP = (
    "End a running job, as SIGTERM to its jaxrun does: a program that polls should_stop ends by itself, others have "
    f"--signal-grace if they listen. Waits until it is over. {_WHICH_JOB}"
)
_NOW = click.Option(["--now"], is_flag=True, help="Give it half a second to end, not --signal-grace; exit code 129.")


@_command(_STOP_HELP, _JOB, _NOW, _JSON)
def _stop(run_dir: str | None, now: bool, as_json: bool) -> int:
    from jaxrun.job_client import job_requests, running_job

    job = running_job.find_running_job(_path(run_dir), "jaxrun stop")
    verdict = job_requests.stop(job, now=now, show=lambda text: click.echo(os.fsencode(f"jaxrun: {text}"), err=True))
    if as_json:
        click.echo(os.fsencode(documents.stopped(job.run_dir, verdict)))
    else:
        _show(job_requests.format_stopped(job.run_dir, verdict))
    return 0


@_command(f"Another word for jaxrun stop. {_STOP_HELP}", _JOB, _NOW, _JSON)
def _kill(run_dir: str | None, now: bool, as_json: bool) -> int:
    return _stop(run_dir, now, as_json)


@_command(
    "List the jobs that have a run directory in DIR, the newest last. [default: jaxrun-runs]",
    click.Option(["--goodput"], is_flag=True, help="Instead sum up what the time of the jobs was worth, by --tag."),
    _JSON,
    _DIRECTORY,
)
def _list(goodput: bool, directory: str | None, as_json: bool) -> int:
    from jaxrun.records.rundir import jobs

    collection, found = jobs.list_jobs(_path(directory))
    if goodput and as_json:
        raise UsageError("--goodput has no JSON of its own; explain --json has the goodput of each job")
    if goodput:
        from jaxrun.records.history.goodput import format_by_tag

        _show(
            format_by_tag((job.path, job.tag) for job in found) or f"no job below {collection} has steps that are known"
        )
        return 0
    if as_json:
        click.echo(os.fsencode(documents.job_list(collection, found)))
    else:
        from jaxrun.terminal import terminal_width

        _show(jobs.format_jobs(found, terminal_width(1)) if found else f"{collection} holds no run directory")
    return 0


@_command("Another word for jaxrun list: the jobs in DIR, the newest last. [default: jaxrun-runs]", _JSON, _DIRECTORY)
def _status(directory: str | None, as_json: bool) -> int:
    return _list(False, directory, as_json)


@_command(
    "Delete the run directories in DIR, except the newest N and those of jobs that still run. [default: jaxrun-runs]",
    click.Option(["--keep"], type=click.IntRange(min=0), metavar="N", help="How many of the newest to keep; required."),
    click.Option(["--dry-run"], is_flag=True, help="Only show what would be deleted."),
    click.Option(["--staged"], is_flag=True, help="Instead delete this host's copies of --stage that no job uses."),
    click.Option(
        ["--stage-dir"], type=click.Path(), metavar="DIR", help="Where they are. [default: TMPDIR, else /tmp]"
    ),
    _JSON,
    _DIRECTORY,
)
def _clean(
    keep: int | None, dry_run: bool, staged: bool, stage_dir: str | None, as_json: bool, directory: str | None
) -> int:
    from jaxrun.files.shared_memory import remove_abandoned
    from jaxrun.node.agent import mpi_memory
    from jaxrun.records.rundir import job_sockets, jobs

    if staged and dry_run:
        raise UsageError("--dry-run shows which run directories would be deleted; leave it out with --staged")
    if staged:
        return _clean_copies(stage_dir or "", as_json=as_json)
    if keep is None:
        raise UsageError(
            "--keep is missing; say how many of the newest run directories to keep: jaxrun clean --keep 20"
        )
    collection, found = jobs.find_collection_to_clean(_path(directory))
    done = jobs.clean(collection, found, keep, dry_run=dry_run)
    if not dry_run:
        job_sockets.remove_stale(os.environ)
        remove_abandoned(snapshots_after=0.0)
        mpi_memory.remove_abandoned()
    if as_json:
        click.echo(os.fsencode(documents.cleaned(done)))
    else:
        _show(jobs.format_cleaned(done))
    return 1 if done.failed else 0


def _clean_copies(stage_dir: str, *, as_json: bool) -> int:
    from jaxrun.node.staging.copies import Copies
    from jaxrun.records.document_types import CleanedCopies
    from jaxrun.text import plural

    try:
        copies = Copies(stage_dir)
    except OSError as error:
        raise UsageError(f"cannot use {stage_dir or 'TMPDIR'}: {error.strerror}; is --stage-dir right?") from None
    count, deleted = copies.remove_unused()
    if as_json:
        document = CleanedCopies(directory=str(copies.path), copies=count, deleted=deleted)
        click.echo(os.fsencode(documents.format_document(document)))
    else:
        _show(f"deleted {deleted} of {plural(count, 'copy')} in {copies.path}")
    return 0


def _path(name: str | None) -> Path | None:
    return Path(name) if name else None


def _show(text: str) -> None:
    """Print text from files, which any user may have written."""
    from jaxrun.terminal import without_controls

    click.echo(os.fsencode(without_controls(text)))
