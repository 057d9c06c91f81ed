"""How a job and each of its workers ended: the values from which root cause and verdict are derived."""

from __future__ import annotations

import enum
import signal
from collections.abc import Mapping

from msgspec import Struct, field

from jaxrun.analysis.diagnosis.helpers import Helpers, LostPoolWorker
from jaxrun.analysis.lockstep.divergence import Divergence
from jaxrun.analysis.lockstep.straggler import Straggler
from jaxrun.protocol.agent_id import AgentId
from jaxrun.protocol.flight import Flight
from jaxrun.protocol.nccl_report import NcclReport
from jaxrun.protocol.worker_messages import Failed, ThreadFailed
from jaxrun.spec.job.fault_spec import KILL, PAUSE, FaultSpec
from jaxrun.text import format_signal

# What each kind of fault does to a rank: completes "is …", "was …" or "could not be …".
FAULT_PARTICIPLES = {
    KILL: f"killed by {format_signal(signal.SIGKILL)}",
    PAUSE: f"stopped by {format_signal(signal.SIGSTOP)}",
}


class InjectedFault(Struct, frozen=True):
    """A fault that was injected into a worker.

    kind:          one of FAULT_KINDS (job/fault_spec.py)
    requested_by:  "--chaos" or "its gang"
    """

    kind: str
    time: float
    requested_by: str

    def __str__(self) -> str:
        """Write, for example, `killed by SIGKILL (9), as --chaos asked`."""
        return f"{FAULT_PARTICIPLES[self.kind]}, as {self.requested_by} asked"


class WorkerOutcome(Struct, frozen=True):
    """How a worker ended, as far as the launcher knew when it collected the outcomes.

    time:                when the launcher first saw that the worker was ending; seconds since the epoch
    status:              exit status as `subprocess` gives it, negative for a signal; None while the worker lives
    failure:             the exception or status that the worker itself reported
    thread_failures:     exceptions that ended threads of the program, in order
    lost_pool_workers:   workers of its process pools that died, in order
    crash_dump:          what Python's fault handler wrote at a fatal signal
    stderr_tail:         the last lines of the worker's stderr
    killed_by_launcher:  the launcher sent the fatal signal, so the worker is never a root cause
    finished:            the program had ended with status 0 before the worker did
    out_of_memory:       what the kernel log says about the worker's death, if memory was short
    lost_reason:         why the worker's agent cannot be reached any more; how the worker ended is then unknown
    injected_faults:     faults that --chaos or the gang injected into the worker
    was_survived:        the others had gone on without the worker when the job failed (--keep-survivors)
    """

    rank: int
    host: str
    time: float
    status: int | None
    failure: Failed | None = None
    thread_failures: tuple[ThreadFailed, ...] = ()
    lost_pool_workers: tuple[LostPoolWorker, ...] = ()
    crash_dump: str = ""
    stderr_tail: str = ""
    killed_by_launcher: bool = False
    finished: bool = False
    out_of_memory: str = ""
    lost_reason: str = ""
    injected_faults: tuple[InjectedFault, ...] = ()
    was_survived: bool = False

    @property
    def ended_well(self) -> bool:
        """Whether the program ended with status 0, whatever ended the worker afterwards."""
        return self.finished or self.status == 0

    @property
    def deadly_fault(self) -> InjectedFault | None:
        """The injected kill that the worker died of; None if it did not."""
        if self.status != -signal.SIGKILL or self.killed_by_launcher:
            return None
        return next((fault for fault in self.injected_faults if fault.kind == KILL), None)

    @property
    def disruptive_fault(self) -> InjectedFault | None:
        """The injected pause, which leaves the worker alive but may break connections; None if there was no pause."""
        return next((fault for fault in self.injected_faults if fault.kind == PAUSE), None)


class RankReturn(Struct, frozen=True):
    """How a rank has failed that was started again, and took part again at `back_at` (seconds since the epoch)."""

    worker: WorkerOutcome
    back_at: float

    @property
    def seconds(self) -> float:
        return self.back_at - self.worker.time


