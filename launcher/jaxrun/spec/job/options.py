"""All options of the command line that runs a job; protocol/settings.py repeats those that its workers read."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from jaxrun.protocol.flight_file import LOCKSTEP_MODES, LOCKSTEP_RECORD
from jaxrun.protocol.settings import (
    CACHE_AUTO,
    CACHE_OFF,
    COMPILE_AUTO,
    COMPILE_MODES,
    MAKE_MESH_JAXRUN,
    MAKE_MESH_MODES,
    STDIN_NONE,
    TLS_AUTO,
    TLS_MODES,
    WorkerSettings,
)
from jaxrun.protocol.ssh_start import TUNNEL_AUTO, TUNNEL_MODES
from jaxrun.spec.backends import BACKENDS
from jaxrun.spec.job.binding import BIND_AUTO, BIND_MODES
from jaxrun.spec.job.option_declaration import (
    BY_HAND,
    FAILURE,
    KUBERNETES,
    MPIRUN,
    OUTPUT,
    SHAPE,
    SLURM,
    SSH,
    START,
    at_least,
    option,
    positive_seconds,
)
from jaxrun.text import Ranks

if TYPE_CHECKING:
    from pathlib import Path

    from jaxrun.spec.job.fault_spec import FaultSpec

_MAX_PROCESSES = 1_000_000  # more must be a typing error
FAILURE_GRACE_S = 5.0  # for exit handlers after a failure, and for a rank that Ctrl-C does not reach
SIGNAL_GRACE_S = 30.0  # after SIGTERM, or KeyboardInterrupt
HOST_TIMEOUT_S = 2.0
POD_WAIT_S = 600.0  # for a pod to be replaced, and its image to be pulled
GROW_S = 600.0  # a stop and a start cost seconds to two minutes
RESTART_ON = ("failure", "lost", "stall")  # any failure; lost hosts and signals; a stall
HOSTS_AUTO = "auto"  # the pod or the cloud knows the number of hosts, and which one this is
PRELOAD_AUTO, PRELOAD_NONE = "auto", "none"  # values of --preload besides names of modules
PLATFORMS = ("auto", "cpu", "gpu", "cuda", "rocm", "tpu")


def _check_processes(count: int) -> str:
    too_many = f"must be {_MAX_PROCESSES} or less, not {count}" if count > _MAX_PROCESSES else ""
    return at_least(1)(count) or too_many


def _check_grace(seconds: float) -> str:
    return "" if 0 <= seconds < math.inf else f"must be 0 seconds or more, not {seconds:g}"


def check_preload(modules: str) -> str:
    if modules in (PRELOAD_AUTO, PRELOAD_NONE):
        return ""
    wrong = [name for name in modules.split(",") if not all(part.isidentifier() for part in name.split("."))]
    return f"must be auto, none or names of modules, such as flax.nnx,optax; {wrong[0]!r} is no name" if wrong else ""


def _check_metrics(where: str) -> str:
    _, _, port = where.rpartition(":")
    valid = not where or (port.isdecimal() and int(port) < 2**16)
    return "" if valid else f"must be a port, or an address and a port, 9400 or 0.0.0.0:9400, not {where!r}"


def _check_seconds_or_never(seconds: float) -> str:
    return positive_seconds(seconds) if seconds else ""


def _check_compile_cache(choice: str) -> str:
    is_valid = choice in (CACHE_OFF, CACHE_AUTO) or choice.startswith("/")
    return "" if is_valid else f"must be a directory, auto or off, not {choice!r}"


def _check_stdin(who: str) -> str:
    is_valid = who == STDIN_NONE or (who.isascii() and who.isdigit())
    return "" if is_valid else f"must be the number of a rank, or {STDIN_NONE}, not {who!r}"


_shape, _start, _output, _failure = (partial(option, group=group) for group in (SHAPE, START, OUTPUT, FAILURE))
_by_hand = partial(option, group=BY_HAND, needs="by hand")
_mpirun = partial(option, group=MPIRUN, needs="mpirun")
_host_list = partial(option, group=MPIRUN, needs="host list")
_ssh = partial(option, group=SSH, needs="ssh")
_slurm = partial(option, group=SLURM, needs="slurm")
_kubernetes = partial(option, group=KUBERNETES, needs="kubernetes", doctor=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions(WorkerSettings):
    """The values of all options. None means: not asked for, or decided later from the devices that are found.

    The first fields give each field of WorkerSettings its option, with the same default.
    """

    make_mesh: str = option(
        "--make-mesh",
        "Who makes a jax.make_mesh over several hosts: jaxrun puts the hosts along the leading axes; jax refuses since "
        "0.10.2. [default: {default}]",
        default=MAKE_MESH_JAXRUN,
        group=SHAPE,
        choices=MAKE_MESH_MODES,
        doctor=False,
    )
    stdin: str = option(
        "--stdin",
        "The rank that reads jaxrun's standard input. [default: 0]",
        default="",
        group=START,
        metavar="RANK|none",
        check=_check_stdin,
        doctor=False,
    )
    torch_env: bool = option(
        "--torch-env",
        "Also set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and the like, as torchrun does.",
        default=False,
        group=START,
        doctor=False,
    )
    compile: str = option(
        "--compile",
        "Compile each program once for all ranks of a host if that is safe (auto), or in each rank. "
        "[default: {default}]",
        default=COMPILE_AUTO,
        group=START,
        choices=COMPILE_MODES,
    )
    compile_cache: str = option(
        "--compile-cache",
        "Keep compiled programs in this directory for the next attempt and the next job; auto: in ~/.cache/jaxrun. "
        "[default: {default}]",
        default=CACHE_OFF,
        group=START,
        metavar="DIR|auto|off",
        check=_check_compile_cache,
    )
    coordinator_tls: str = option(
        "--coordinator-tls",
        "Keep strangers out of JAX's coordinator, by mutual TLS, which JAX has since 0.12: on, off, or where the job "
        "has several hosts (auto). [default: {default}]",
        default=TLS_AUTO,
        group=START,
        choices=TLS_MODES,
    )
    verbose: bool = option("-v/--verbose", "Say what jaxrun does.", default=False, group=OUTPUT)
    quiet: bool = option(
        "--quiet", "Print no line of jaxrun's own unless something is wrong.", default=False, group=OUTPUT
    )
    lockstep: str = option(
        "--lockstep",
        "Compare the cross-process calls of the ranks. record: report a difference; fail: report it, and end the job "
        "as failed; strict: stop before the call that differs (slow, for debugging). [default: {default}]",
        default=LOCKSTEP_RECORD,
        group=FAILURE,
        choices=LOCKSTEP_MODES,
    )
    init_timeout: float = option(
        "--init-timeout",
        "Stop the job if not all processes have joined after this time. [default: {default}; with --host-rank or "
        "attach in a pod 600]",
        default=120.0,
        group=FAILURE,
        check=positive_seconds,
    )
    pdb: bool = option(
        "--pdb", "Open a debugger in the rank that fails first, in this terminal.", default=False, group=FAILURE
    )
    debug_post_mortem: bool = option(
        "--debug-post-mortem",
        "Keep the frames of the rank that fails first until jaxrun debug has connected an editor with it.",
        default=False,
        group=FAILURE,
        doctor=False,
    )
    debug: bool = option(
        "--debug",
        "Wait before the program's first line, on all ranks, until jaxrun debug has connected an editor with one.",
        default=False,
        group=FAILURE,
        doctor=False,
    )
    processes: int | None = _shape(
        "-n/--processes",
        "Processes to start. [default: one per GPU, else one per host]",
        main=True,
        aliases=("-np", "--np"),
        check=_check_processes,
        attach=False,
    )
    devices_per_process: int | None = _shape(
        "-d/--devices-per-process",
        "GPUs of each process, or simulated devices on CPU. [default: 1]",
        main=True,
        metavar="D",
        check=at_least(1),
    )
    module: bool = _shape(
        "-m",
        "PROGRAM is the name of a module, as in python -m.",
        default=False,
        main=True,
        configurable=False,
        doctor=False,
    )
    platform: str = _shape(
        "--platform",
        "Use only cpu, gpu, cuda, rocm or tpu. [default: what the hosts have]",
        default="auto",
        metavar="NAME",
        choices=PLATFORMS,
    )
    simulated_hosts: int = _shape(
        "--simulate-hosts",
        "Act as if this machine were H hosts, each with the same number of processes.",
        default=0,
        metavar="H",
        check=at_least(1),
        needs="simulated hosts",
    )
    hosts: int | None = _shape(
        "-N/--hosts",
        "How many hosts to run on, with {backends} or --host-rank; MIN:MAX sets --min-hosts too. auto: read the number "
        "of hosts, this one's and host 0's address from what the pod or the cloud has set.",
        common=True,
        metavar="N|MIN:MAX|auto",
        words=(HOSTS_AUTO,),
        aliases=("--nnodes",),
        check=at_least(1),
        needs="hosts",
    )
    processes_per_host: int | None = _shape(
        "--processes-per-host", "How many processes to start on each host.", check=at_least(1), needs="hosts"
    )
    backend: str = _start(
        "--backend",
        "What starts the processes. [default: {default}]",
        default="local",
        main=True,
        choices=BACKENDS,
        check=lambda value: "",  # the table has values that nobody types
        attach=False,
    )
    no_fork: str = _start(
        "--no-fork",
        "Start a new Python for each process instead of forking. A line '# jaxrun: no-fork' in the first 20 lines of "
        "the program does the same.",
        default="",
        flag_value="--no-fork was given",
        attach=False,
    )
    preload: str = _start(
        "--preload",
        "Import these modules once for all ranks of a host, before they are forked; auto: what the program imports "
        "first, of packages for which that is safe. [default: {default}]",
        default=PRELOAD_AUTO,
        metavar="auto|none|MODULE,...",
        check=check_preload,
        attach=False,
    )
    bind: str = _start(
        "--bind",
        "Keep each rank on the cores next to its GPUs (gpu), or on a share of its own (cores); auto: gpu, unless Slurm "
        "or mpirun has bound it, and one core each where CPU ranks outnumber them. XLA starts as many threads. "
        "[default: {default}]",
        default=BIND_AUTO,
        choices=BIND_MODES,
    )
    wrap: tuple[str, ...] = _start(
        "--wrap",
        "Start each rank inside this command, quoted as in a shell: 'nsys profile -o out.%r'. %r, %l and %h are its "
        "rank, local rank and host, %% is %. May be repeated: the first is the outermost.",
        default=(),
        metavar="WORDS",
    )
    stage: tuple[Path, ...] = _start(
        "--stage",
        "First copy this directory to a local disk of each host, where the processes then start from; venv: the one in "
        "which jaxrun runs. May be repeated.",
        default=(),
        metavar="venv|DIR",
        doctor=False,
    )
    stage_dir: Path | None = _start(
        "--stage-dir",
        "Where --stage keeps the copies on each host. [default: TMPDIR, else /tmp]",
        metavar="DIR",
        doctor=False,
    )
    host_rank: int | None = _by_hand(
        "--host-rank",
        "The number of this host, from 0. Host 0 has rank 0 and the head.",
        aliases=("--node-rank",),
        metavar="R",
    )
    head: str = _by_hand(
        "--head",
        "Where host 0 listens; give the same on all hosts. [default: read from --rendezvous]",
        default="",
        metavar="HOST:PORT",
    )
    rendezvous: Path | None = _by_hand(
        "--rendezvous",
        "A directory that all hosts share; not needed with --head and JAXRUN_TOKEN. [default: the current one]",
        metavar="DIR",
    )
    host_list: str = _host_list(
        "-H/--host",
        "Hosts and how many processes each may have: h1:4,h2:4. Without --backend: mpirun if there is one, else ssh. "
        "[default: mpirun's own]",
        common=True,
        default="",
        metavar="HOSTS",
    )
    hostfile: Path | None = _host_list(
        "--hostfile", "The same from a file, one host a line: 'h1 slots=4' or 'h1:4'.", metavar="FILE"
    )
    mpirun: str = _mpirun(
        "--mpirun",
        "The mpirun to use: Open MPI, MPICH or Intel MPI. [default: the one on PATH]",
        default="",
        metavar="PATH",
    )
    mpi_args: tuple[str, ...] = _mpirun(
        "--mpi-args", "More options for mpirun, quoted as in a shell. May be repeated.", default=(), metavar="WORDS"
    )
    remote_python: str = _ssh(
        "--remote-python",
        "The Python on the hosts; it needs jaxrun unless --stage venv brings it. [default: the path of this one]",
        default="",
        metavar="PATH",
    )
    tunnel: str = _ssh(
        "--tunnel",
        "Let the hosts reach jaxrun through ssh: on, off, or where they do not reach it directly (auto). "
        "[default: {default}]",
        default=TUNNEL_AUTO,
        choices=TUNNEL_MODES,
    )
    interface: str = option(
        "--interface",
        "The network on which jaxrun listens for other hosts: eth0, an address, or 10.1.0.0/16. "
        "[default: all; {backends}]",
        group=MPIRUN,
        default="",
        metavar="NAME",
        needs="network",
    )
    cpus_per_process: int | None = _slurm(
        "--cpus-per-process", "How many cores to request for each process.", check=at_least(1)
    )
    gpus_per_host: int | None = option(
        "--gpus-per-host",
        "How many GPUs to request on each host. [{backends}]",
        group=SLURM,
        check=at_least(1),
        needs="GPUs",
    )
    partition: str = _slurm("--partition", "The partition to run in.", default="", metavar="NAME")
    time_limit: str = _slurm(
        "--time", "The time limit of the Slurm job, in Slurm's format: 1:30:00.", default="", metavar="TIME"
    )
    account: str = _slurm("--account", "The account to charge.", default="", metavar="NAME")
    slurm_args: tuple[str, ...] = _slurm(
        "--slurm-args",
        "More options for srun and sbatch, quoted as in a shell. May be repeated.",
        default=(),
        metavar="WORDS",
    )
    sbatch: Path | None = _slurm(
        "--sbatch",
        "Write a batch script that runs this job, and start nothing.",
        metavar="FILE",
        configurable=False,
        doctor=False,
    )
    submit: bool = option(
        "--submit",
        "Submit the job to Slurm, and follow its output. Ctrl-C stops following, not the job. With --backend "
        "kubernetes: to kubectl.",
        group=SLURM,
        default=False,
        configurable=False,
        doctor=False,
        needs="submit",
    )
    requeue: bool = _slurm(
        "--requeue",
        "After a preemption or the time limit, have Slurm start the job again to continue it.",
        default=False,
        configurable=False,
        doctor=False,
    )
    image: str = _kubernetes(
        "--image", "The container image of each pod, with jaxrun and the program.", default="", metavar="IMAGE"
    )
    manifest: Path | None = _kubernetes(
        "--manifest",
        "Write what kubectl applies to run this job, and start nothing.",
        metavar="FILE",
        configurable=False,
    )
    jobset: bool = _kubernetes("--jobset", "Write a JobSet, not an indexed Job.", default=False)
    queue: str = _kubernetes("--queue", "The queue of Kueue that admits the job.", default="", metavar="NAME")
    namespace: str = _kubernetes(
        "--namespace", "The namespace of the job. [default: kubectl's own]", default="", metavar="NAME"
    )
    run_dir: Path | None = _output(
        "--run-dir",
        "Directory for logs, events and the verdict. [default: a new one in jaxrun-runs]",
        metavar="DIR",
        common=True,
    )
    no_run_dir: bool = _output("--no-run-dir", "Write no run directory.", default=False)
    live: bool = _output(
        "--live",
        "Show all ranks on one screen, as jaxrun top does, instead of their output.",
        default=False,
        configurable=False,
        attach=False,
    )
    metrics: str = _output(
        "--metrics",
        "Serve metrics for Prometheus on the head's host, at this port of 127.0.0.1 or of another address.",
        default="",
        metavar="[ADDRESS:]PORT",
        check=_check_metrics,
        doctor=False,
    )
    quiet_ranks: Ranks = _output(
        "--quiet-ranks",
        "Do not show the output of these ranks: 1-3,7.",
        default=(),
        metavar="RANKS",
        aliases=("--quiet-rank",),
    )
    only_ranks: Ranks = _output(
        "--only-rank",
        "Show the output of these ranks only.",
        default=(),
        metavar="RANKS",
        aliases=("--only-ranks",),
    )
    tag: str = _output("--tag", "A note that list and explain show.", default="", metavar="TEXT")
    timeout: float | None = _failure(
        "--timeout",
        "Stop the job after this time. [default: never] Times are seconds, or 90s, 5m, 1h30m.",
        main=True,
        check=positive_seconds,
    )
    save_time: float | None = _failure(
        "--save-time",
        "How long the program needs to save: make should_stop true this long before --timeout or Slurm's limit, and "
        "wait this long after SIGTERM. [default: no warning before a limit]",
        check=positive_seconds,
    )
    stall_timeout: float | None = _failure(
        "--stall-timeout",
        "Stop the job after this time without progress in any rank. Progress is output, cross-process calls, reading "
        "or writing files, and CPU time unless others wait for the rank. 0: never. [default: 0; 300 if CI is set, and "
        "with --lockstep fail or strict]",
        common=True,
        check=_check_seconds_or_never,
    )
    stall_notice: float = _failure(
        "--stall-notice",
        "After this time without progress, say which rank waits for which; again after twice the time, and so on. "
        "0: never. [default: {default}]",
        default=30.0,
        check=_check_seconds_or_never,
    )
    grace: float | None = _failure(
        "--grace",
        "How long ranks may take to end before SIGKILL. "
        f"[default: {SIGNAL_GRACE_S:g} after SIGTERM and Ctrl-C, else {FAILURE_GRACE_S:g}]",
        check=_check_grace,
    )
    host_timeout: float | None = _failure(
        "--host-timeout",
        "Another host is lost after this time without an answer of its kernel, which answers whatever its processes "
        f"do. [default: {HOST_TIMEOUT_S:g}, which a link survives that is cut for 1 s; {{backends}}]",
        check=positive_seconds,
        needs="network",
    )
    termination_log: Path | None = _failure(
        "--termination-log",
        "Write how the job ended, if it failed, to this file, at most 4,096 bytes, on every host. [default: in a pod "
        "/dev/termination-log, which kubectl describe shows]",
        metavar="FILE",
        doctor=False,
    )
    notify: str = _failure(
        "--notify",
        "Run this command of a shell when the job ends, restarts, shrinks, grows or stalls, for 10 s at most: the "
        "event is JSON on its standard input, and its name in JAXRUN_EVENT.",
        default="",
        metavar="CMD",
        doctor=False,
    )
    max_restarts: int = _failure(
        "--max-restarts",
        "Start the job again after a failure, up to N times. A saved step starts the count again; two equal failures "
        "in a row end the job. [default: {default}]",
        common=True,
        default=0,
        check=at_least(0),
    )
    restart_on: str = _failure(
        "--restart-on",
        "Restart after any failure, only after lost hosts and signals, or only after --stall-timeout. "
        "[default: {default}]",
        default=RESTART_ON[0],
        choices=RESTART_ON,
    )
    spares: int = _failure(
        "--spares",
        "Extra hosts that replace lost ones, with --max-restarts. [default: {default}]",
        default=0,
        check=at_least(0),
        needs="spares",
    )
    min_hosts: int | None = _failure(
        "--min-hosts",
        "If no spare host is left, continue as a smaller job on at least N hosts. [default: all]",
        check=at_least(1),
        needs="fewer hosts",
    )
    wait_hosts: float | None = _failure(
        "--wait-hosts",
        "With --max-restarts: wait this long for a lost host, or for a pod in its place, before the job shrinks, takes "
        f"a spare host or ends. 0: do not wait. [default: 0; with --host-rank or attach in a pod {POD_WAIT_S:g}]",
        check=_check_seconds_or_never,
        needs="network",
        doctor=False,
    )
    grow: float | None = _failure(
        "--grow",
        "Once an attempt on fewer hosts (--min-hosts) has run this long, look for the others: if one is back, "
        "the program is asked to stop (should_stop) and started on more hosts. never: stay smaller. "
        f"[default: {GROW_S / 60:g}m]",
        check=_check_seconds_or_never,
        needs="fewer hosts",
    )
    host_check: str = _failure(
        "--host-check",
        "Run this command of a shell on each host before each attempt, for --init-timeout at most. A host where it "
        "fails is left out like a lost one.",
        default="",
        metavar="CMD",
        doctor=False,
    )
    exclude_hosts: str = _failure(
        "--exclude-hosts",
        "Do not use these hosts of -H, the hostfile or Slurm: h3,h7 or h[3,7].",
        default="",
        metavar="HOSTS",
        needs="spares",
    )
    quarantine: Path | None = _failure(
        "--quarantine",
        "Do not use the hosts in this file, and add hosts to it that are lost or fail --host-check.",
        metavar="FILE",
        needs="spares",
    )
    chaos: tuple[FaultSpec, ...] = _failure(
        "--chaos",
        "Inject faults, to test recovery: kill:1@2s, pause:0-3@1.5s or kill:any@1s-4s. The time counts from when the "
        "program has started on all ranks. May be repeated.",
        default=(),
        metavar="FAULTS",
    )
