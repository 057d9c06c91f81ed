"""How a job ended, as the head sees it: the value from which the verdict is made."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from jaxrun.analysis.diagnosis.straggler import Straggler
from jaxrun.analysis.diagnosis.worker_outcome import WorkerOutcome
from jaxrun.analysis.lockstep.divergence import Divergence
from jaxrun.protocol.flight import Flight
from jaxrun.spec.job.fault_spec import FaultSpec


class EndReason(enum.StrEnum):
    """Why a job ended."""

    OK = "ok"
    FAILED = "failed"  # a worker failed
    REFUSED = "refused"  # the processes are not those that were asked for, or not alike
    USAGE = "usage"  # what was asked for is not possible on the platform that the agents have found
    UNAVAILABLE = "unavailable"  # something that the job needs could not be started or reached
    TIMEOUT = "timeout"
    STALL = "stall"
    EARLY_EXIT = "early-exit"  # some ranks have finished, and the others wait for them
    INTERRUPTED = "interrupted"
    PREEMPTED = "preempted"  # told to stop, and all ranks ended well after it; with --requeue, or were killed


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """How the job ended: the head's last word, from which the verdict is made.

    workers:                         how each of them ended
    text, traceback:                 what is to be said about `reason`
    stacks, kernel_waits, flights:   by rank, what the snapshot showed that led to the end
    fork_places:                     by rank, where its program had forked
    decided_at, run_at:              when the end was decided, and when the program was started
    divergences:                     the calls in which the ranks were seen out of step, the first one first
    unheard:                         nobody in the job listens to the signal that ended it
    unanswered:                      the ranks that were killed, but whose end nobody has reported in time
    shown_divergences:               those of them that have been printed already
    raised_divergences:              those that ranks were told of, which they then raise as an exception
    straggler:                       the rank or host that held the others up, if one did
    stop_requested:                  somebody has asked for the end, too
    faults_left:                     the faults of --chaos that were not injected
    saved_step:                      the last step of which the program has said that its checkpoint is complete
    """

    reason: EndReason
    workers: tuple[WorkerOutcome, ...] = ()
    text: str = ""
    traceback: str = ""
    stacks: Mapping[int, str] = field(default_factory=dict)
    kernel_waits: Mapping[int, str] = field(default_factory=dict)
    flights: Mapping[int, Flight] = field(default_factory=dict)
    fork_places: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    signum: int = 0
    decided_at: float | None = None
    run_at: float | None = None
    divergences: tuple[Divergence, ...] = ()
    unheard: bool = False
    unanswered: tuple[int, ...] = ()
    shown_divergences: tuple[Divergence, ...] = ()
    raised_divergences: tuple[Divergence, ...] = ()
    straggler: Straggler | None = None
    stop_requested: bool = False
    faults_left: tuple[FaultSpec, ...] = ()
    saved_step: int | None = None
