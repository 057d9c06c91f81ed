"""Runs the job of a doctor, and reads its results.

It is a job like any other, with the same options. Its program times collectives, and its agents report their hosts
first. Only its output is different: it is kept for the report.
"""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

from msgspec.structs import replace

from jaxrun.errors import UsageError
from jaxrun.files.own_files import remove_directory
from jaxrun.frontends.doctor.observation import Observation, read_run_dir
from jaxrun.node.agent.host_probe import collect_facts, try_to_write
from jaxrun.protocol.agent_id import AgentId
from jaxrun.protocol.names import RUNTIME
from jaxrun.spec.backends.slurm_allocation import Allocation, read_allocation
from jaxrun.spec.job.plan import Plan
from jaxrun.text import UNKNOWN_HOST, plural

PROGRAM = (f"{RUNTIME}.programs.collectives",)
INIT_TIMEOUT_S, TIMEOUT_S = 30.0, 120.0  # a doctor does not wait long for a host that is switched off
_PREFIX = ".jaxrun-doctor-"
_SSH_PORT = 22  # a refused connection is an answer, too
_CONNECT_TIMEOUT_S = 2.0
_MOST_AT_ONCE = 64


def examine(plan: Plan, run: Callable[[Plan], int], environ: Mapping[str, str], screen: IO[str]) -> Observation:
    """Run the doctor's job, with its progress on `screen` if that is a terminal. Raises UsageError."""
    facts = {} if plan.launch_command else {0: collect_facts(AgentId(0), {**environ, **plan.job.env})}
    with _run_directory() as (path, in_directory):
        plan = replace(plan, job=replace(plan.job, run_dir=path))
        with _status(screen, plan), _captured() as output:
            run(plan)
            output.seek(0)
            text = output.read().decode(errors="replace")
        found = read_run_dir(path)
    seen = Observation(
        started_by=plan.launch_command.title if plan.launch_command else "",
        expected_hosts=_named_hosts(plan),
        output=text,
        allocation=_allocation(environ),
        in_directory=in_directory,
        **{**found, "facts": facts or found["facts"]},
    )
    if plan.launch_command is not None and plan.launch_command.engine.explains_itself:
        return seen
    return replace(seen, unreachable=_find_unreachable(seen.silent_hosts))


def _named_hosts(plan: Plan) -> tuple[str, ...]:
    """The hosts that the plan knows by name; some are only counted there, "host 1"."""
    if plan.launch_command is None:
        return ()
    return tuple(host for host in plan.hosts if not host.startswith("-") and " " not in host and host != UNKNOWN_HOST)


def _allocation(environ: Mapping[str, str]) -> Allocation | None:
    with contextlib.suppress(UsageError):
        return read_allocation(environ)
    return None


def _find_unreachable(hosts: Sequence[str]) -> dict[str, str]:
    """Return by name why hosts on which nothing has started cannot be reached from here."""
    with ThreadPoolExecutor(max(1, min(len(hosts), _MOST_AT_ONCE))) as threads:
        reasons = threads.map(_why_unreachable, hosts)
        return {host: reason for host, reason in zip(hosts, reasons, strict=True) if reason}


def _why_unreachable(host: str) -> str:
    try:
        socket.create_connection((host, _SSH_PORT), timeout=_CONNECT_TIMEOUT_S).close()
    except ConnectionRefusedError:
        return ""
    except socket.gaierror:
        return "its name does not resolve"
    except TimeoutError:
        return "no answer"
    except OSError as error:
        return error.strerror or str(error)
    return ""


@contextlib.contextmanager
def _run_directory() -> Iterator[tuple[Path, bool]]:
    """Yield a temporary directory for the job's files, and whether it is in the current directory.

    It is elsewhere if nothing can be written here.
    """
    here = not try_to_write(os.getcwd())
    path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=os.getcwd() if here else "/dev/shm"))
    try:
        yield path, here
    finally:
        with contextlib.suppress(OSError):
            remove_directory(path)


@contextlib.contextmanager
def _captured() -> Iterator[IO[bytes]]:
    """Redirect the output of this process and its children to a file."""
    kept = os.dup(1), os.dup(2)
    with open(os.memfd_create("doctor"), "w+b") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        try:
            yield file
        finally:
            for descriptor, copy in enumerate(kept, 1):
                os.dup2(copy, descriptor)
                os.close(copy)


@contextlib.contextmanager
def _status(screen: IO[str], plan: Plan) -> Iterator[None]:
    """Show what is being done, on a terminal, until the block ends."""
    if not screen.isatty():
        yield
        return
    where = f"by {plan.launch_command.title}" if plan.launch_command else "on this machine"
    screen.write(f"examining {plural(len(plan.workers), 'process')} {where} …")
    screen.flush()
    try:
        yield
    finally:
        screen.write("\r\x1b[K")
        screen.flush()
