"""Runs the command of --host-check on this host, before each attempt."""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import IO

from jaxrun.files.procfs import descendants
from jaxrun.node.agent.process_tree import kill_all
from jaxrun.node.forkserver.client import start_process
from jaxrun.protocol.agent_messages import HostCheck
from jaxrun.protocol.names import ATTEMPT, HOST, RANK
from jaxrun.spec.job.environment import inherited_job_variables
from jaxrun.text import format_status

_LINE_BYTES = 4096  # of the end of the output, which contains the last line
_MAX_LINE = 300  # characters
_POLL_S = 0.02
_KILL_S = 2.0  # for processes that a sick driver holds in the kernel


def check_host(
    check: HostCheck, environ: Mapping[str, str], is_stopped: Callable[[], bool], *, host: str, rank: int, attempt: int
) -> str | None:
    """Run the command to its end; no process that it has started is left.

    Returns how it failed, "exited with status 3", with the last line of its output; empty if it succeeded, None if
    `is_stopped` before. `environ` is this process's own; the command gets what the ranks get of it. `rank` is the first
    rank of the host.
    """
    unset = inherited_job_variables(environ)
    env = {name: value for name, value in environ.items() if name not in unset} | dict(check.environment)
    env |= {HOST: host, RANK: str(rank), ATTEMPT: str(attempt)}  # the rank lets guards find it
    before, until, ended = descendants(os.getpid()), time.monotonic() + check.timeout, 0
    try:
        with tempfile.TemporaryFile() as output, open(os.devnull) as nothing:
            streams = (nothing.fileno(), output.fileno(), output.fileno())
            pid = start_process(("/bin/sh", "-c", check.command), env, streams)
            while not ended and time.monotonic() < until:
                if is_stopped():
                    return None
                time.sleep(_POLL_S)
                ended, status = os.waitpid(pid, os.WNOHANG)
            last = _read_last_line(output)
    except OSError as error:
        return f"could not be run: {error.strerror}"
    finally:
        kill_all(_KILL_S, keep=before)
    if ended and status == 0:
        return ""
    how = format_status(os.waitstatus_to_exitcode(status), "was ") if ended else f"did not end in {check.timeout:g} s"
    return f"{how}: {last}" if last else how


def _read_last_line(output: IO[bytes]) -> str:
    output.seek(max(0, output.seek(0, os.SEEK_END) - _LINE_BYTES))
    lines = output.read().decode(errors="replace").strip().splitlines()
    return re.sub(r"[^ -~\u00a0-\uffff]", "?", (lines or [""])[-1])[:_MAX_LINE]
