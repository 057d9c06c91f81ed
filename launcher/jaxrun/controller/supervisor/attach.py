"""`jaxrun attach`: makes this process one rank of a job that somebody else started. Rank 0 hosts the head.

The others find rank 0 by --head, or by a file in a directory that all hosts share (channel/rendezvous.py).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from jaxrun.controller.supervisor.remote import Endpoint
from jaxrun.controller.supervisor.run import run
from jaxrun.errors import UsageError
from jaxrun.node.agent import remote as agent
from jaxrun.node.channel.rendezvous import rendezvous_file
from jaxrun.protocol import auth
from jaxrun.protocol.addresses import Address, parse_addresses
from jaxrun.protocol.connect import HeadAddress
from jaxrun.protocol.names import TOKEN
from jaxrun.spec.backends.remote_plan import plan_attached
from jaxrun.spec.job import cluster_env
from jaxrun.spec.job.cluster_env import BY_OPTIONS, RankInfo
from jaxrun.spec.job.job import Job

_MAX_ANCESTORS = 8  # that are examined; a wrapper script or two may stand among them


@dataclass(frozen=True, slots=True)
class AttachOptions:
    """Options besides those of the job; None and empty where they were not given.

    head:       "host:port", where rank 0 listens
    directory:  shared by all hosts; holds the rendezvous file
    """

    rank: int | None = None
    size: int | None = None
    head: str = ""
    directory: Path | None = None


def attach(job: Job, options: AttachOptions, environ: Mapping[str, str]) -> int:
    """Be one process of the job; returns the exit status."""
    if options.rank is None and options.size is None:
        info = cluster_env.detect_rank_info(environ, _ancestors())
    else:
        found = cluster_env.find_rank_info(environ, _ancestors())
        info = cluster_env.combine_with_options(found, options.rank, options.size)
    if info.engine == BY_OPTIONS and not (options.head or options.directory):
        raise UsageError("with --rank and --size, also say where rank 0 listens: --head host:port, alike on all ranks")
    head = parse_addresses(options.head) if options.head else ()
    token = auth.read_given_token(environ)
    rendezvous = rendezvous_file(info, options.directory or Path.cwd())
    if info.rank == 0:
        endpoint = Endpoint(token or auth.new_token(), head[0].port if head else 0, rendezvous)
        return _run_rank_0(job, info, endpoint, environ)
    if head and token:
        address = HeadAddress(token, head)
        return agent.run(lambda: address, [info.rank], info.size, job.init_timeout, environ, command=job.program)

    def find_head() -> HeadAddress | None:
        return prefer_given(rendezvous.read(), token, head)

    not_found = (
        f"rank 0 has not left its address in {rendezvous.path}. Do all hosts share this directory? "
        f"--rendezvous names another; or give --head host:port, and {TOKEN} in the environment, alike on all ranks"
    )
    return agent.run(find_head, [info.rank], info.size, job.init_timeout, environ, not_found, command=job.program)


def prefer_given(found: HeadAddress | None, token: str, head: tuple[Address, ...]) -> HeadAddress | None:
    """What the rendezvous file says, but for the token and the addresses that people have given."""
    return found and HeadAddress(token or found.token, head or found.addresses)


def _run_rank_0(job: Job, info: RankInfo, endpoint: Endpoint, environ: Mapping[str, str]) -> int:
    """Host the head, and start the agent of rank 0 as those of all other ranks are."""
    plan = plan_attached(job, info, environ, os.urandom(16).hex())
    return run(plan, environ, endpoint=endpoint)


def _ancestors() -> list[list[str]]:
    """The command lines of the processes above this one, the parent first."""
    found, pid = [], os.getppid()
    for _ in range(_MAX_ANCESTORS):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:-1]
            status = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            break
        found.append([os.fsdecode(word) for word in words])
        pid = int(status.rpartition(")")[2].split()[1])
        if pid <= 1:
            break
    return found
