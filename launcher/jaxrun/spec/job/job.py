"""What was asked for: a Job holds the request of one command line, with every default, and is valid or does not exist.

Whatever depends on the machine, the file system or the environment is decided later, in the plan.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from jaxrun.errors import UsageError
from jaxrun.protocol.flight_file import LOCKSTEP_MODES, LOCKSTEP_RECORD
from jaxrun.protocol.names import (
    CACHE_AUTO,
    CACHE_OFF,
    COMPILE_AUTO,
    COMPILE_EACH,
    COMPILE_MEMORY_MIB,
    COMPILE_MODES,
    COMPILE_ONCE,
    MAKE_MESH_JAXRUN,
    MAKE_MESH_MODES,
    STDIN_NONE,
)
from jaxrun.text import Ranks

if TYPE_CHECKING:
    from pathlib import Path

    from jaxrun.spec.job.fault_spec import FaultSpec

_MAX_PROCESSES = 1_000_000  # a slip of the finger beyond
FAILURE_GRACE_S = 5.0  # for exit handlers after a failure, and for a rank that a Ctrl-C does not reach
SIGNAL_GRACE_S = 30.0  # after SIGTERM, or KeyboardInterrupt
RESTART_ON = ("failure", "lost", "stall")  # any failure; lost hosts and signals; a stall
PLATFORMS = ("auto", "cpu", "gpu", "cuda", "rocm", "tpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The request of one command line. None means: to be decided from the devices that are found.

    program:               the path or module name, then its arguments
    devices_per_process:   devices that each process shows as `jax.local_devices()`
    simulated_hosts:       how many hosts to pretend to be; 0 for the machine as it is
    hosts:                 how many real hosts
    processes_per_host:    processes on each real host
    host_rank:             which of the hosts this one is, where each has a command of its own; else None
    head, rendezvous:      where host 0 listens, "host:port"; the directory in which it leaves its address, else None
    cpus_per_process:      cores to ask the backend for, for each process
    gpus_per_host:         GPUs to ask the backend for, on each host
    host_list, hostfile:   which hosts, as mpirun's --host and --hostfile say it; empty and None for the backend's own
    mpirun:                the mpirun to use; empty for the one on PATH
    mpi_args, slurm_args:  further words for the backend's command, unchanged
    partition, time_limit, account:  what Slurm is asked for; empty for its defaults
    sbatch:                where to write a batch script instead of starting anything
    submit:                hand the batch script to Slurm, and follow the job
    requeue:               have Slurm start the job again after a preemption and its time limit
    interface:             at which the launcher listens for the other hosts: a name, an address or a network
    timeout:               seconds that the whole job may take; None for no limit
    save_time:             seconds before this or Slurm's limit at which the program is asked to stop; None for never
    stall_timeout:         seconds without progress after which the job is stopped; None or 0 for no limit
    stall_notice:          seconds without progress after which people are told who waits for whom; 0 for never
    lockstep:              how the ranks are kept in step: "off", "record" or "strict"
    make_mesh:             who lays a mesh over several hosts: "jaxrun", or "jax", which refuses
    compile:               who compiles what the ranks of a host have in common: "auto", "once" or "each"
    compile_memory:        in how much memory they share that at most, in MiB
    compile_cache:         where compiled programs are kept: an absolute path, "auto" or "off"
    init_timeout:          seconds until every process must have joined
    grace:                 seconds until SIGKILL for ranks that are to end; None for the defaults, which depend on why
    max_restarts:          how often the job is started again after a failure, without progress in between
    restart_on:            after which failures: one of RESTART_ON
    spares:                how many hosts wait to take the place of one that is lost
    min_hosts:             with how many hosts the job may go on at least; None: with all
    placement:             the host of each rank, where it is decided already: after the loss of a host
    spare_hosts:           those that are left then to take another's place
    chaos:                 faults to inject
    env:                   variables to add to every worker
    torch_env:             also give every worker the variables of torchrun
    pdb:                   open a debugger on the rank that causes a failure
    stdin:                 which rank has jaxrun's standard input: a number, or "none"; "" to be decided
    run_dir, no_run_dir:   where the job leaves its files; None for a new directory under ./jaxrun-runs
    live:                  show the job as `jaxrun top` does, in the place of its output
    quiet_ranks:           ranks whose output stays off the screen
    only_ranks:            if not empty, the only ranks whose output is shown
    no_fork:               why the workers must be fresh interpreters; if empty, they may be forked
    probe_hosts:           first have the agents on other hosts report them, and connect to each other
    """

    program: tuple[str, ...]
    module: bool = False
    processes: int | None = None
    devices_per_process: int | None = None
    platform: str = "auto"
    simulated_hosts: int = 0
    hosts: int | None = None
    processes_per_host: int | None = None
    host_rank: int | None = None
    head: str = ""
    rendezvous: Path | None = None
    cpus_per_process: int | None = None
    gpus_per_host: int | None = None
    backend: str = "local"
    host_list: str = ""
    hostfile: Path | None = None
    mpirun: str = ""
    mpi_args: tuple[str, ...] = ()
    slurm_args: tuple[str, ...] = ()
    partition: str = ""
    time_limit: str = ""
    account: str = ""
    sbatch: Path | None = None
    submit: bool = False
    requeue: bool = False
    interface: str = ""
    timeout: float | None = None
    save_time: float | None = None
    stall_timeout: float | None = None
    stall_notice: float = 30.0
    lockstep: str = LOCKSTEP_RECORD
    make_mesh: str = MAKE_MESH_JAXRUN
    compile: str = COMPILE_AUTO
    compile_memory: int = COMPILE_MEMORY_MIB
    compile_cache: str = CACHE_OFF
    init_timeout: float = 120.0
    grace: float | None = None
    max_restarts: int = 0
    restart_on: str = RESTART_ON[0]
    spares: int = 0
    min_hosts: int | None = None
    placement: tuple[str, ...] = ()
    spare_hosts: tuple[str, ...] = ()
    chaos: tuple[FaultSpec, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    torch_env: bool = False
    pdb: bool = False
    stdin: str = ""
    run_dir: Path | None = None
    no_run_dir: bool = False
    live: bool = False
    quiet_ranks: Ranks = ()
    only_ranks: Ranks = ()
    no_fork: str = ""
    probe_hosts: bool = False
    tag: str = ""
    verbose: bool = False

    def __post_init__(self) -> None:
        _check_program(self.program, self.module)
        _at_least_one("-n/--processes", self.processes)
        if self.processes is not None and self.processes > _MAX_PROCESSES:
            raise UsageError(f"-n/--processes must be {_MAX_PROCESSES} or less, not {self.processes}")
        _at_least_one("-d/--devices-per-process", self.devices_per_process)
        _at_least_one("-N/--hosts", self.hosts)
        _at_least_one("--processes-per-host", self.processes_per_host)
        _at_least_one("--cpus-per-process", self.cpus_per_process)
        _at_least_one("--gpus-per-host", self.gpus_per_host)
        _check_process_counts(self.processes, self.hosts, self.processes_per_host)
        self._check_host_rank()
        if self.simulated_hosts < 0:
            raise UsageError(f"--simulate-hosts must be 1 or more, not {self.simulated_hosts}")
        if self.platform not in PLATFORMS:
            raise UsageError(f"--platform must be one of {', '.join(PLATFORMS)}, not {self.platform!r}")
        if self.lockstep not in LOCKSTEP_MODES:
            raise UsageError(f"--lockstep must be one of {', '.join(LOCKSTEP_MODES)}, not {self.lockstep!r}")
        if self.make_mesh not in MAKE_MESH_MODES:
            raise UsageError(f"--make-mesh must be one of {', '.join(MAKE_MESH_MODES)}, not {self.make_mesh!r}")
        if self.compile not in COMPILE_MODES:
            raise UsageError(f"--compile must be one of {', '.join(COMPILE_MODES)}, not {self.compile!r}")
        if self.compile == COMPILE_ONCE and self.platform not in ("auto", "cpu"):
            raise UsageError(
                f"--compile {self.compile} is for cpu: sharing was not tried on {self.platform}; leave it out"
            )
        if self.compile_memory < 1:
            raise UsageError(
                f"--compile-memory must be 1 MiB or more, not {self.compile_memory}; "
                f"to share nothing, give --compile {COMPILE_EACH}"
            )
        if self.compile_cache not in (CACHE_OFF, CACHE_AUTO) and not self.compile_cache.startswith("/"):
            raise UsageError(f"--compile-cache must be a directory, auto or off, not {self.compile_cache!r}")
        _positive("--timeout", self.timeout)
        _positive("--save-time", self.save_time)
        if self.timeout is not None and self.save_time is not None and self.save_time >= self.timeout:
            raise UsageError(f"--save-time {self.save_time:g} is all of --timeout {self.timeout:g}; give less of it")
        _positive("--stall-timeout", self.stall_timeout or None)
        _positive("--stall-notice", self.stall_notice or None)
        _positive("--init-timeout", self.init_timeout)
        if self.grace is not None and not 0 <= self.grace < math.inf:
            raise UsageError(f"--grace must be 0 seconds or more, not {self.grace:g}")
        if self.max_restarts < 0:
            raise UsageError(f"--max-restarts must be 0 or more, not {self.max_restarts}")
        if self.restart_on not in RESTART_ON:
            raise UsageError(f"--restart-on must be one of {', '.join(RESTART_ON)}, not {self.restart_on!r}")
        if self.spares < 0:
            raise UsageError(f"--spares must be 0 or more, not {self.spares}")
        _at_least_one("--min-hosts", self.min_hosts)
        for option, wanted in (("--spares", self.spares), ("--min-hosts", self.min_hosts)):
            if wanted and not self.max_restarts:
                raise UsageError(f"{option} {wanted} needs --max-restarts: a job without a host is started again")
        if self.min_hosts and self.hosts and self.min_hosts > self.hosts:
            raise UsageError(f"--min-hosts {self.min_hosts} is more than -N {self.hosts}; give a smaller number")
        if self.live and (self.sbatch or self.submit):
            raise UsageError("--live is for a job that runs on this terminal, not for one of --sbatch or --submit")
        if self.max_restarts and self.pdb:
            raise UsageError(f"--pdb and --max-restarts {self.max_restarts} contradict; give one of them")
        if self.stdin not in ("", STDIN_NONE) and not (self.stdin.isascii() and self.stdin.isdigit()):
            raise UsageError(f"--stdin must be the number of a rank, or {STDIN_NONE}, not {self.stdin!r}")
        if self.run_dir is not None and self.no_run_dir:
            raise UsageError(f"--run-dir {self.run_dir} and --no-run-dir contradict; give one of them")
        if self.requeue and self.no_run_dir:
            raise UsageError("--requeue needs the run directory, in which the job goes on; leave --no-run-dir out")
        if self.quiet_ranks and self.only_ranks:
            raise UsageError("--quiet-ranks and --only-rank contradict; give one of them")
        if self.host_list and self.hostfile:
            raise UsageError(f"--host {self.host_list} and --hostfile {self.hostfile} contradict; give one of them")

    @property
    def failure_grace(self) -> float:
        return FAILURE_GRACE_S if self.grace is None else self.grace

    @property
    def signal_grace(self) -> float:
        return max(SIGNAL_GRACE_S, self.save_time or 0.0) if self.grace is None else self.grace

    def _check_host_rank(self) -> None:
        if self.host_rank is None:
            if self.head:
                raise UsageError(f"--head {self.head} needs --host-rank: which of the --hosts this one is, from 0")
            return
        if self.hosts is None:
            raise UsageError(f"--host-rank {self.host_rank} needs --hosts: how many there are")
        if not 0 <= self.host_rank < self.hosts:
            raise UsageError(
                f"--host-rank {self.host_rank} is none of --hosts {self.hosts}, whose numbers are 0 to {self.hosts - 1}"
            )

    @property
    def name(self) -> str:
        """The program's file or module without path and ending: "train" of "src/train.py"."""
        from pathlib import PurePath

        return self.program[0].rpartition(".")[2] if self.module else PurePath(self.program[0]).stem

    def shows(self, rank: int) -> bool:
        """Whether the screen shows the output of `rank`."""
        if self.only_ranks:
            return any(rank in ranks for ranks in self.only_ranks)
        return not any(rank in ranks for ranks in self.quiet_ranks)


def check_rank_options(job: Job, size: int) -> None:
    """Raise UsageError if an option names a rank that a job of `size` processes does not have."""
    chaos = tuple(span for fault in job.chaos for span in fault.ranks)
    stdin = (range(int(job.stdin), int(job.stdin) + 1),) if job.stdin.isdigit() else ()
    named = {"--quiet-ranks": job.quiet_ranks, "--only-rank": job.only_ranks, "--chaos": chaos, "--stdin": stdin}
    for option, ranks in named.items():
        last = max((span[-1] for span in ranks), default=0)
        if last >= size:
            raise UsageError(f"{option} names rank {last}, but the ranks of this job are 0 to {size - 1}")


def _check_program(program: tuple[str, ...], module: bool) -> None:
    if not program or not program[0]:
        if module:
            raise UsageError("-m needs the name of a module: jaxrun [OPTIONS] -m MODULE [ARGS]...")
        raise UsageError("no program given: jaxrun [OPTIONS] PROGRAM [ARGS]... (--help shows examples)")
    if any("\0" in part for part in program):
        raise UsageError(f"a NUL byte cannot be part of a command line: {' '.join(program)!r}")
    name = program[0]
    if module and not all(part.isidentifier() for part in name.split(".")):
        raise UsageError(
            f"-m takes the name of a module, such as package.train, not {name!r}; leave -m out to run a file"
        )
    if name.startswith("-"):
        raise UsageError(f"a program cannot be called {name!r}; write ./{name} if it is a file of that name")


def _check_process_counts(processes: int | None, hosts: int | None, per_host: int | None) -> None:
    if processes is None:
        return
    if hosts is not None and processes < hosts:
        raise UsageError(f"-n {processes} leaves hosts of -N {hosts} without a process; give -N {processes} or less")
    if per_host is not None and (processes % per_host or (hosts is not None and processes != hosts * per_host)):
        wanted = "a multiple of" if hosts is None else f"-N {hosts} x"
        raise UsageError(f"-n {processes} is not {wanted} --processes-per-host {per_host}; leave one of them out")


def _at_least_one(option: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise UsageError(f"{option} must be 1 or more, not {value}")


def _positive(option: str, value: float | None) -> None:
    if value is not None and not 0 < value < math.inf:
        raise UsageError(f"{option} must be a positive number of seconds, not {value:g}")
