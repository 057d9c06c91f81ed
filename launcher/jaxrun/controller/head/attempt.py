"""The state of one attempt to run a job, which the head's state machines share."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from jaxrun.analysis.diagnosis.job_outcome import EndReason, JobOutcome
from jaxrun.controller.head.stop_agreement import StopAgreement
from jaxrun.controller.head.timeouts import JobTimeouts, TimeLimits, Timeout
from jaxrun.controller.head.worker_table import WorkerTable


class JobPhase(enum.Enum):
    """See the diagram in head.py."""

    STARTING = enum.auto()
    RUNNING = enum.auto()
    LEAVING = enum.auto()
    TERMINATING = enum.auto()
    SETTLING = enum.auto()
    DEBUGGING = enum.auto()
    STOPPING = enum.auto()
    CONCLUDING = enum.auto()
    OVER = enum.auto()


@dataclass(slots=True)
class Attempt:
    """`outcome` is what is known of how the job ends; `run_at` is when the program was started, if it was.

    stop_requested:  somebody has asked for the end of the job, be it that it was ending already
    stop:            how the program is asked to stop by itself, which is no end of the job yet
    """

    workers: WorkerTable
    limits: TimeLimits
    timeouts: JobTimeouts = field(default_factory=JobTimeouts)
    phase: JobPhase = JobPhase.STARTING
    outcome: JobOutcome = field(default_factory=lambda: JobOutcome(EndReason.OK))
    run_at: float | None = None
    stop_requested: bool = False
    stop: StopAgreement = field(init=False)

    def __post_init__(self) -> None:
        self.stop = StopAgreement(self.workers)

    @property
    def is_healthy(self) -> bool:
        """Whether nothing has happened yet that ends the job."""
        return self.phase in (JobPhase.STARTING, JobPhase.RUNNING)

    def enter(self, phase: JobPhase, timeouts: Mapping[Timeout, float]) -> None:
        """Begin a phase; of all timeouts only these go on to run."""
        self.phase = phase
        self.timeouts.cancel_all()
        for timeout, at in timeouts.items():
            self.timeouts.start(timeout, at)