class EndReason(enum.StrEnum):
    """Why a job ended."""

    OK = "ok"
    FAILED = "failed"  # a worker failed
    REFUSED = "refused"  # the processes differ from each other, or from what was asked for
    USAGE = "usage"  # the platform that the agents found does not allow what was asked for
    UNAVAILABLE = "unavailable"  # something that the job needs could not be started or reached
    TIMEOUT = "timeout"
    STALL = "stall"
    DIVERGED = "diverged"  # ended because the ranks were found out of step
    OUT_OF_STEP = "out-of-step"  # all programs ended well, but the ranks were found out of step
    EARLY_EXIT = "early-exit"  # some ranks have finished, and the others wait for them
    INTERRUPTED = "interrupted"
    PREEMPTED = "preempted"  # told to stop, and all ranks ended well afterwards; with --requeue, or were killed
    GROWN = "grown"  # told to stop because more hosts are available


_STOPPED = (EndReason.PREEMPTED, EndReason.INTERRUPTED)


class JobOutcome(Struct, frozen=True):
    """How the job ended, as decided by the head; the verdict is made from it.

    workers:                         each worker's outcome
    text, traceback:                 details of `reason`
    stacks, kernel_waits, flights, helpers:   by rank, what the snapshot showed that led to the end
    late_stacks, late_waits:         by rank, where ranks were that had not ended in time after a signal
    platform:                        of the devices in that snapshot; empty if irrelevant
    nccl:                            what NCCL's own service answered then; None if it was not asked
    decided_at, run_at:              when the end was decided, and when the program started; seconds since the epoch
    divergences:                     the calls in which the ranks were seen out of step, the first one first
    unheard:                         no rank listens to the signal that ended the job
    unanswered:                      ranks that were killed, but whose end nobody reported in time
    lost:                            ranks without which the others went on (--keep-survivors)
    returns:                         ranks that were lost and came back while the others went on, in order
    started_again:                   how many times lost ranks were started again alone, whether they came back or not
    is_explained:                    the screen has shown who waits for whom, as these stacks show it
    shown_divergences:               the divergences that have been printed already
    raised_divergences:              the divergences that ranks were told about and raise as an exception
    straggler:                       the rank or host that slowed the others down, if there was one
    stop_requested:                  someone also asked to stop the job
    faults_left:                     the faults of --chaos that were not injected
    failed_checks:                   the reason why a host failed --host-check, by the rank that checked it
    lost_early:                      why a host was lost that had reported, but not started its workers, by rank
    drained:                         agents whose pods go away, if nothing else ended the job; 0 for the head's pod
    not_back:                        the ranks of the hosts for which the attempt has waited in vain (--wait-hosts)
    saved_step:                      the last step whose checkpoint the program reported as complete
    uses_mpi:                        whether the program uses the MPI that started its ranks
    """

    reason: EndReason
    workers: tuple[WorkerOutcome, ...] = ()
    text: str = ""
    traceback: str = ""
    stacks: Mapping[int, str] = field(default_factory=dict)
    kernel_waits: Mapping[int, str] = field(default_factory=dict)
    late_stacks: Mapping[int, str] = field(default_factory=dict)
    late_waits: Mapping[int, str] = field(default_factory=dict)
    flights: Mapping[int, Flight] = field(default_factory=dict)
    platform: str = ""
    helpers: Mapping[int, Helpers] | None = None
    signum: int = 0
    decided_at: float | None = None
    run_at: float | None = None
    divergences: tuple[Divergence, ...] = ()
    unheard: bool = False
    unanswered: tuple[int, ...] = ()
    lost: tuple[int, ...] = ()
    returns: tuple[RankReturn, ...] = ()
    started_again: int = 0
    is_explained: bool = False
    shown_divergences: tuple[Divergence, ...] = ()
    raised_divergences: tuple[Divergence, ...] = ()
    straggler: Straggler | None = None
    stop_requested: bool = False
    faults_left: tuple[FaultSpec, ...] = ()
    failed_checks: Mapping[int, str] = field(default_factory=dict)
    lost_early: Mapping[int, str] = field(default_factory=dict)
    drained: frozenset[AgentId] = frozenset()
    not_back: tuple[int, ...] = ()
    saved_step: int | None = None
    uses_mpi: bool = False
    nccl: NcclReport | None = None

    @property
    def waits_for_pods(self) -> bool:
        """Whether the attempt is over because pods go away, whose places others take; the head's pod stays."""
        return self.reason in _STOPPED and bool(self.drained) and AgentId(0) not in self.drained

    @property
    def head_leaves(self) -> bool:
        """Whether the pod of the head goes away, so that the job continues with the head of another pod."""
        return self.reason in _STOPPED and AgentId(0) in self.drained
