"""The command line: each option is declared once, with its group and its help.

The defaults stand in Job; an option that is not given is None, False or empty.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import click

from jaxrun.backends import BACKENDS
from jaxrun.cli.help import Option, all_help
from jaxrun.job.job import PLATFORMS, Job
from jaxrun.protocol.flight_file import LOCKSTEP_MODES

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
    return [*_shape(), *_start(), *_mpirun(), *_slurm(), *_output(), *_failure(), *_about(), program]


def attach_parameters() -> list[click.Parameter]:
    """Those of `jaxrun attach`: what another has decided is left out."""
    left_out = {"processes", "simulated_hosts", "hosts", "processes_per_host", "backend", "no_fork", "dry_run"}
    shared = [param for param in parameters() if param.name not in left_out]
    slurm_and_mpirun = {param.name for param in (*_mpirun(), *_slurm())} - {"interface"}
    return [*_place(), *(param for param in shared if param.name not in slurm_and_mpirun)]


def _place() -> list[click.Parameter]:
    group = "This process's place"
    size = "Processes of the job. [default: what mpirun, srun or flux says]"
    head = "Where rank 0 listens, alike on all ranks. [default: as the rendezvous says]"
    rendezvous = "A directory that all hosts share, where rank 0 leaves its address. [default: the current one]"
    check = "Only see whether a head can be reached at this address; start nothing."
    rank = "This process's rank, from 0. [default: what mpirun, srun or flux says]"
    return [
        Option("--rank", group=group, main=True, type=int, metavar="R", help=rank),
        Option("--size", group=group, main=True, type=int, metavar="N", help=size),
        Option("--head", group=group, main=True, metavar="HOST:PORT", help=head),
        Option("--rendezvous", group=group, main=True, metavar="DIR", help=rendezvous),
        Option("--check", group=group, metavar="HOST:PORT", help=check),
    ]


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
            type=click.Choice(PLATFORMS),
            metavar="NAME",
            help=platform,
        ),
        Option("--simulate-hosts", "simulated_hosts", group=group, type=int, metavar="H", help=hosts),
        Option("-N", "--hosts", group=group, type=int, metavar="N", help="Real hosts, with mpirun or slurm."),
        Option("--processes-per-host", group=group, type=int, metavar="N", help="Processes on each of them."),
    ]


def _start() -> list[click.Parameter]:
    group = "Backends and environment"
    backend = f"What starts the processes. [default: {_DEFAULTS['backend']}]"
    env = "Set this variable in every process, or pass it on. May be repeated."
    env_file = "The same from a file of NAME=VALUE lines; --env wins."
    no_fork = "A fresh interpreter for each process. So does '# jaxrun: no-fork' in the program's first 20 lines."
    dry_run = "Print what would be started, and start nothing."
    choice = click.Choice(BACKENDS)
    return [
        Option("--backend", group=group, main=True, type=choice, metavar="|".join(BACKENDS), help=backend),
        Option("--env", "assignments", group=group, multiple=True, metavar="NAME[=VALUE]", help=env),
        Option("--env-file", "env_files", group=group, multiple=True, metavar="FILE", help=env_file),
        Option("--no-fork", group=group, is_flag=True, help=no_fork),
        Option("--dry-run", group=group, main=True, is_flag=True, help=dry_run),
    ]


def _mpirun() -> list[click.Parameter]:
    group = "mpirun"
    host_list = "Hosts and their slots, as h1:4,h2:4. [default: mpirun's own]"
    hostfile = "The same from a file, a host in each line: 'h1 slots=4' or 'h1:4'."
    mpirun = "The mpirun to use: Open MPI, MPICH or Intel MPI. [default: the one on PATH]"
    mpi_args = "More words for mpirun, as typed in a shell. May be repeated."
    interface = "Where jaxrun listens for other hosts: eth0, an address, or 10.1.0.0/16. [default: all; mpirun, slurm]"
    return [
        Option("-H", "--host", "host_list", group=group, metavar="HOSTS", help=host_list),
        Option("--hostfile", group=group, metavar="FILE", help=hostfile),
        Option("--mpirun", group=group, metavar="PATH", help=mpirun),
        Option("--mpi-args", group=group, multiple=True, metavar="WORDS", help=mpi_args),
        Option("--interface", group=group, metavar="NAME", help=interface),
    ]


def _slurm() -> list[click.Parameter]:
    group = "Slurm"
    slurm_args = "More words for srun and sbatch. May be repeated."
    sbatch = "Write a batch script that runs this job, and start nothing."
    submit = "Hand the job to Slurm, and follow its output; Ctrl-C only stops following."
    return [
        Option("--cpus-per-process", group=group, type=int, metavar="N", help="Cores to ask for, for each process."),
        Option("--gpus-per-host", group=group, type=int, metavar="N", help="GPUs to ask for, on each host."),
        Option("--partition", group=group, metavar="NAME", help="The partition to run in."),
        Option(
            "--time", "time_limit", group=group, metavar="TIME", help="The time limit, as Slurm writes it: 1:30:00."
        ),
        Option("--account", group=group, metavar="NAME", help="The account to charge."),
        Option("--slurm-args", group=group, multiple=True, metavar="WORDS", help=slurm_args),
        Option("--sbatch", group=group, metavar="FILE", help=sbatch),
        Option("--submit", group=group, is_flag=True, help=submit),
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
    stall = (
        "Stop it after so long without output, calls or CPU time in any rank; 0: never. "
        "[default: 0; 300 where CI is set, and with --lockstep strict]"
    )
    lockstep = (
        "Keep the ranks in step: record their cross-process calls and report what differs, or agree on each call "
        f"first (strict: slow, for debugging), or off. [default: {_DEFAULTS['lockstep']}]"
    )
    init = f"Stop it if not all have joined by then. [default: {_DEFAULTS['init_timeout']:g}]"
    chaos = (
        "Bring about faults, to see what survives them: kill:1@2s, pause:0-3@1.5s or cut:2@500ms, "
        "so long after the program has started on all ranks. May be repeated."
    )
    grace = f"From SIGTERM to SIGKILL when the job is stopped. [default: {_DEFAULTS['grace']:g}]"
    return [
        Option("--timeout", group=group, main=True, help=timeout, **_SECONDS),
        Option("--stall-timeout", group=group, help=stall, **_SECONDS),
        Option(
            "--lockstep",
            group=group,
            type=click.Choice(LOCKSTEP_MODES),
            metavar="|".join(LOCKSTEP_MODES),
            help=lockstep,
        ),
        Option("--init-timeout", group=group, help=init, **_SECONDS),
        Option("--grace", group=group, help=grace, **_SECONDS),
        Option("--chaos", group=group, multiple=True, metavar="FAULTS", help=chaos),
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
