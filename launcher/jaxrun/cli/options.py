"""The command line's flags: each is declared once, with its group and its help; make_job.py turns them into a Job.

The defaults stand in Job; an option that is not given is None, False or empty.
"""

from __future__ import annotations

from dataclasses import fields
from functools import partial
from typing import Any

import click

from jaxrun.cli.completion import complete_program
from jaxrun.cli.help import Option, all_help
from jaxrun.cli.option_types import ProcessesPerNode, Time
from jaxrun.protocol.flight_file import LOCKSTEP_MODES
from jaxrun.protocol.names import COMPILE_MODES, MAKE_MESH_MODES
from jaxrun.spec.backends import ATTACH_OPTIONS, BACKENDS, HOSTS_OPTIONS
from jaxrun.spec.job.job import FAILURE_GRACE_S, PLATFORMS, RESTART_ON, SIGNAL_GRACE_S, Job

_DEFAULTS = {field.name: field.default for field in fields(Job)}
# What another has decided.
_NOT_FOR_ATTACH = {"processes", "processes_per_node", "backend", "no_fork", "dry_run", "live"}

_NOT_FOR_DOCTOR = {
    "module", "make_mesh", "stdin", "torch_env", "dry_run", "sbatch", "submit", "requeue", "run_dir", "no_run_dir",
    "live", "quiet_ranks", "only_ranks", "tag", "verbose"
}  # fmt: skip
_AS_JSON = "Print all that was found as JSON."


def parameters() -> list[click.Parameter]:
    """Return all options in the order of --help-all, and the program."""
    program = click.Argument(
        ["program"],
        nargs=-1,
        type=click.UNPROCESSED,
        metavar="PROGRAM [ARGS]...",
        shell_complete=complete_program,
    )
    return [*_shape(), *_start(), *_hosts(), *_mpirun(), *_slurm(), *_output(), *_failure(), *_about(), program]


def attach_parameters() -> list[click.Parameter]:
    """Return the options of `jaxrun attach`, without those of what somebody else has decided."""
    of_backends = {field for backend in BACKENDS.values() for field in backend.options}
    left_out = _NOT_FOR_ATTACH | ((of_backends | set(HOSTS_OPTIONS)) - set(ATTACH_OPTIONS))
    return [*_rank_and_size(), *(parameter for parameter in parameters() if parameter.name not in left_out)]


def doctor_parameters() -> list[click.Parameter]:
    """Return the options of `jaxrun doctor`: those that say where and how a job runs, and its own."""
    groups = {"The job's shape", "Backends and environment", "mpirun", "Slurm", "Output", "About"}
    groups.add("One command on each host, without MPI or Slurm")
    own = Option("--json", "as_json", group="Output", main=True, configurable=False, is_flag=True, help=_AS_JSON)
    chosen = [option for option in parameters() if isinstance(option, Option) and option.group in groups]
    return [own, *(option for option in chosen if option.name not in _NOT_FOR_DOCTOR)]


def _rank_and_size() -> list[Option]:
    option = partial(Option, group="This process's place")
    size = "Processes of the job. [default: what mpirun, srun or flux says]"
    head = "Where rank 0 listens, alike on all ranks. [default: as the rendezvous says]"
    rendezvous = "A directory that all hosts share, where rank 0 leaves its address. [default: the current one]"
    check = "Only see whether a head can be reached at this address; start nothing."
    rank = "This process's rank, from 0. [default: what mpirun, srun or flux says]"
    return [
        option("--rank", main=True, configurable=False, type=int, metavar="R", help=rank),
        option("--size", main=True, configurable=False, type=int, metavar="N", help=size),
        option("--head", main=True, metavar="HOST:PORT", help=head),
        option("--rendezvous", main=True, metavar="DIR", help=rendezvous),
        option("--check", configurable=False, metavar="HOST:PORT", help=check),
    ]


def _shape() -> list[Option]:
    option = partial(Option, group="The job's shape")
    with_hosts = ", ".join(name for name, backend in BACKENDS.items() if "hosts" in backend.options)
    hosts = f"Real hosts, with {with_hosts} or --host-rank."
    processes = "Processes to start. [default: one per GPU, else one per host]"
    devices = "GPUs of each process, or simulated devices on CPU. [default: 1]"
    module = "PROGRAM is the name of a module, as in python -m."
    per_node = "torchrun's name: --processes-per-host, or -n on one machine."
    platform = "Take cpu, gpu, cuda, rocm or tpu, and no other. [default: what is there]"
    simulated = "Act as H hosts on this machine; processes are dealt equally."
    make_mesh = (
        "Who lays a jax.make_mesh over several hosts: jaxrun, with the hosts along the leading axes, or jax, which "
        f"refuses since 0.10.2. [default: {_DEFAULTS['make_mesh']}]"
    )
    return [
        option("-n", "--processes", aliases=("-np", "--np"), main=True, type=int, metavar="N", help=processes),
        option("-d", "--devices-per-process", main=True, type=int, metavar="D", help=devices),
        option("-m", "module", main=True, configurable=False, is_flag=True, help=module),
        option("--platform", type=click.Choice(PLATFORMS), metavar="NAME", help=platform),
        option("--simulate-hosts", "simulated_hosts", type=int, metavar="H", help=simulated),
        option(
            "-N",
            "--hosts",
            aliases=("--nnodes",),
            type=int,
            metavar="N",
            help=hosts,
        ),
        option("--processes-per-host", type=int, metavar="N", help="Processes on each of them."),
        option("--make-mesh", type=click.Choice(MAKE_MESH_MODES), metavar="|".join(MAKE_MESH_MODES), help=make_mesh),
        option("--nproc-per-node", "processes_per_node", type=ProcessesPerNode(), metavar="N", help=per_node),
    ]


