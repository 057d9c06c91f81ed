"""`jaxrun attach`: this process is one of a job, whoever started it. Rank 0 hosts the head, and so says the verdict."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from jaxrun.agent import remote as agent
from jaxrun.backends.attach import plan_attached
from jaxrun.channel import addresses
from jaxrun.channel.connect import HeadAddress
from jaxrun.channel.rendezvous import RendezvousFile, rendezvous_file
from jaxrun.errors import UsageError
from jaxrun.job import cluster_env
from jaxrun.job.cluster_env import BY_OPTIONS, RankInfo
from jaxrun.job.job import Job
from jaxrun.protocol import auth
from jaxrun.protocol.names import TOKEN
from jaxrun.supervisor import run
from jaxrun.supervisor.remote import Endpoint

_GENERATIONS = 8  # of ancestors, among which a wrapper script or two may stand


@dataclass(frozen=True, slots=True)
class AttachOptions:
    """What the command line says besides the job; None and empty where it says nothing.

    head:        "host:port", where rank 0 listens
    directory:   which all hosts share, and where the ranks look for rank 0
    """

    rank: int | None = None
    size: int | None = None
    head: str = ""
    directory: Path | None = None


def attach(job: Job, asked: AttachOptions, environ: Mapping[str, str]) -> int:
    """Be one process of the job; returns the exit status."""
    if asked.rank is None and asked.size is None:
        place = cluster_env.detect_rank_info(environ, _ancestors())
    else:
        place = cluster_env.combine_with_options(
            cluster_env.find_rank_info(environ, _ancestors()), asked.rank, asked.size
        )
    if place.engine == BY_OPTIONS and not (asked.head or asked.directory):
        raise UsageError("with --rank and --size, also say where rank 0 listens: --head host:port, alike on all ranks")
    where = addresses.parse_addresses(asked.head) if asked.head else ()
    token = environ.get(TOKEN, "")
    meeting_place = rendezvous_file(place, asked.directory or Path.cwd())
    if place.rank == 0:
        return _run_rank_0(job, place, where, token, meeting_place, environ)
    if where and token:
        offer = HeadAddress(_job_id(token), token, where)
        return agent.run(lambda: offer, place.rank, place.size, job.init_timeout, environ)

    def find() -> HeadAddress | None:
        offer = meeting_place.read()
        return replace(offer, addresses=where) if offer and where else offer

    why_none = (
        f"rank 0 has not left its address in {meeting_place.path}. Do all hosts share this directory? "
        f"--rendezvous names another; or give --head host:port, and {TOKEN} in the environment, alike on all ranks"
    )
    return agent.run(find, place.rank, place.size, job.init_timeout, environ, why_none)


def _run_rank_0(
    job: Job,
    place: RankInfo,
    where: tuple[addresses.Address, ...],
    token: str,
    meeting_place: RendezvousFile,
    environ: Mapping[str, str],
) -> int:
    """Rank 0: host the head, and start its own agent as all others are."""
    token = token or auth.new_token()
    job_id = _job_id(token)
    plan = plan_attached(job, place, environ, job_id)
    meeting = Endpoint(
        token,
        port=where[0].port if where else 0,
        announce=lambda head: meeting_place.write(job_id, token, head),
        retract=meeting_place.remove,
        attached=True,
    )
    try:
        return run.run(plan, environ, meeting=meeting)
    finally:
        meeting_place.remove()


def _job_id(token: str) -> str:
    """The same on all ranks that know the token, which it does not tell."""
    return hashlib.sha256(f"jaxrun job {token}".encode()).hexdigest()[:32]


def _ancestors() -> list[list[str]]:
    """The command lines of the processes above this one, the parent first."""
    found, pid = [], os.getppid()
    for _ in range(_GENERATIONS):
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
