"""Asks a running job how far its ranks are, and what they use: `jaxrun top`."""

from __future__ import annotations

from jaxrun.analysis.diagnosis.overview import Overview
from jaxrun.errors import ProtocolError, UnavailableError
from jaxrun.protocol.codec import from_content
from jaxrun.protocol.requests import OverviewRequest
from jaxrun.records.rundir.running_job import RunningJob, ask


def request_overview(job: RunningJob) -> Overview:
    """How far all ranks are now. Raises UnavailableError if no answer comes, UsageError if none can."""
    answer = ask(job, OverviewRequest())
    try:
        return from_content(Overview, answer.content)
    except ProtocolError as error:
        raise UnavailableError(f"the launcher's answer cannot be read: {error}") from None