def _start() -> list[Option]:
    option = partial(Option, group="Backends and environment")
    backend = f"What starts the processes. [default: {_DEFAULTS['backend']}]"
    env = "Set this variable in every process, or pass it on. May be repeated."
    env_file = "The same from a file of NAME=VALUE lines; --env wins."
    no_fork = "A fresh interpreter for each process. So does '# jaxrun: no-fork' in the program's first 20 lines."
    stdin = "Which rank reads jaxrun's standard input. [default: 0]"
    compile_ = (
        "Who compiles a program that the ranks of a host have in common: one of them, each, or one where that is safe. "
        f"[default: {_DEFAULTS['compile']}]"
    )
    compile_memory = (
        "In how much memory the ranks of a host share what one has compiled, in MiB; no more than an eighth of "
        f"/dev/shm. [default: {_DEFAULTS['compile_memory']}]"
    )
    compile_cache = (
        "Keep compiled programs in this directory, for the next attempt and the next job; auto: one of yours. "
        f"[default: {_DEFAULTS['compile_cache']}]"
    )
    torch_env = "Also set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and the like, as torchrun does."
    dry_run = "Print what would be started, and start nothing."
    return [
        option("--backend", main=True, type=click.Choice(tuple(BACKENDS)), metavar="|".join(BACKENDS), help=backend),
        option("--env", "assignments", multiple=True, metavar="NAME[=VALUE]", help=env),
        option("--env-file", "env_files", multiple=True, metavar="FILE", help=env_file),
        option("--stdin", metavar="RANK|none", help=stdin),
        option("--torch-env", is_flag=True, help=torch_env),
        option("--compile", type=click.Choice(COMPILE_MODES), metavar="|".join(COMPILE_MODES), help=compile_),
        option("--compile-memory", type=int, metavar="MIB", help=compile_memory),
        option("--compile-cache", metavar="DIR|auto|off", help=compile_cache),
        option("--no-fork", is_flag=True, help=no_fork),
        option("--dry-run", main=True, configurable=False, is_flag=True, help=dry_run),
    ]


def _hosts() -> list[Option]:
    option = partial(Option, group="One command on each host, without MPI or Slurm")
    rank = "Which of the --hosts this one is, from 0; the head is on host 0."
    head = "Where host 0 listens, alike on all hosts. [default: as host 0 says in the directory that follows]"
    rendezvous = "A directory that all hosts share; not needed with --head and JAXRUN_TOKEN. [default: this one]"
    return [
        option("--host-rank", aliases=("--node-rank",), type=int, metavar="R", help=rank),
        option("--head", metavar="HOST:PORT", help=head),
        option("--rendezvous", metavar="DIR", help=rendezvous),
    ]


def _mpirun() -> list[Option]:
    option = partial(Option, group="mpirun")
    with_interface = ", ".join(name for name, backend in BACKENDS.items() if "interface" in backend.options)
    host_list = "Hosts and their slots, as h1:4,h2:4. [default: mpirun's own]"
    hostfile = "The same from a file, a host in each line: 'h1 slots=4' or 'h1:4'."
    mpirun = "The mpirun to use: Open MPI, MPICH or Intel MPI. [default: the one on PATH]"
    mpi_args = "More words for mpirun, as typed in a shell. May be repeated."
    interface = "Where jaxrun listens for other hosts: eth0, an address, or 10.1.0.0/16."
    return [
        option("-H", "--host", "host_list", metavar="HOSTS", help=host_list),
        option("--hostfile", metavar="FILE", help=hostfile),
        option("--mpirun", metavar="PATH", help=mpirun),
        option("--mpi-args", multiple=True, metavar="WORDS", help=mpi_args),
        option("--interface", metavar="NAME", help=f"{interface} [default: all; {with_interface}]"),
    ]


