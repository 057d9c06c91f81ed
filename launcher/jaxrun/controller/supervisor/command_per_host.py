"""Runs one command per host (see backends): host 0 hosts the head and has a supervisor, the others only an agent.

The hosts know each other by a secret, which comes from JAXRUN_TOKEN, alike on all of them; or, where it is not set,
from the file that host 0 writes into a directory that all share (channel/rendezvous.py), with its address.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path

from jaxrun.controller.supervisor.attach import prefer_given
from jaxrun.controller.supervisor.remote import Endpoint
from jaxrun.controller.supervisor.run import run
from jaxrun.errors import JaxrunError, UsageError
from jaxrun.node.channel.host_addresses import list_addresses
from jaxrun.node.channel.reachability import answers
from jaxrun.node.channel.rendezvous import RendezvousFile, rendezvous_file
from jaxrun.protocol import auth
from jaxrun.protocol.addresses import Address, parse_addresses
from jaxrun.protocol.connect import HeadAddress
from jaxrun.protocol.names import TOKEN
from jaxrun.spec.job.cluster_env import BY_OPTIONS, RankInfo
from jaxrun.spec.job.job import Job
from jaxrun.spec.job.plan import Plan
from jaxrun.terminal import print_notice
from jaxrun.text import format_ranks


def run_host(plan: Plan, environ: Mapping[str, str]) -> int:
    """Run this host's part of the job; returns the exit status of the job, the same on every host."""
    job = plan.job
    head = parse_addresses(job.head) if job.head else ()
    token = auth.read_given_token(environ)
    # All that is alike on all hosts, even where they disagree on the job's size: they must meet to be told.
    rendezvous = rendezvous_file(RankInfo(BY_OPTIONS, 0, 0, job.head), job.rendezvous or Path.cwd())
    direct = HeadAddress(token, head) if head and token else None
    if job.host_rank == 0:
        return _run_host_0(plan, environ, head, token, None if direct else rendezvous)
    return _run_other_host(plan, environ, head, token, direct, rendezvous)


def _run_host_0(
    plan: Plan, environ: Mapping[str, str], head: tuple[Address, ...], token: str, rendezvous: RendezvousFile | None
) -> int:
    port = head[0].port if head else 0
    if head:
        _check_is_head(head)
    return run(plan, environ, endpoint=Endpoint(token or auth.new_token(), port, rendezvous))


def _run_other_host(
    plan: Plan,
    environ: Mapping[str, str],
    head: tuple[Address, ...],
    token: str,
    direct: HeadAddress | None,
    rendezvous: RendezvousFile,
) -> int:
    from jaxrun.node.agent import remote as agent

    job = plan.job
    ranks = [worker.rank for worker in plan.workers if worker.host == f"--host-rank {job.host_rank}"]

    def find_head() -> HeadAddress | None:
        if direct is not None:
            return direct
        return prefer_given(rendezvous.read(), token, head)

    where = f"the head at {job.head}" if direct else f"the head that {rendezvous.path} names"
    print_notice(f"host {job.host_rank} of {job.hosts}: {format_ranks(ranks)} of {len(plan.workers)} join {where}")
    print_notice("their output, and how the job goes, are shown on host 0")
    said: list[str] = []
    try:
        status = agent.run(
            find_head,
            ranks,
            len(plan.workers),
            job.init_timeout,
            environ,
            _not_found(job, rendezvous),
            command=job.program,
            by_terminal=True,
            on_lost=said.append,
        )
    except JaxrunError as error:
        said, status = [str(error)], error.exit_code
    for text in said:
        print_notice(text)
    print_notice(
        "done" if status == 0 else f"the job ended with exit {status}{'' if said else '; why stands on host 0'}"
    )
    return status


def _not_found(job: Job, rendezvous: RendezvousFile) -> str:
    return (
        f"host 0 has not left its address in {rendezvous.path}. Is it started, in a directory that all hosts share, "
        "and with the same --head? Where they share none, set one secret on all hosts, and say where host 0 listens: "
        f"export {TOKEN}=…; jaxrun … --head host:port"
    )


def _check_is_head(head: tuple[Address, ...]) -> None:
    """Raise UsageError where --head names another host, at which a head answers: this host is another than 0."""
    own = {address.ip.partition("%")[0] for address in list_addresses()}
    if any(ip in own for address in head for ip in _resolve(address)):
        return
    here = os.uname().nodename
    for address in head:
        if answers(address):
            raise UsageError(
                f"--head {address} is another host than {here}, and its head is running: --host-rank 0 is taken; "
                "give each host a number of its own"
            )
    print_notice(f"{here} has no address of --head {','.join(map(str, head))}; can the other hosts reach it there?")


def _resolve(address: Address) -> set[str]:
    try:
        return {str(found[4][0]) for found in socket.getaddrinfo(address.ip, address.port, type=socket.SOCK_STREAM)}
    except OSError:
        raise UsageError(f"--head {address}: there is no host {address.ip!r}; give its address or a name") from None
