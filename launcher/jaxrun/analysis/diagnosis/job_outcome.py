"""How a job and each of its workers ended: the values from which root cause and verdict are derived."""

from __future__ import annotations

import signal
from collections.abc import Hashable, Mapping

from msgspec import Struct, field

from jaxrun.analysis.diagnosis.helpers import LostPoolWorker
from jaxrun.analysis.diagnosis.job_end import End, EndedBySignal, Preempted
from jaxrun.analysis.lockstep.divergence import Divergence
from jaxrun.analysis.lockstep.straggler import Straggler
from jaxrun.protocol.agent_id import AgentId
from jaxrun.protocol.flight import Flight
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
    def lost_with(self) -> Hashable:
        """A key by which to group ranks: those that were lost together, with one host, have the same one."""
        return (self.host, self.lost_reason) if self.lost_reason and self.failure is None else self.rank

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
    """How a rank has failed that was started again, and took part again at `back_at` (seconds since the epoch).

    host:  where its process runs now
    """

    worker: WorkerOutcome
    back_at: float
    host: str

    @property
    def seconds(self) -> float:
        return self.back_at - self.worker.time


class JobOutcome(Struct, frozen=True):
    """How an attempt to run the job ended: why, and the facts of the run. The verdict is made from it.

    hosts:                the host of each rank, as far as it was known
    workers:              each worker's outcome; empty if the head has not run
    run_at:               when the program started; seconds since the epoch
    decided_at:           when the end was decided; None if all programs ended by themselves
    flights:              what the flight recorders held when the end was decided, by rank
    divergences:          the calls in which the ranks were seen out of step, the first one first
    shown_divergences:    the divergences that have been printed already
    raised_divergences:   the divergences that ranks were told about and raise as an exception
    straggler:            the rank or host that slowed the others down, if there was one
    unanswered:           ranks that were killed, but whose end nobody reported in time
    lost:                 ranks without which the others went on (--keep-survivors)
    returns:              ranks that were lost and came back while the others went on, in order
    started_again:        how many times lost ranks were started again, whether they came back or not
    drained:              agents whose pods go away, which has ended the attempt; 0 for the head's pod
    leaving:              agents whose pods go away, without which the others went on (--keep-survivors)
    stop_requested:       someone asked to stop the job, possibly while it was already ending
    saved_step:           the last step whose checkpoint the program reported as complete
    faults_left:          the faults of --chaos that were not injected
    uses_mpi:             whether the program uses the MPI that started its ranks
    """

    end: End
    hosts: Mapping[int, str] = field(default_factory=dict)
    workers: tuple[WorkerOutcome, ...] = ()
    run_at: float | None = None
    decided_at: float | None = None
    flights: Mapping[int, Flight] = field(default_factory=dict)
    divergences: tuple[Divergence, ...] = ()
    shown_divergences: tuple[Divergence, ...] = ()
    raised_divergences: tuple[Divergence, ...] = ()
    straggler: Straggler | None = None
    unanswered: tuple[int, ...] = ()
    lost: tuple[int, ...] = ()
    returns: tuple[RankReturn, ...] = ()
    started_again: int = 0
    drained: frozenset[AgentId] = frozenset()
    leaving: frozenset[AgentId] = frozenset()
    stop_requested: bool = False
    saved_step: int | None = None
    faults_left: tuple[FaultSpec, ...] = ()
    uses_mpi: bool = False

    def is_host_replaced(self, worker: WorkerOutcome) -> bool:
        """Whether another host has taken the place of the one with which this worker was lost."""
        return self.hosts.get(worker.rank, worker.host) != worker.host

    @property
    def waits_for_pods(self) -> bool:
        """Whether the attempt is over because pods go away, whose places others take; the head's pod stays."""
        return isinstance(self.end, EndedBySignal | Preempted) and bool(self.drained) and not self.head_leaves

    @property
    def head_leaves(self) -> bool:
        """Whether the pod of the head goes away, so that the job continues with the head of another pod."""
        return isinstance(self.end, EndedBySignal | Preempted) and AgentId(0) in self.drained
