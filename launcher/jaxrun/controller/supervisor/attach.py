"""Jobs of which this process is only a part: `jaxrun attach`, and one command on each host (--host-rank).

Rank 0, or host 0, hosts the head; the others are agents. They meet at --head, with a secret in JAXRUN_TOKEN, the same
on all of them. Values that are not given are read from the file that rank 0 writes into a directory shared by all hosts
(channel/rendezvous.py).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from jaxrun.controller.supervisor.head_name import check_is_head, say_who_is_missing
from jaxrun.controller.supervisor.remote_job import Endpoint
from jaxrun.controller.supervisor.run_job import run
from jaxrun.errors import JaxrunError, UsageError
from jaxrun.node.agent import agent_process
from jaxrun.node.agent.agent_process import AgentStart, HeadSearch, WayToHead
from jaxrun.node.agent.process_tree import command_lines_above
from jaxrun.node.channel.rendezvous import RendezvousFile, rendezvous_file
from jaxrun.protocol import auth
from jaxrun.protocol.addresses import Address, parse_addresses
from jaxrun.protocol.connect import HeadAddress
from jaxrun.protocol.hidden_fields import HidesFields
from jaxrun.protocol.names import TOKEN
from jaxrun.records.termination_log import write_termination_log
from jaxrun.spec.engines.by_hand import plan_attached
from jaxrun.spec.engines.lookup import engine_of
from jaxrun.spec.engines.rank_info import BY_OPTIONS, RankInfo, detect_rank_info
from jaxrun.spec.job.job import Job
from jaxrun.spec.job.plan import Plan
from jaxrun.terminal import print_notice
from jaxrun.text import format_ranks


class Rendezvous(HidesFields, frozen=True):
    """Where the parts of a job meet; `token` and `head` are empty if they were not given."""

    hidden = frozenset({"token"})

    token: str
    head: tuple[Address, ...]
    file: RendezvousFile

    @classmethod
    def of(cls, environ: Mapping[str, str], head: str, file: RendezvousFile) -> Rendezvous:
        """`head` is the "host:port" of --head."""
        return cls(auth.read_given_token(environ), parse_addresses(head) if head else (), file)

    @property
    def is_given(self) -> bool:
        """Whether both are given, so that no file is needed."""
        return bool(self.token and self.head)

    def endpoint(self, *, in_file: bool) -> Endpoint:
        """Return where the head listens; `in_file`: whether it writes that into the file."""
        port = self.head[0].port if self.head else 0
        return Endpoint(self.token or auth.new_token(), port, self.file if in_file else None)

    def find_head(self) -> HeadAddress | None:
        """Return the file's values, replaced by those that were given; None without a file yet."""
        found = HeadAddress(self.token, self.head) if self.is_given else self.file.read()
        return found and HeadAddress(self.token or found.token, self.head or found.addresses)


def attach(
    job: Job,
    environ: Mapping[str, str],
    *,
    rank: int | None = None,
    size: int | None = None,
    head: str = "",
    directory: Path | None = None,
) -> int:
    """Make this process one rank of a job that someone else started; returns the exit status.

    rank, size:  --rank and --size, if mpirun or srun does not provide them
    head:        "host:port", where rank 0 listens
    directory:   shared by all hosts; holds the rendezvous file
    """
    info = detect_rank_info(environ, command_lines_above(), rank, size)
    engine = engine_of(info.engine)
    is_typed = engine.ranks is None  # mpirun starts all ranks at the same time, and they are many
    if is_typed and not (head or directory):
        raise UsageError("--rank and --size need --head HOST:PORT, where rank 0 listens; give the same on all ranks")
    head = head or ("" if directory else info.head)
    rendezvous = Rendezvous.of(environ, head, rendezvous_file(info, directory or Path.cwd()))
    if info.rank == 0:  # its agent is started like the agents of all other ranks
        plan = plan_attached(job, engine, info.size, environ, os.urandom(16).hex())
        return run(plan, environ, endpoint=rendezvous.endpoint(in_file=True))  # other ranks may have been given less
    not_found = (
        f"rank 0 has not left its address in {rendezvous.file.path}. Do all hosts share this directory? "
        f"--rendezvous names another; or give --head host:port, and {TOKEN} in the environment, alike on all ranks"
    )
    waits = partial(say_who_is_missing, f"rank {info.rank} of {info.size}", f"rank 0 (--head {head})")
    returns = job.host_wait > 0 and engine.starts_ranks_again
    way = WayToHead(
        rendezvous.find_head,
        job.init_timeout,
        not_found,
        on_failed_round=waits() if is_typed and head else lambda why: None,
        search=HeadSearch(job.host_wait, print_notice, waits) if returns else None,
    )
    end = agent_process.run(AgentStart([info.rank], info.size, environ, job.program), way)
    write_termination_log(job.termination_log, end.headline, environ)
    return end.status


def run_host(plan: Plan, environ: Mapping[str, str]) -> int:
    """Run this host's part of the job; returns the exit status of the job, the same on every host."""
    job = plan.job
    # Everything that is the same on all hosts, even if they disagree on the job's size: they must meet to be told so.
    file = rendezvous_file(RankInfo(BY_OPTIONS, 0, 0, job.head), job.rendezvous or Path.cwd())
    rendezvous = Rendezvous.of(environ, job.head, file)
    if job.host_rank != 0:
        return _join_host_0(plan, environ, rendezvous)
    endpoint = rendezvous.endpoint(in_file=not rendezvous.is_given)
    if rendezvous.head:
        endpoint = replace(endpoint, on_listening=check_is_head(rendezvous.head, job.init_timeout))
    return run(plan, environ, endpoint=endpoint)


def _join_host_0(plan: Plan, environ: Mapping[str, str], rendezvous: Rendezvous) -> int:
    job = plan.job
    ranks = [worker.rank for worker in plan.workers if worker.host == f"--host-rank {job.host_rank}"]
    where = f"the head at {job.head}" if rendezvous.is_given else f"the head that {rendezvous.file.path} names"
    print_notice(f"host {job.host_rank} of {job.hosts}: {format_ranks(ranks)} of {len(plan.workers)} join {where}")
    print_notice("their output, and how the job goes, are shown on host 0")
    not_found = (
        f"host 0 has not left its address in {rendezvous.file.path}. Is it started, in a directory that all hosts "
        "share, and with the same --head? Where they share none, set one secret on all hosts, and say where host 0 "
        f"listens: export {TOKEN}=…; jaxrun … --head host:port"
    )
    waits = partial(say_who_is_missing, f"host {job.host_rank} of {job.hosts}", f"host 0 ({where})")
    said: list[str] = []
    try:
        way = WayToHead(
            rendezvous.find_head,
            job.init_timeout,
            not_found,
            on_failed_round=waits(),
            on_lost=said.append,
            search=HeadSearch(job.host_wait, print_notice, waits) if job.host_wait else None,
        )
        end = agent_process.run(AgentStart(ranks, len(plan.workers), environ, job.program, by_terminal=True), way)
    except JaxrunError as error:  # the job may run, without this host
        print_notice(str(error))
        write_termination_log(job.termination_log, str(error), environ)
        return error.exit_code
    for text in said:
        print_notice(text)
    write_termination_log(job.termination_log, "\n".join(said) or end.headline, environ)
    status = end.status
    if end.leaves:
        print_notice(f"this host goes away (SIGTERM), and leaves the job, which continues without it; exit {status}")
        return status
    print_notice("done" if status == 0 else f"the job ended with exit {status}{'' if said else '; host 0 shows why'}")
    return status
