"""All combinations of options that are refused: with each other, with the program, with the backend and its hosts.

Each option's own value is checked by its declaration (option_checks.py). What only a machine knows, such as a missing
terminal, is checked where it is used.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jaxrun.errors import UsageError
from jaxrun.protocol.flight_file import LOCKSTEP_STRICT
from jaxrun.protocol.settings import STDIN_NONE, STDIN_RANK_0
from jaxrun.spec.backends import BACKENDS, HOSTS, KUBERNETES, LOCAL, backends_with, understands
from jaxrun.spec.job.option_checks import check_kubernetes_name
from jaxrun.spec.job.option_declaration import Option, options_of
from jaxrun.spec.job.options import HOSTS_AUTO, JobOptions
from jaxrun.text import UNKNOWN_HOST, plural


class _Exclusive(NamedTuple):
    """Two options, by their fields, of which a job can have one.

    why:    what is said of the first
    value:  the one value of the first that counts; None: each but its default
    """

    first: str
    second: str
    why: str = ""
    value: str | None = None


_EXCLUSIVE = (
    _Exclusive("pdb", "max_restarts"),
    _Exclusive("pdb", "debug_post_mortem"),
    _Exclusive("debug_post_mortem", "max_restarts"),
    _Exclusive("keep_survivors", "pdb"),
    _Exclusive("keep_survivors", "debug_post_mortem"),
    _Exclusive("keep_survivors", "restart_on"),
    _Exclusive("lockstep", "keep_survivors", ", with which each call waits for all ranks,", LOCKSTEP_STRICT),
    _Exclusive("debug", "no_run_dir"),
    _Exclusive("debug_post_mortem", "no_run_dir"),
    _Exclusive("live", "debug", ", which hides what to type,"),
    _Exclusive("live", "debug_post_mortem", ", which hides what to type,"),
    _Exclusive("live", "no_run_dir", ", which shows what the run directory has,"),
    _Exclusive("metrics", "no_run_dir", ", which asks the job by its run directory,"),
    _Exclusive("run_dir", "no_run_dir"),
    _Exclusive("quiet_ranks", "only_ranks"),
    _Exclusive("quiet", "verbose"),
    _Exclusive("host_list", "hostfile"),
)
_OPTIONS = {field.name: (field.default, option) for field, option in options_of(JobOptions)}


def check_combinations(job: JobOptions, program: tuple[str, ...]) -> None:
    """Raise UsageError if the options of a job contradict each other or its program."""
    _check_program(program, job.module)
    for is_wrong, text in (*_counts(job), *_needs(job), *_contradictions(job)):
        if is_wrong:
            raise UsageError(text)


def contradicted_defaults(given: Mapping[str, Any], defaults: Collection[str]) -> set[str]:
    """Return which of these defaults exclude an option that was typed: the command line overrides them.

    given:  the values of all options that were given, typed or by a default, by field
    """
    pairs = [{row.first, row.second} for row in _EXCLUSIVE if _clash(row, given)]
    return {name for pair in pairs if not pair <= {*defaults} for name in pair & {*defaults}}


def check_backend(given: Mapping[str, Any]) -> None:
    """Raise UsageError if a command on each host is asked for, and also a backend that starts the hosts' processes."""
    backend = given.get("backend", LOCAL)
    if backend == LOCAL:
        return
    if given.get("hosts") == HOSTS_AUTO:
        raise UsageError(f"--hosts auto and --backend {backend} contradict; leave one of them out")
    if "host_rank" in given:
        raise UsageError(f"--host-rank is for hosts without --backend {backend}; leave one of them out")


