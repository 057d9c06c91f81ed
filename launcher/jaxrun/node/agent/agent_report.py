"""An agent's report about itself and its host, from which the head decides what each rank gets."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

from jaxrun.files.own_files import open_own_directory
from jaxrun.files.procfs import boot_id
from jaxrun.node.agent.fabric_probe import collect_fabric_facts
from jaxrun.protocol.addresses import LOOPBACK
from jaxrun.protocol.agent_id import AgentId
from jaxrun.protocol.agent_messages import AgentReport, JobInfo
from jaxrun.protocol.names import LACKS_DIRECTORY, VERSION
from jaxrun.records.rundir.rundir import JOB_FILE
from jaxrun.spec.engines.lookup import launch_id
from jaxrun.spec.job.devices import probe_machine


def make_report(
    size: int,
    address: str,
    head_address: str,
    environ: Mapping[str, str],
    command: tuple[str, ...],
    info: JobInfo,
    agent: AgentId,
) -> AgentReport:
    """Return what this agent is, sees and may use; `command` is the command line that a person typed to start it.

    `address` and `head_address` are the two ends of its connection to the head.
    """
    machine = probe_machine(info.platforms, environ)
    gpus = machine.seen_gpus
    return AgentReport(
        agent=agent,
        size=size,
        command=command,
        host=machine.host,
        boot_id=boot_id(),
        pid=os.getpid(),
        time=time.time(),
        jaxrun_version=VERSION,
        address=address,
        head_address=head_address,
        directory=environ.get(LACKS_DIRECTORY) or os.getcwd(),
        lacks_directory=LACKS_DIRECTORY in environ,
        machine=machine,
        can_write_run_dir=bool(info.run_dir) and _is_of_job(Path(info.run_dir), info.job_id),
        launch_id=launch_id(environ),
        fabric=collect_fabric_facts({**environ, **info.environment}, gpus.ids) if gpus.names else None,
    )


def plain_address(ip: str) -> str:
    """Write an IPv4 address in its usual form, if a socket for both families shows it as an IPv6 address."""
    return ip.removeprefix("::ffff:")


def ssh_address(environ: Mapping[str, str]) -> str:
    """Return the address of this host to which the ssh connected that has started this agent."""
    words = environ.get("SSH_CONNECTION", "").split()  # client's address and port, server's address and port
    return words[2] if len(words) == 4 else LOOPBACK


def _is_of_job(run_dir: Path, job_id: str) -> bool:
    """Whether this is the run directory of the job on this host, too, and writable for this user alone."""
    try:
        directory = open_own_directory(run_dir)
    except OSError:
        return False
    try:
        with open(os.open(JOB_FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=directory)) as file:
            return job_id in file.read() and os.access(".", os.W_OK, dir_fd=directory)
    except (OSError, ValueError):
        return False
    finally:
        os.close(directory)
