"""All options of the command line that runs a job; protocol/settings.py has the defaults of those that workers read.

The checks of their values are in option_checks.py, the kinds of values in option_kinds.py, and what contradicts what in
combinations.py.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from jaxrun.protocol.ssh_start import TUNNEL_AUTO, TUNNEL_MODES
from jaxrun.spec.backends import BACKENDS, LOCAL
from jaxrun.spec.job.binding import BIND_AUTO, BIND_MODES
from jaxrun.spec.job.option_checks import (
    PRELOAD_AUTO,
    any_seconds,
    at_least,
    check_image,
    check_kubernetes_name,
    check_metrics,
    check_preload,
    check_processes,
    positive_seconds,
    seconds_never_or_auto,
    seconds_or_never,
)
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
    option,
)
from jaxrun.spec.job.option_kinds import (
    ASSIGNMENTS,
    COMMAND,
    COUNT,
    DIRECTORIES,
    DIRECTORY,
    FAULTS,
    FILE,
    FILES,
    FLAG,
    RANKS,
    TEXT,
    TIME,
    WORDS,
    count_or,
    flag,
    one_of,
)
from jaxrun.spec.job.worker_options import WorkerOptions
from jaxrun.text import Ranks

if TYPE_CHECKING:
    from pathlib import Path

    from jaxrun.spec.job.fault_spec import FaultSpec

# Defaults that depend on other options, or on where the job runs.
FAILURE_GRACE_S = 5.0  # for exit handlers after a failure, and for a rank that Ctrl-C does not reach
SIGNAL_GRACE_S = 30.0  # after SIGTERM, or KeyboardInterrupt
HOST_TIMEOUT_S = 2.0
POD_WAIT_S = 600.0  # for a pod to be replaced, and its image to be pulled
LEAST_STALL_S = 60.0  # of --stall-timeout auto
LEAST_DEFAULT_STALL_S = 600.0  # the same where nobody asked for it: a false alarm costs a restart
UNATTENDED_STALL_S = 300.0  # for runs that nobody watches, or where ranks that wait for each other must be reported
GROW_S = 600.0  # a stop and a start cost seconds to two minutes
# Values that people give.
RESTART_ON = ("failure", "lost", "stall")  # any failure; lost hosts and signals; a stall
HOSTS_AUTO = "auto"  # the pod or the cloud knows the number of hosts, and which one this is
PLATFORMS = ("auto", "cpu", "gpu", "cuda", "rocm", "tpu")
OUTPUT_AUTO, OUTPUT_GROUPED, OUTPUT_ALL = OUTPUT_MODES = ("auto", "grouped", "all")
PREFIX_RANK, PREFIX_HOST = PREFIXES = ("rank", "host")

_shape, _start, _output, _failure = (partial(option, group=group) for group in (SHAPE, START, OUTPUT, FAILURE))
_by_hand = partial(option, group=BY_HAND, needs="by hand")
_mpirun = partial(option, group=MPIRUN, needs="mpirun")
_host_list = partial(option, group=MPIRUN, needs="host list")
_ssh = partial(option, group=SSH, needs="ssh")
_slurm = partial(option, group=SLURM, needs="slurm")
_batch = partial(option, group=SLURM)
_qsub = partial(option, group=SLURM, needs="qsub")
_kubernetes = partial(option, group=KUBERNETES, needs="kubernetes", doctor=False)


class JobOptions(WorkerOptions, frozen=True, kw_only=True):
    """The values of all options. None means: not asked for, or decided later from the devices that are found."""

    quiet: bool = option("--quiet", FLAG, "Print no line of jaxrun's own unless something is wrong.", group=OUTPUT)
    debug: bool = option(
        "--debug",
        FLAG,
        "Wait before the program's first line, on all ranks, until jaxrun debug has connected an editor with one.",
        group=FAILURE,
        doctor=False,
    )
    processes: int | None = _shape(
        "-n/--processes",
        COUNT,
        "Processes to start. [default: one per GPU, else one per host]",
        main=True,
        aliases=("-np", "--np"),
        check=check_processes,
        attach=False,
    )
    devices_per_process: int | None = _shape(
        "-d/--devices-per-process",
        COUNT,
        "GPUs of each process, or simulated devices on CPU. [default: 1]",
        main=True,
        metavar="D",
        check=at_least(1),
    )
    module: bool = _shape(
        "-m",
        FLAG,
        "PROGRAM is the name of a module, as in python -m.",
        main=True,
        configurable=False,
        doctor=False,
    )
    platform: str = _shape(
        "--platform",
        one_of(PLATFORMS),
        "Use only cpu, gpu, cuda, rocm or tpu. [default: what the hosts have]",
        default="auto",
        metavar="NAME",
    )
    simulated_hosts: int = _shape(
        "--simulate-hosts",
        COUNT,
        "Act as if this machine were H hosts, each with the same number of processes.",
        default=0,
        metavar="H",
        check=at_least(1),
        needs="simulated hosts",
    )
    hosts: int | None = _shape(
        "-N/--hosts",
        count_or(HOSTS_AUTO, has_ranges=True),
        "How many hosts to run on, with {backends} or --host-rank; MIN:MAX sets --min-hosts too. auto: read the number "
        "of hosts, this one's and host 0's address from what the pod or the cloud has set.",
        metavar="N|MIN:MAX|auto",
        aliases=("--nnodes",),
        check=at_least(1),
        needs="hosts",
    )
    processes_per_host: int | None = _shape(
        "--processes-per-host", COUNT, "How many processes to start on each host.", check=at_least(1), needs="hosts"
    )
    backend: str = _start(
        "--backend",
        one_of(BACKENDS),
        "What starts the processes. [default: {default}]",
        default=LOCAL,
        main=True,
        check=lambda value: "",  # the table has values that nobody types
        attach=False,
    )
    no_fork: str = _start(
        "--no-fork",
        flag("--no-fork was given"),
        "Start a new Python for each process instead of forking. A line '# jaxrun: no-fork' in the first 20 lines of "
        "the program does the same.",
        attach=False,
    )
    preload: str = _start(
        "--preload",
        TEXT,
        "Import these modules once for all ranks of a host, before they are forked; auto: what the program imports "
        "first, of packages for which that is safe. [default: {default}]",
        default=PRELOAD_AUTO,
        metavar="auto|none|MODULE,...",
        check=check_preload,
        attach=False,
    )
    bind: str = _start(
        "--bind",
        one_of(BIND_MODES),
        "Keep each rank on the cores next to its GPUs (gpu), or on a share of its own (cores); auto: gpu, unless Slurm "
        "or mpirun has bound it, and one core each where CPU ranks outnumber them. XLA starts as many threads. "
        "[default: {default}]",
        default=BIND_AUTO,
    )
    wrap: tuple[str, ...] = _start(
        "--wrap",
        WORDS,
        "Start each rank inside this command, quoted as in a shell: 'nsys profile -o out.%r'. %r, %l and %h are its "
        "rank, local rank and host, %% is %. May be repeated: the first is the outermost.",
    )
    stage: tuple[Path, ...] = _start(
        "--stage",
        DIRECTORIES,
        "First copy this directory to a local disk of each host, where the processes then start from; venv: the one in "
        "which jaxrun runs. May be repeated.",
        metavar="venv|DIR",
        doctor=False,
    )
    stage_dir: Path | None = _start(
        "--stage-dir",
        DIRECTORY,
        "Where --stage keeps the copies on each host. [default: TMPDIR, else /tmp]",
        doctor=False,
    )
    assignments: tuple[str, ...] = _start(
        "--env",
        ASSIGNMENTS,
        "Set this variable in every process, or without a value pass yours on. May be repeated.",
    )
    env_files: tuple[Path, ...] = _start(
        "--env-file",
        FILES,
        "The same from a file of NAME=VALUE lines; --env wins.",
    )
    host_rank: int | None = _by_hand(
        "--host-rank",
        COUNT,
        "The number of this host, from 0. Host 0 has rank 0 and the head.",
        aliases=("--node-rank",),
        metavar="R",
    )
    head: str = _by_hand(
        "--head",
        TEXT,
        "Where host 0 listens; give the same on all hosts. [default: read from --rendezvous]",
        metavar="HOST:PORT",
    )
    rendezvous: Path | None = _by_hand(
        "--rendezvous",
        DIRECTORY,
        "A directory that all hosts share; not needed with --head and JAXRUN_TOKEN. [default: the current one]",
    )
    host_list: str = _host_list(
        "-H/--host",
        TEXT,
        "Hosts and slots on each: h1:4,h2:4. Without --backend: mpirun if there is one, else ssh. "
        "[default: mpirun's own]",
        common=True,
        metavar="HOSTS",
    )
    hostfile: Path | None = _host_list(
        "--hostfile", FILE, "The same from a file, one host a line: 'h1 slots=4' or 'h1:4'."
    )
    mpirun: str = _mpirun(
        "--mpirun",
        COMMAND,
        "The mpirun to use: Open MPI, MPICH or Intel MPI. [default: the one on PATH]",
    )
    mpi_args: tuple[str, ...] = _mpirun(
        "--mpi-args", WORDS, "More options for mpirun, quoted as in a shell. May be repeated."
    )
    remote_python: str = _ssh(
        "--remote-python",
        COMMAND,
        "The Python on the hosts; it needs jaxrun unless --stage venv brings it. [default: the path of this one]",
    )
    tunnel: str = _ssh(
        "--tunnel",
        one_of(TUNNEL_MODES),
        "Let the hosts reach jaxrun through ssh: on, off, or where they do not reach it directly (auto). "
        "[default: {default}]",
        default=TUNNEL_AUTO,
    )
    interface: str = option(
        "--interface",
        TEXT,
        "The network on which jaxrun listens for other hosts: eth0, an address, or 10.1.0.0/16. "
        "[default: all; {backends}]",
        group=MPIRUN,
        metavar="NAME",
        needs="network",
    )
    cpus_per_process: int | None = _batch(
        "--cpus-per-process",
        COUNT,
        "How many cores, or slots of Grid Engine, to request for each process.",
        check=at_least(1),
        needs="cores",
    )
    gpus_per_host: int | None = option(
        "--gpus-per-host",
        COUNT,
        "How many GPUs to request on each host. [{backends}]",
        group=SLURM,
        check=at_least(1),
        needs="GPUs",
    )
    partition: str = _slurm("--partition", TEXT, "The partition to run in.", metavar="NAME")
    time_limit: str = _batch(
        "--time",
        TEXT,
        "The time limit of the scheduler's job, in Slurm's format: 1:30:00, or 90 minutes as 90.",
        metavar="TIME",
        needs="time limit",
    )
    account: str = _batch(
        "--account", TEXT, "The account to charge; the project of Grid Engine.", metavar="NAME", needs="account"
    )
    queue: str = _batch(
        "--queue",
        TEXT,
        "The queue to run in; with --backend kubernetes, the queue of Kueue that admits the job. [{backends}]",
        metavar="NAME",
        needs="queue",
    )
    slurm_args: tuple[str, ...] = _slurm(
        "--slurm-args",
        WORDS,
        "More options for srun and sbatch, quoted as in a shell. May be repeated.",
    )
    sbatch: Path | None = _slurm(
        "--sbatch",
        FILE,
        "Write a batch script that runs this job, and start nothing.",
        configurable=False,
        doctor=False,
    )
    qsub: Path | None = _qsub(
        "--qsub",
        FILE,
        "Write a batch script for qsub that runs this job, and start nothing.",
        configurable=False,
        doctor=False,
    )
    qsub_args: tuple[str, ...] = _qsub(
        "--qsub-args", WORDS, "More options for qsub, quoted as in a shell. May be repeated.", doctor=False
    )
    parallel_environment: str = _batch(
        "--pe",
        TEXT,
        "The parallel environment of Grid Engine that has the job's slots; qconf -spl lists them.",
        metavar="NAME",
        needs="parallel environment",
        doctor=False,
    )
    submit: bool = option(
        "--submit",
        FLAG,
        "Submit the job to the scheduler, and follow its output. Ctrl-C stops following, not the job. With --backend "
        "kubernetes: to kubectl.",
        group=SLURM,
        configurable=False,
        doctor=False,
        needs="submit",
    )
    requeue: bool = _batch(
        "--requeue",
        FLAG,
        "After a preemption or the time limit, have the scheduler start the job again to continue it.",
        needs="requeue",
        configurable=False,
        doctor=False,
    )
    image: str = _kubernetes(
        "--image",
        TEXT,
        "The container image of each pod, with jaxrun and the program.",
        metavar="IMAGE",
        check=check_image,
    )
    manifest: Path | None = _kubernetes(
        "--manifest",
        FILE,
        "Write what kubectl applies to run this job, and start nothing.",
        configurable=False,
    )
    jobset: bool = _kubernetes("--jobset", FLAG, "Write a JobSet, not an indexed Job.")
    namespace: str = _kubernetes(
        "--namespace",
        TEXT,
        "The namespace of the job. [default: kubectl's own]",
        metavar="NAME",
        check=check_kubernetes_name,
    )
    run_dir: Path | None = _output(
        "--run-dir",
        DIRECTORY,
        "Directory for logs, events and the verdict. [default: a new one in jaxrun-runs]",
    )
    no_run_dir: bool = _output("--no-run-dir", FLAG, "Write no run directory.")
    live: bool = _output(
        "--live",
        FLAG,
        "Show all ranks on one screen, as jaxrun top does, instead of their output.",
        configurable=False,
        attach=False,
    )
    metrics: str = _output(
        "--metrics",
        TEXT,
        "Serve metrics for Prometheus on the head's host, at this port of 127.0.0.1 or of another address.",
        metavar="[ADDRESS:]PORT",
        check=check_metrics,
        doctor=False,
    )
    quiet_ranks: Ranks = _output(
        "--quiet-ranks",
        RANKS,
        "Do not show the output of these ranks: 1-3,7.",
        aliases=("--quiet-rank",),
    )
    only_ranks: Ranks = _output(
        "--only-rank",
        RANKS,
        "Show the output of these ranks only.",
        aliases=("--only-ranks",),
    )
    output: str = _output(
        "--output",
        one_of(OUTPUT_MODES),
        "How to show lines that several ranks print within 0.2 s. grouped: each once, with its ranks: [0-7] …; all: as "
        "they come; auto: on a terminal, lines of stderr are grouped. [default: {default}]",
        default=OUTPUT_AUTO,
    )
    prefix: str = _output(
        "--prefix",
        one_of(PREFIXES),
        "What is before each line of output: the rank, [3], or also its host, [3 h2]. [default: {default}]",
        default=PREFIX_RANK,
    )
    tag: str = _output("--tag", TEXT, "A note that list and explain show.")
    timeout: float | None = _failure(
        "--timeout",
        TIME,
        "Stop the job after this time. [default: never] Times are seconds, or 90s, 5m, 1h30m.",
        main=True,
        check=positive_seconds,
    )
    save_time: float | None = _failure(
        "--save-time",
        TIME,
        "How long the program needs to save: make should_stop true this long before --timeout or Slurm's limit, and "
        "wait this long after SIGTERM. [default: no warning before a limit]",
        check=positive_seconds,
    )
    stall_timeout: float | None = _failure(
        "--stall-timeout",
        TIME,
        "Stop the job after this time without progress in any rank. Progress is output, cross-process calls, reading "
        "or writing files, and CPU time unless others wait for the rank. auto: five times the longest time between two "
        f"calls, at least {LEAST_STALL_S:g}, once a rank has made 20. 0: never. [default: 0; with --max-restarts auto, "
        f"but at least {LEAST_DEFAULT_STALL_S:g}; {UNATTENDED_STALL_S:g} if CI is set, and with "
        "--lockstep fail or strict]",
        check=seconds_never_or_auto,
    )
    stall_notice: float = _failure(
        "--stall-notice",
        TIME,
        "After this time without progress, say which rank waits for which; again after twice the time, and so on. "
        "0: never. [default: {default}]",
        default=30.0,
        check=seconds_or_never,
    )
    grace: float | None = _failure(
        "--grace",
        TIME,
        "How long ranks may take to end before SIGKILL. If you give it, ranks that handle SIGTERM have this time "
        "after the failure of another rank, too; other ranks are killed at once then, and on GPUs 2 s after SIGTERM. "
        f"[default: {SIGNAL_GRACE_S:g} after SIGTERM and Ctrl-C, else {FAILURE_GRACE_S:g}]",
        check=any_seconds,
    )
    host_timeout: float | None = _failure(
        "--host-timeout",
        TIME,
        "Another host is lost after this time without an answer of its kernel, which answers whatever its processes "
        f"do. [default: {HOST_TIMEOUT_S:g}, which a link survives that is cut for 1 s; {{backends}}]",
        check=positive_seconds,
        needs="network",
    )
    termination_log: Path | None = _failure(
        "--termination-log",
        FILE,
        "Write how the job ended, if it failed, to this file, at most 4,096 bytes, on every host. [default: in a pod "
        "/dev/termination-log, which kubectl describe shows]",
        doctor=False,
    )
    notify: str = _failure(
        "--notify",
        TEXT,
        "Run this command of a shell when the job ends, restarts, shrinks, grows, stalls, or goes on without a rank or "
        "takes one back, for 10 s at most: the event is JSON on its standard input, and its name in JAXRUN_EVENT.",
        metavar="CMD",
        doctor=False,
    )
    max_restarts: int = _failure(
        "--max-restarts",
        COUNT,
        "Start the job again after a failure, up to N times. A saved step starts the count again; two equal failures "
        "in a row end the job. [default: {default}]",
        common=True,
        default=0,
        check=at_least(0),
    )
    restart_on: str = _failure(
        "--restart-on",
        one_of(RESTART_ON),
        "Restart after any failure, only after lost hosts and signals, or only after --stall-timeout. "
        "[default: {default}]",
        default=RESTART_ON[0],
    )
    spares: int = _failure(
        "--spares",
        COUNT,
        "Extra hosts that replace lost ones, with --max-restarts. [default: {default}]",
        default=0,
        check=at_least(0),
        needs="spares",
    )
    min_hosts: int | None = _failure(
        "--min-hosts",
        COUNT,
        "If no spare host is left, continue as a smaller job on at least N hosts. [default: all]",
        check=at_least(1),
        needs="fewer hosts",
    )
    wait_hosts: float | None = _failure(
        "--wait-hosts",
        TIME,
        "With --max-restarts: wait this long for a lost host, or for a pod in its place, before the job shrinks, takes "
        f"a spare host or ends. 0: do not wait. [default: 0; with --host-rank or attach in a pod {POD_WAIT_S:g}]",
        check=seconds_or_never,
        needs="network",
        doctor=False,
    )
    grow: float | None = _failure(
        "--grow",
        TIME,
        "Once an attempt on fewer hosts (--min-hosts) has run this long, look for the others: if one is back, "
        "the program is asked to stop (should_stop) and started on more hosts. never: stay smaller. "
        f"[default: {GROW_S / 60:g}m]",
        check=seconds_or_never,
        needs="fewer hosts",
    )
    host_check: str = _failure(
        "--host-check",
        TEXT,
        "Run this command of a shell on each host before each attempt, for --init-timeout at most. A host where it "
        "fails is left out like a lost one.",
        metavar="CMD",
        doctor=False,
    )
    exclude_hosts: str = _failure(
        "--exclude-hosts",
        TEXT,
        "Do not use these hosts of -H, the hostfile or Slurm: h3,h7 or h[3,7].",
        metavar="HOSTS",
        needs="spares",
    )
    quarantine: Path | None = _failure(
        "--quarantine",
        FILE,
        "Do not use the hosts in this file, and add hosts to it that are lost or fail --host-check.",
        needs="spares",
    )
    chaos: tuple[FaultSpec, ...] = _failure(
        "--chaos",
        FAULTS,
        "Inject faults, to test recovery: kill:1@2s, pause:0-3@1.5s or kill:any@1s-4s. The time counts from when the "
        "program has started on all ranks. May be repeated.",
    )