def check_per_node(count: int, field: str, given: Mapping[str, Any]) -> None:
    """Raise UsageError if --nproc-per-node is not the number that its own name here, the option of `field`, has."""
    if given.get(field, count) != count:
        name = _OPTIONS[field][1].flags[0]
        raise UsageError(f"--nproc-per-node {count} contradicts {name} {given[field]}; give one of them")


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
    is_written = job.sbatch is not None or job.qsub is not None
    is_handed_over = is_written or job.manifest is not None or job.submit
    yield by_hand and job.hosts is None, f"--host-rank {job.host_rank} needs --hosts, the number of hosts"
    text = f"--head {job.head} needs --host-rank, the number of this host, from 0"
    yield bool(job.head) and not by_hand, text
    yield job.spares > 0 and not replaces, f"--spares {job.spares} {again}"
    yield job.min_hosts is not None and not replaces, f"--min-hosts {job.min_hosts} {again}"
    text = f"--wait-hosts {job.wait_hosts or 0:g} needs --max-restarts: a job that has lost a host is started again"
    yield bool(job.wait_hosts) and not restarts, text
    text = f"--grow {job.grow or 0:g} needs --min-hosts: without it, a job that has lost a host does not continue"
    yield bool(job.grow) and job.min_hosts is None, text
    text = "--live is for a job that runs on this terminal, not for one of --sbatch, --qsub, --manifest or --submit"
    yield job.live and is_handed_over, text
    reads = job.live and job.stdin not in ("", STDIN_NONE)
    yield reads, f"--live and --stdin {job.stdin} both read what you type; give one of them"
    text = "--submit and --qsub need the parallel environment of the job: --pe NAME (qconf -spl lists the names)"
    asks = job.submit or job.qsub is not None
    yield asks and understands(job.backend, _OPTIONS["parallel_environment"][1]) and not job.parallel_environment, text
    if job.queue and job.backend == KUBERNETES and (wrong := check_kubernetes_name(job.queue)):
        yield True, f"--queue {wrong}"
    text = "--requeue needs the run directory, in which the job continues; leave out --no-run-dir"
    yield job.requeue and job.no_run_dir, text


def _contradictions(job: JobOptions) -> Iterator[tuple[bool, str]]:
    """Options that exclude each other."""
    values = {name: getattr(job, name) for row in _EXCLUSIVE for name in (row.first, row.second)}
    for row in _EXCLUSIVE:
        if _clash(row, values):
            both = f"{_as_typed(row.first, values)}{row.why} and {_as_typed(row.second, values)}"
            yield True, f"{both} contradict; give one of them"


def _clash(row: _Exclusive, values: Mapping[str, Any]) -> bool:
    if row.value is not None and values.get(row.first) != row.value:
        return False
    return all(values.get(name, _OPTIONS[name][0]) != _OPTIONS[name][0] for name in (row.first, row.second))


def _as_typed(field: str, values: Mapping[str, Any]) -> str:
    option: Option = _OPTIONS[field][1]
    return " ".join(option.words(values[field])).replace("=", " ", 1)


def check_rank_options(job: JobOptions, size: int) -> None:
    """Raise UsageError if an option names a rank that a job of `size` processes does not have."""
    chaos = tuple(span for fault in job.chaos for span in fault.ranks)
    stdin = (range(int(job.stdin), int(job.stdin) + 1),) if job.stdin.isdigit() else ()
    named = {"--quiet-ranks": job.quiet_ranks, "--only-rank": job.only_ranks, "--chaos": chaos, "--stdin": stdin}
    for option, ranks in named.items():
        last = max((span[-1] for span in ranks), default=0)
        if last >= size:
            raise UsageError(f"{option} names rank {last}, but the ranks of this job are 0 to {size - 1}")


def check_hosts(job: JobOptions, hosts: Sequence[str]) -> None:
    """Raise UsageError if the options do not fit these hosts, one for each rank, UNKNOWN_HOST if not known."""
    there = len(set(hosts))
    if job.min_hosts is not None and job.min_hosts > there:
        raise UsageError(f"--min-hosts {job.min_hosts}, but the job has {plural(there, 'host')} to begin with")
    for field in ("spares", "min_hosts", "exclude_hosts", "quarantine"):
        if getattr(job, field) and UNKNOWN_HOST in hosts:
            raise UsageError(
                f"{_OPTIONS[field][1].title} needs the names of the hosts, because jaxrun then places the ranks "
                "itself; give -H, or use Slurm"
            )
    check_rank_options(job, len(hosts))


def check_stdin_over_hosts(job: JobOptions, command: str) -> None:
    """Raise UsageError if a rank reads the standard input that the launch command of this title cannot give it."""
    if job.stdin not in ("", STDIN_RANK_0, STDIN_NONE):
        raise UsageError(
            f"--stdin {job.stdin} is for ranks of one machine and for srun (--backend slurm); "
            f"with {command} it is --stdin {STDIN_RANK_0} or {STDIN_NONE}"
        )


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
            advice = f"add {fitting[0]}" if job.backend == LOCAL else "leave out one of the two"
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
