"""Checks the options of a job against each other, and against its program, backend and size.

Each option's own value is checked by its declaration (options.py).
"""

from __future__ import annotations

from collections.abc import Iterator

from jaxrun.errors import UsageError
from jaxrun.spec.backends import BACKENDS, HOSTS, backends_with, understands
from jaxrun.spec.job.option_declaration import options_of
from jaxrun.spec.job.options import JobOptions


def check_combinations(job: JobOptions, program: tuple[str, ...]) -> None:
    """Raise UsageError if the options of a job contradict each other or its program."""
    _check_program(program, job.module)
    for is_wrong, text in (*_counts(job), *_needs(job), *_contradictions(job)):
        if is_wrong:
            raise UsageError(text)


def _counts(job: JobOptions) -> Iterator[tuple[bool, str]]:
    """Numbers that leave a remainder, or leave nothing."""
    n, hosts, each, rank = job.processes, job.hosts, job.processes_per_host, job.host_rank
    if n is not None and hosts is not None:
        yield n < hosts, f"-n {n} leaves hosts of -N {hosts} without a process; give -N {n} or less"
    if n is not None and each is not None:
        wanted = "a multiple of" if hosts is None else f"-N {hosts} x"
        is_wrong = n % each != 0 or (hosts is not None and n != hosts * each)
        yield is_wrong, f"-n {n} is not {wanted} --processes-per-host {each}; leave one of them out"
    if rank is not None and hosts is not None:
        numbers = f"whose numbers are 0 to {hosts - 1}"
        yield not 0 <= rank < hosts, f"--host-rank {rank} is not one of --hosts {hosts}, {numbers}"
    if job.min_hosts and hosts:
        yield job.min_hosts > hosts, f"--min-hosts {job.min_hosts} is more than -N {hosts}; give a smaller number"
    if job.timeout is not None and job.save_time is not None:
        least = f"--save-time {job.save_time:g} leaves nothing of --timeout {job.timeout:g}"
        yield job.save_time >= job.timeout, f"{least}; give a shorter --save-time"


def _needs(job: JobOptions) -> Iterator[tuple[bool, str]]:
    """Options that make sense only with another option, or in a certain kind of job."""
    by_hand, restarts = job.host_rank is not None, job.max_restarts > 0
    again = "needs --max-restarts or --host-check: only then does a job that has lost a host start again"
    replaces = restarts or job.host_check
    is_handed_over = job.sbatch is not None or job.manifest is not None or job.submit
    yield by_hand and job.hosts is None, f"--host-rank {job.host_rank} needs --hosts, the number of hosts"
    text = f"--head {job.head} needs --host-rank, the number of this host, from 0"
    yield bool(job.head) and not by_hand, text
    yield job.spares > 0 and not replaces, f"--spares {job.spares} {again}"
    yield job.min_hosts is not None and not replaces, f"--min-hosts {job.min_hosts} {again}"
    text = f"--wait-hosts {job.wait_hosts or 0:g} needs --max-restarts: a job that has lost a host is started again"
    yield bool(job.wait_hosts) and not restarts, text
    text = f"--grow {job.grow or 0:g} needs --min-hosts: without it, a job that has lost a host does not continue"
    yield bool(job.grow) and job.min_hosts is None, text
    text = "--live is for a job that runs on this terminal, not for one of --sbatch, --manifest or --submit"
    yield job.live and is_handed_over, text
    text = "--requeue needs the run directory, in which the job continues; leave out --no-run-dir"
    yield job.requeue and job.no_run_dir, text


def _contradictions(job: JobOptions) -> Iterator[tuple[bool, str]]:
    """Options that exclude each other."""
    for is_wrong, both in (
        (job.pdb and job.max_restarts, f"--pdb and --max-restarts {job.max_restarts}"),
        (job.pdb and job.debug_post_mortem, "--pdb and --debug-post-mortem"),
        (job.debug_post_mortem and job.max_restarts, f"--debug-post-mortem and --max-restarts {job.max_restarts}"),
        (job.debug and job.no_run_dir, "--debug and --no-run-dir"),
        (job.debug_post_mortem and job.no_run_dir, "--debug-post-mortem and --no-run-dir"),
        (job.live and job.debug, "--live, which hides what to type, and --debug"),
        (job.live and job.debug_post_mortem, "--live, which hides what to type, and --debug-post-mortem"),
        (job.run_dir is not None and job.no_run_dir, f"--run-dir {job.run_dir} and --no-run-dir"),
        (job.quiet_ranks and job.only_ranks, "--quiet-ranks and --only-rank"),
        (job.quiet and job.verbose, "--quiet and --verbose"),
        (job.host_list and job.hostfile, f"--host {job.host_list} and --hostfile {job.hostfile}"),
    ):
        yield bool(is_wrong), f"{both} contradict; give one of them"


def check_rank_options(job: JobOptions, size: int) -> None:
    """Raise UsageError if an option names a rank that a job of `size` processes does not have."""
    chaos = tuple(span for fault in job.chaos for span in fault.ranks)
    stdin = (range(int(job.stdin), int(job.stdin) + 1),) if job.stdin.isdigit() else ()
    named = {"--quiet-ranks": job.quiet_ranks, "--only-rank": job.only_ranks, "--chaos": chaos, "--stdin": stdin}
    for option, ranks in named.items():
        last = max((span[-1] for span in ranks), default=0)
        if last >= size:
            raise UsageError(f"{option} names rank {last}, but the ranks of this job are 0 to {size - 1}")


def check_options(job: JobOptions) -> None:
    """Raise UsageError if `job` has an option that its backend does not support; this machine counts as one host."""
    for field, option in options_of(job):
        if understands(job.backend, option) or (field.name == "hosts" and job.hosts == 1):
            continue
        if getattr(job, field.name) not in (None, "", 0, False, (), field.default):
            fitting = [f"--backend {name}" for name in backends_with(option)]
            if understands(HOSTS, option):
                fitting.append("--host-rank on each host")
            chosen = f"--backend {job.backend}" if job.backend in BACKENDS else "--host-rank"
            wanted = " or ".join(filter(None, (", ".join(fitting[:-1]), fitting[-1])))
            advice = f"add {fitting[0]}" if job.backend == "local" else "leave out one of the two"
            raise UsageError(f"{option.title} is for {wanted}, not for {chosen}; {advice}")


def _check_program(program: tuple[str, ...], module: bool) -> None:
    if not program or not program[0]:
        if module:
            raise UsageError("-m needs the name of a module: jaxrun [OPTIONS] -m MODULE [ARGS]...")
        raise UsageError("no program given: jaxrun [OPTIONS] PROGRAM [ARGS]... (--help shows examples)")
    if any("\0" in part for part in program):
        raise UsageError(f"a command line cannot contain a NUL byte: {' '.join(program)!r}")
    name = program[0]
    if module and not all(part.isidentifier() for part in name.split(".")):
        raise UsageError(
            f"-m takes the name of a module, such as package.train, not {name!r}; leave -m out to run a file"
        )
    if name.startswith("-"):
        raise UsageError(f"a program cannot be called {name!r}; write ./{name} if it is a file of that name")
