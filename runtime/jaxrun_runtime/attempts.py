"""attempt: which of several attempts to run the job this is."""

from __future__ import annotations

import os
from dataclasses import dataclass

from jaxrun.protocol.env import WorkerEnv
from jaxrun.protocol.names import JOB_ID


@dataclass(frozen=True, slots=True)
class AttemptInfo:
    """One attempt to run the job.

    number:  from 1
    size:    its processes, which may be fewer than in the attempt before
    reason:  in one line, why the attempt before it ended; empty in the first
    """

    number: int
    size: int
    reason: str


def attempt() -> AttemptInfo:
    """The attempt that this process is of; the first of one process without jaxrun."""
    if JOB_ID not in os.environ:
        return AttemptInfo(1, 1, "")
    env = WorkerEnv.from_env(os.environ)
    return AttemptInfo(env.attempt, env.size, env.restart_reason)
