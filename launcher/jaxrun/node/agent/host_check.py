"""Runs the command of --host-check on this host, before the workers of an attempt start."""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import IO

from jaxrun.node.agent.process_tree import descendants, kill_all
from jaxrun.node.forkserver.client import start_process
from jaxrun.protocol.names import JOB_ID
from jaxrun.protocol.probe_messages import CheckHost, HostChecked
from jaxrun.spec.job.environment import inherited_job_variables
from jaxrun.text import format_status

_OUTPUT_BYTES = 2**16  # that are kept, of the end
_MAX_LINE = 300  # characters
_POLL_S = 0.02
_KILL_S = 2.0  # for what a sick driver holds in the kernel


def check_host(
    order: CheckHost, environ: Mapping[str, str], job_id: str, is_stopped: Callable[[], bool]
) -> HostChecked | None:
    """Run the command to its end; nothing that it has started is left. None if `is_stopped` before.

    `environ` is this process's own: the command gets of it what the ranks get.
    """
    unset = inherited_job_variables(environ)
    kept = {name: value for name, value in environ.items() if name not in unset}
    before, until, ended = descendants(os.getpid()), time.monotonic() + order.timeout, 0
    try:
        with tempfile.TemporaryFile() as output, open(os.devnull) as nothing:
            streams = (nothing.fileno(), output.fileno(), output.fileno())
            env = {**kept, **order.environment, JOB_ID: job_id}
            pid = start_process(("/bin/sh", "-c", order.command), env, streams)
            while not ended and time.monotonic() < until:
                if is_stopped():
                    return None
                time.sleep(_POLL_S)
                ended, status = os.waitpid(pid, os.WNOHANG)
            text = _read_end(output)
    except OSError as error:
        return HostChecked(order.rank, f"could not be run: {error.strerror}")
    finally:
        kill_all(_KILL_S, keep=before)
    if ended and status == 0:
        return HostChecked(order.rank, output=text)
    how = format_status(os.waitstatus_to_exitcode(status), "was ") if ended else f"did not end in {order.timeout:g} s"
    last = re.sub(r"[^ -~\u00a0-\uffff]", "?", (text.splitlines() or [""])[-1])[:_MAX_LINE]
    return HostChecked(order.rank, f"{how}: {last}" if last else how, text)


def _read_end(output: IO[bytes]) -> str:
    output.seek(max(0, output.seek(0, os.SEEK_END) - _OUTPUT_BYTES))
    return output.read().decode(errors="replace").strip()