def _slurm() -> list[Option]:
    option = partial(Option, group="Slurm")
    time_limit = "The time limit, as Slurm writes it: 1:30:00."
    slurm_args = "More words for srun and sbatch. May be repeated."
    sbatch = "Write a batch script that runs this job, and start nothing."
    submit = "Hand the job to Slurm, and follow its output; Ctrl-C only stops following."
    requeue = "Go on after a preemption or the time limit: have Slurm start the job again."
    return [
        option("--cpus-per-process", type=int, metavar="N", help="Cores to ask for, for each process."),
        option("--gpus-per-host", type=int, metavar="N", help="GPUs to ask for, on each host."),
        option("--partition", metavar="NAME", help="The partition to run in."),
        option("--time", "time_limit", metavar="TIME", help=time_limit),
        option("--account", metavar="NAME", help="The account to charge."),
        option("--slurm-args", multiple=True, metavar="WORDS", help=slurm_args),
        option("--sbatch", configurable=False, metavar="FILE", help=sbatch),
        option("--submit", configurable=False, is_flag=True, help=submit),
        option("--requeue", configurable=False, is_flag=True, help=requeue),
    ]


def _output() -> list[Option]:
    option = partial(Option, group="Output")
    live = "Show all ranks on one screen, as jaxrun top does, in the place of their output."
    run_dir = "Where logs, events and verdict go. [default: a new one in jaxrun-runs]"
    return [
        option("--run-dir", metavar="DIR", help=run_dir),
        option("--no-run-dir", is_flag=True, help="Leave no files."),
        option("--live", configurable=False, is_flag=True, help=live),
        option("--quiet-ranks", metavar="RANKS", help="Keep ranks such as 1-3,7 off the screen."),
        option("--only-rank", "only_ranks", metavar="RANKS", help="Show the output of these ranks only."),
        option("--tag", metavar="TEXT", help="A remark to keep in the job's files."),
        option("-v", "--verbose", is_flag=True, help="Say what is being done."),
    ]


def _failure() -> list[Option]:
    option = partial(Option, group="Failure")
    seconds = partial(option, type=Time(), metavar="TIME")
    timeout = "Stop the job after this time. [default: never]"
    save = (
        "Have should_stop say so this long before --timeout or Slurm's limit, and wait as long after SIGTERM. "
        "[default: never before a limit]"
    )
    stall = (
        "Stop it after so long without progress: output, calls, files, or CPU time in a rank that no other waits for; "
        "0: never. [default: 0; 300 where CI is set, and with --lockstep strict]"
    )
    notice = (
        "Say who waits for whom after so long without progress, again after twice as long, and so on; 0: never. "
        f"[default: {_DEFAULTS['stall_notice']:g}]"
    )
    lockstep = (
        "Keep the ranks in step: record their cross-process calls and report what differs, or agree on each call "
        f"first (strict: slow, for debugging), or off. [default: {_DEFAULTS['lockstep']}]"
    )
    init = f"Stop it if not all have joined by then. [default: {_DEFAULTS['init_timeout']:g}]"
    chaos = (
        "Bring about faults, to see what survives them: kill:1@2s, pause:0-3@1.5s or kill:any@1s-4s, "
        "so long after the program has started on all ranks. May be repeated."
    )
    restarts = (
        "Start the job again after a failure, so often without a step saved in between, and not if it fails twice "
        f"alike. [default: {_DEFAULTS['max_restarts']}]"
    )
    restart_on = f"After any failure, after lost hosts and signals, or after a stall. [default: {RESTART_ON[0]}]"
    spares = "Hosts besides those of -N that take the place of lost ones, with --max-restarts. [default: 0]"
    min_hosts = "With so many hosts at least, go on as a smaller job if there is no spare one. [default: all]"
    grace = (
        "Until SIGKILL, for ranks that are to end. "
        f"[default: {SIGNAL_GRACE_S:g} after SIGTERM and Ctrl-C, else {FAILURE_GRACE_S:g}]"
    )
    return [
        seconds("--timeout", main=True, help=f"{timeout} Times are seconds, or 90s, 5m, 1h30m."),
        seconds("--save-time", help=save),
        seconds("--stall-timeout", help=stall),
        seconds("--stall-notice", help=notice),
        option("--lockstep", type=click.Choice(LOCKSTEP_MODES), metavar="|".join(LOCKSTEP_MODES), help=lockstep),
        seconds("--init-timeout", help=init),
        seconds("--grace", help=grace),
        option("--max-restarts", type=int, metavar="N", help=restarts),
        option("--restart-on", type=click.Choice(RESTART_ON), metavar="|".join(RESTART_ON), help=restart_on),
        option("--spares", type=int, metavar="N", help=spares),
        option("--min-hosts", type=int, metavar="N", help=min_hosts),
        option("--pdb", is_flag=True, help="Open a debugger on the rank that causes a failure, in this terminal."),
        option("--chaos", multiple=True, metavar="FAULTS", help=chaos),
    ]


def _about() -> list[Option]:
    kind: dict[str, Any] = {
        "group": "About", "configurable": False, "is_flag": True, "is_eager": True, "expose_value": False
    }  # fmt: skip
    return [
        Option("-V", "--version", callback=_version, help="Show the version.", **kind),
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
