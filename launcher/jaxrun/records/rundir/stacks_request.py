"""Asks a running job where its ranks are: `jaxrun stacks`."""

from __future__ import annotations

import time

from jaxrun.analysis.diagnosis.snapshot import Snapshot
from jaxrun.analysis.diagnosis.stacks import NATIVE_STACKS_TIMEOUT_S
from jaxrun.analysis.verdict import stack_text
from jaxrun.errors import ProtocolError, UnavailableError
from jaxrun.protocol.codec import from_content
from jaxrun.protocol.requests import StacksRequest
from jaxrun.records.rundir.running_job import ANSWER_TIMEOUT_S, RunningJob, ask

_WATCH_INTERVAL_S = 2.0


def format_stacks(snapshot: Snapshot, *, full: bool = False, native: bool = False) -> str:
    """Where all ranks are, in groups; with `full` all frames of each rank, with `native` C frames too."""
    if not snapshot.dumps:
        return "no rank has stacks to show yet"
    frames = stack_text.format_all_frames(snapshot.dumps, snapshot.hosts) if full else ""
    natives = stack_text.format_by_text(snapshot.natives or {}, snapshot.hosts) if native else ""
    return "\n\n".join(filter(None, (stack_text.format_snapshot(snapshot), natives or frames)))


def request_snapshot(job: RunningJob, *, native: bool = False) -> Snapshot:
    """Where all ranks are now; with `native`, with C frames. Raises UnavailableError if no answer comes."""
    timeout = ANSWER_TIMEOUT_S + (NATIVE_STACKS_TIMEOUT_S if native else 0.0)
    answer = ask(job, StacksRequest(native), timeout)
    try:
        return from_content(Snapshot, answer.content)
    except ProtocolError as error:
        raise UnavailableError(f"the launcher's answer cannot be read: {error}") from None


def watch_stacks(job: RunningJob) -> None:
    """Print where the ranks are every few seconds, until the job is over."""
    while job.is_running:
        print(f"{time.strftime('%H:%M:%S')}  {format_stacks(request_snapshot(job))}\n", flush=True)
        time.sleep(_WATCH_INTERVAL_S)
    print(f"the job is over; how it went: jaxrun explain {job.run_dir}")
