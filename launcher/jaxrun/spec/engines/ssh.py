"""OpenSSH: its client starts one agent on each of the hosts that -H or --hostfile name.

One local process, the starter (node/ssh), keeps a connection to each host. Each agent then has a connection
of its own to the head, directly or through its host's ssh, so the agents survive the loss of another host.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence

from msgspec import Struct

from jaxrun.errors import UnavailableError, UsageError
from jaxrun.protocol.agent_id import AgentId
from jaxrun.protocol.staging_messages import STAGE_VENV
from jaxrun.spec.backends.mpi_hosts import named_hosts, place_on_hosts, spare_hosts
from jaxrun.spec.backends.remote_plan import leave_out, plan_remote
from jaxrun.spec.engines.engine import Engine, read_starter_output
from jaxrun.spec.job.job import Job
from jaxrun.spec.job.plan import AGENT_ARGV, LaunchCommand, Plan
from jaxrun.spec.job.rank_placement import UNPLACED, Placement

STARTER = "jaxrun.node.ssh"


# Each agent is told its ranks.
SSH = Engine(key="ssh", title="OpenSSH", agents_stay=True, explains_itself=True, read_output=read_starter_output)

_LONGEST_CONNECT_S = 15  # until a host that does not answer is given up
_PLAIN_PATH = re.compile(r"[A-Za-z0-9_@%+=:,./~-]+")  # means itself in every shell


def plan(job: Job, environ: Mapping[str, str], job_id: str, placed: Placement = UNPLACED) -> Plan:
    """Plan one agent on each host.

    Raises the exceptions of `plan_starter`, and UnavailableError without OpenSSH's client.
    """
    return plan_starter(job, environ, job_id, placed, StarterCommand(SSH, "ssh", ("--ssh", find_ssh(environ))))


class StarterCommand(Struct, frozen=True):
    """How the starter reaches the hosts.

    engine, title:  of the LaunchCommand
    words:          the starter's options that name the remote shell
    """

    engine: Engine
    title: str
    words: tuple[str, ...]


def plan_starter(job: Job, environ: Mapping[str, str], job_id: str, placed: Placement, starter: StarterCommand) -> Plan:
    """Plan one agent on each host. Raises UsageError without hosts, or if a path cannot be given to their shells."""
    named = named_hosts(job)
    if not named:
        raise UsageError(f"--backend {job.backend} needs the names of the hosts: -H h1:4,h2:4, or --hostfile FILE")
    if job.remote_python and not _PLAIN_PATH.fullmatch(job.remote_python):
        raise UsageError(f"--remote-python {job.remote_python!r} has characters that a shell may change; link to it")
    hosts, spares, left_out = placed.hosts, placed.spares, dict[str, str]()
    if not hosts:
        job, left_out = leave_out(job, [host.name for host in named], placed.left_out)
        named = tuple(host for host in named if host.name not in left_out)
        hosts, spares = place_on_hosts(job, named, None), spare_hosts(job, named, None)
    ranks_of = _ranks_of_hosts(hosts)
    command = LaunchCommand(
        engine=starter.engine,
        title=starter.title,
        argv=(sys.executable, "-m", STARTER, *starter.words, *_starter_words(job, ranks_of), "--", *AGENT_ARGV),
        agent_hosts=(*hosts, *spares),
        size=len(hosts),
        agents={AgentId(ranks[0]): tuple(ranks) for ranks in ranks_of.values()}
        | {AgentId(len(hosts) + index): () for index in range(len(spares))},
        survive_host_loss=starter.engine.agents_stay,
    )
    return plan_remote(job, environ, job_id, command, hosts, (), spares, left_out)


def find_ssh(environ: Mapping[str, str]) -> str:
    """Return the path of the user's OpenSSH client. Raises UnavailableError."""
    found = shutil.which("ssh", path=environ.get("PATH"))
    if found is None:
        raise UnavailableError(
            f"--backend ssh needs ssh, which is not on PATH ({environ.get('PATH', 'not set')}); install it: "
            "apt-get install openssh-client"
        )
    return found


def _ranks_of_hosts(hosts: Sequence[str]) -> dict[str, list[int]]:
    ranks_of: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks_of.setdefault(host, []).append(rank)
    return ranks_of


def _starter_words(job: Job, ranks_of: Mapping[str, Sequence[int]]) -> tuple[str, ...]:
    """What the starter is told on its command line, which others can read: no value of a variable, and no secret."""
    connect_s = max(1, min(_LONGEST_CONNECT_S, int(job.init_timeout / 2)))
    words = ["--connect-timeout", str(connect_s), "--directory", os.getcwd()]
    words += ["--tunnel", job.tunnel]
    carries = carries_environment(job)
    for python in [job.remote_python] if job.remote_python else _own_pythons(anywhere=carries):
        words += ["--remote-python", python]
    words += ["--carry"] if carries else []
    words += ["--stage-dir", os.path.abspath(job.stage_dir)] if job.stage_dir else []
    words += ["--stages-directory"] if _is_staged(os.getcwd(), job) else []
    hosts = [f"{host}={ranks[0]}-{ranks[-1]}" for host, ranks in ranks_of.items()]
    return (*words, *hosts)


def carries_environment(job: Job) -> bool:
    """Whether --stage brings this interpreter's environment to the hosts, and ssh jaxrun with it."""
    return job.backend == "ssh" and (
        any(str(named) == STAGE_VENV for named in job.stage) or _is_staged(sys.prefix, job)
    )


def _is_staged(directory: str, job: Job) -> bool:
    staged = [os.path.abspath(named) for named in job.stage if str(named) != STAGE_VENV]
    return any(directory == one or directory.startswith(f"{one}/") for one in staged)


def _own_pythons(*, anywhere: bool) -> list[str]:
    """Return where this Python may be on a host; `anywhere`: any of this version will do. Raises UsageError."""
    version = ".".join(map(str, sys.version_info[:2]))
    base = os.path.realpath(sys.executable)
    found = (sys.executable, base, f"python{version}", "python3")
    plain = [python for python in dict.fromkeys(found) if _PLAIN_PATH.fullmatch(python)]
    if anywhere:
        return plain
    if found[0] not in plain:
        name = "name the Python on the hosts by another path: --remote-python PATH"
        raise UsageError(f"the path of this Python, {found[0]!r}, has characters that a shell may change; {name}")
    return [found[0]]
