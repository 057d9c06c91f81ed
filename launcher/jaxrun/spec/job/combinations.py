"""What options of a job contradict each other, or name what it does not have.

What is wrong with one value alone is said where its option is declared (job.py, protocol/settings.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxrun.errors import UsageError

if TYPE_CHECKING:
    from jaxrun.spec.job.job import Job


def check_combinations(job: Job) -> None:
    """Raise UsageError if the options of a job do not fit each other."""
    _check_program(job.program, job.module)
    _check_process_counts(job.processes, job.hosts, job.processes_per_host)
    _check_host_rank(job)
    _check_hosts_to_lose(job)
    if job.timeout is not None and job.save_time is not None and job.save_time >= job.timeout:
        raise UsageError(
            f"--save-time {job.save_time:g} leaves nothing of --timeout {job.timeout:g}; give a shorter --save-time"
        )
    if job.live and (job.sbatch or job.submit):
        raise UsageError("--live is for a job that runs on this terminal, not for one of --sbatch or --submit")
    if job.requeue and job.no_run_dir:
        raise UsageError("--requeue needs the run directory, in which the job goes on; leave --no-run-dir out")
    pairs = (
        (job.max_restarts and job.pdb, f"--pdb and --max-restarts {job.max_restarts}"),
        (job.run_dir is not None and job.no_run_dir, f"--run-dir {job.run_dir} and --no-run-dir"),
        (job.quiet_ranks and job.only_ranks, "--quiet-ranks and --only-rank"),
        (job.host_list and job.hostfile, f"--host {job.host_list} and --hostfile {job.hostfile}"),
    )
    for contradict, both in pairs:
        if contradict:
            raise UsageError(f"{both} contradict; give one of them")


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


def _check_host_rank(job: Job) -> None:
    if job.host_rank is None:
        if job.head:
            raise UsageError(f"--head {job.head} needs --host-rank: which of the --hosts this one is, from 0")
        return
    if job.hosts is None:
        raise UsageError(f"--host-rank {job.host_rank} needs --hosts: how many there are")
    if not 0 <= job.host_rank < job.hosts:
        raise UsageError(
            f"--host-rank {job.host_rank} is not one of --hosts {job.hosts}, whose numbers are 0 to {job.hosts - 1}"
        )


def _check_hosts_to_lose(job: Job) -> None:
    for option, wanted in (("--spares", job.spares), ("--min-hosts", job.min_hosts)):
        if wanted and not job.max_restarts:
            raise UsageError(f"{option} {wanted} needs --max-restarts: a job that has lost a host is started again")
    if job.min_hosts and job.hosts and job.min_hosts > job.hosts:
        raise UsageError(f"--min-hosts {job.min_hosts} is more than -N {job.hosts}; give a smaller number")
