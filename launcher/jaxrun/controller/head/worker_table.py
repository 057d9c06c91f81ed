"""The head's facts about each worker: whether it is alive, what it reported, how it ended."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from math import inf

from msgspec import Struct, field
from msgspec.structs import replace

from jaxrun.analysis.diagnosis.helpers import LostPoolWorker
from jaxrun.analysis.diagnosis.job_outcome import InjectedFault, RankReturn, WorkerOutcome
from jaxrun.job_events.actions import Action
from jaxrun.protocol.agent_messages import WorkerExited
from jaxrun.protocol.stop_messages import CheckpointSaved
from jaxrun.protocol.worker_messages import Failed, Interrupted, PoolWorkerDied, SignalHandlers, ThreadFailed

WorkerReport = ThreadFailed | PoolWorkerDied | SignalHandlers | Interrupted | CheckpointSaved
_SURVIVED_AGREEMENTS = 2  # one ends the block of live_devices that has failed, and one the next
_SURVIVED_S = 30.0  # a program without live_devices then does not mind the loss
_MAX_POOL_WORKERS = 8  # the last ones that have died are remembered


class _HandledUntil(Struct):
    """Until when a program has handled SIGINT and SIGTERM, as in SignalHandlers: infinity while it does."""

    interrupt: float = -inf
    termination: float = -inf
    own_termination: float = -inf

    def update(self, report: SignalHandlers, now: float) -> None:
        self.interrupt = inf if report.interrupt else min(self.interrupt, now)
        self.termination = inf if report.termination else min(self.termination, now)
        self.own_termination = inf if report.own_termination else min(self.own_termination, now)


class _Worker(Struct):
    incarnation: int = 1
    spawned: bool = False
    finished: bool = False
    killed_by_launcher: bool = False
    asked_to_end: bool = False  # after the failure of another
    ends_at: float | None = None  # when the worker first showed that it was ending
    failure: Failed | None = None
    thread_failures: list[ThreadFailed] = field(default_factory=list)
    lost_pool_workers: deque[LostPoolWorker] = field(default_factory=lambda: deque(maxlen=_MAX_POOL_WORKERS))
    exit: WorkerExited | None = None
    lost_reason: str = ""
    injected_faults: list[InjectedFault] = field(default_factory=list)
    interrupted: bool = False
    handled_until: _HandledUntil = field(default_factory=_HandledUntil)


class _Loss(Struct):
    """A rank without which the others go on. `agreements`: how often live_devices has left it out."""

    time: float
    agreements: int = 0
    was_survived: bool = False


class WorkerTable:
    """All workers of one job by rank; `hosts` maps each rank to its host. Times are seconds since the epoch."""

    def __init__(self, hosts: Mapping[int, str]) -> None:
        self.hosts = dict(hosts)
        self.saved_step: int | None = None  # the last step of which a complete checkpoint was reported
        self.uses_mpi = False  # whether the program uses the MPI that started the ranks
        self._workers = {rank: _Worker() for rank in sorted(hosts)}
        # Kept in addition to the table, so that one event does not cost a walk over all ranks.
        self._live: set[int] = set()
        self._working: set[int] = set()
        self._lost: dict[int, _Loss] = {}
        self._returning: dict[int, WorkerOutcome] = {}  # how the process before has failed
        self._returns: list[RankReturn] = []
        self._uncounted = 0  # starts of ranks whose pods went away
        self._handlers_since = inf  # programs that have handled a signal at this time, or later, count as handling it

    @property
    def live(self) -> tuple[int, ...]:
        """The ranks that have a process."""
        return tuple(sorted(self._live))

    @property
    def live_killed(self) -> tuple[int, ...]:
        """The live ranks that the launcher has killed: their end was not reported yet."""
        return tuple(rank for rank in self.live if self._workers[rank].killed_by_launcher)

    @property
    def working(self) -> tuple[int, ...]:
        """The live ranks whose program has not ended with status 0."""
        return tuple(sorted(self._working))

    @property
    def lost(self) -> tuple[int, ...]:
        """The ranks that have failed while the others went on (--keep-survivors), and are not back."""
        return tuple(sorted(self._lost))

    @property
    def returning(self) -> tuple[int, ...]:
        """The lost ranks that were started again."""
        return tuple(sorted(self._returning))

    @property
    def returns(self) -> tuple[RankReturn, ...]:
        """How ranks have failed that take part again, in the order of their returns."""
        return tuple(self._returns)

    @property
    def started_again(self) -> int:
        """How many times lost ranks were started again, whether they came back or not, as far as that counts."""
        return sum(worker.incarnation - 1 for worker in self._workers.values()) - self._uncounted

    def incarnation(self, rank: int) -> int:
        """Return the number of the rank's process, from 1."""
        return self._workers[rank].incarnation

    @property
    def has_coordinator(self) -> bool:
        """Whether rank 0, which has JAX's coordinator, lives and has not failed."""
        return 0 in self._live and self._workers[0].failure is None

    def is_agent_lost(self, rank: int) -> bool:
        return self._workers[rank].lost_reason != ""

    def start_again(self, rank: int, now: float, *, counts: bool = True) -> None:
        """Note that another process of this lost rank, whose own has ended, is being started."""
        self._uncounted += not counts
        self._returning[rank] = self.outcome(rank, now)
        self._workers[rank] = _Worker(self._workers[rank].incarnation + 1, spawned=True)

    def add_return(self, rank: int, now: float) -> RankReturn:
        """Note that a rank takes part again."""
        self._lost.pop(rank, None)
        self._working.add(rank)
        back = RankReturn(self._returning.pop(rank), now, self.hosts[rank])
        self._returns.append(back)
        return back

    def add_lost(self, rank: int, now: float) -> None:
        """Note that the others go on without this rank, whose process may take a while to end."""
        self._lost.setdefault(rank, _Loss(now))  # a process that did not take part again changes nothing
        self._working.discard(rank)

    def add_agreement(self, ranks: Iterable[int]) -> None:
        """Note that those of these ranks that live have agreed on who they are: live_devices has answered."""
        for rank in self._lost.keys() & set(ranks):
            self._lost[rank].agreements += 1

    def note_survived(self, failed: int, now: float) -> None:
        """Note, as the job fails with this rank, which others were lost so long ago that they are no cause of that."""
        for rank, loss in self._lost.items():
            is_past = loss.agreements >= _SURVIVED_AGREEMENTS or now - loss.time >= _SURVIVED_S
            loss.was_survived = is_past and rank != failed

    def working_of(self, ranks: Iterable[int]) -> set[int]:
        """Return those of these ranks that are working."""
        return self._working.intersection(ranks)

    @property
    def working_count(self) -> int:
        return len(self._working)

    @property
    def any_live(self) -> bool:
        return bool(self._live)

    @property
    def only_rank_0_left(self) -> bool:
        """Whether rank 0 is the only live one, and was not killed."""
        return self._live == {0} and not self._workers[0].killed_by_launcher

    @property
    def live_without_failure(self) -> tuple[int, ...]:
        return tuple(rank for rank in self.live if self._workers[rank].failure is None)

    @property
    def live_reported(self) -> tuple[int, ...]:
        """The live ranks that have reported how their program ended."""
        return tuple(rank for rank in self.live if self._workers[rank].finished or self._workers[rank].failure)

    @property
    def not_working(self) -> tuple[int, ...]:
        """The ranks whose program has ended, or does not run yet, in order."""
        return tuple(r for r, worker in self._workers.items() if r not in self._working or worker.failure is not None)

    @property
    def live_not_reported(self) -> tuple[int, ...]:
        reported = set(self.live_reported)
        return tuple(rank for rank in self.live if rank not in reported)

    @property
    def waiting_for_debugger(self) -> tuple[int, ...]:
        """The live ranks that have failed, and continue once they know whether they are debugged."""
        workers = self._workers
        return tuple(rank for rank in self.live if (failure := workers[rank].failure) and failure.waits_for_debugger)

    @property
    def listening(self) -> tuple[int, ...]:
        """The ranks whose program runs and listens to SIGTERM."""
        workers, since = self._workers, self._handlers_since
        running = (rank for rank in self.working if workers[rank].failure is None)
        return tuple(rank for rank in running if workers[rank].handled_until.termination >= since)

    @property
    def not_interrupted(self) -> tuple[int, ...]:
        """The ranks whose program runs, does not handle SIGINT itself, and has had no KeyboardInterrupt."""
        workers, since = self._workers, self._handlers_since
        running = (r for r in self.working if workers[r].failure is None and not workers[r].interrupted)
        return tuple(rank for rank in running if workers[rank].handled_until.interrupt < since)

    def keep_handlers(self, since: float) -> None:
        """Count each program that has handled a signal at this time, or later, as one that handles it from now on.

        A handler may begin by giving its signal back, to save undisturbed or to let a second signal end the program.
        """
        self._handlers_since = min(self._handlers_since, since)

    def lost_pool_workers(self, rank: int) -> tuple[LostPoolWorker, ...]:
        """Return the last workers of the rank's process pools that have died."""
        return tuple(self._workers[rank].lost_pool_workers)

    def has_worker(self, rank: int) -> bool:
        return self._workers[rank].spawned

    def has_finished(self, rank: int) -> bool:
        """Whether the rank's program has ended with status 0."""
        return self._workers[rank].finished

    def has_ended(self, rank: int) -> bool:
        """Whether the rank's worker has exited, or was lost, so that nobody will know how it exits."""
        worker = self._workers[rank]
        return worker.exit is not None or worker.lost_reason != ""

    def add_process(self, rank: int) -> None:
        self._workers[rank].spawned = True
        if not self.has_ended(rank):
            self._live.add(rank)
            if rank not in self._lost:
                self._working.add(rank)

    def add_done(self, rank: int, now: float) -> None:
        self._workers[rank].finished = True
        self._working.discard(rank)
        self._set_end_time(rank, now)

    def add_failure(self, failure: Failed, now: float) -> None:
        if not self._workers[failure.rank].asked_to_end:
            self._workers[failure.rank].failure = failure
            self._returning.pop(failure.rank, None)
        self._set_end_time(failure.rank, now)

    def add_report(self, report: WorkerReport, now: float) -> list[Action]:
        worker = self._workers[report.rank]
        match report:
            case ThreadFailed():
                worker.thread_failures.append(report)
            case PoolWorkerDied():
                worker.lost_pool_workers.append(LostPoolWorker(now, report.status, report.pid))
            case SignalHandlers():
                worker.handled_until.update(report, now)
            case Interrupted():
                worker.interrupted = True
            case CheckpointSaved():
                self.saved_step = max(report.step, self.saved_step if self.saved_step is not None else report.step)
        return []

    def add_exit(self, event: WorkerExited, now: float) -> None:
        worker = self._workers[event.rank]
        worker.exit = event
        self._remove_process(event.rank)
        if event.status != 0 and worker.failure is None and not worker.killed_by_launcher:
            worker.ends_at = None  # that its program had finished well says nothing about this end
        if event.status != 0 and not worker.killed_by_launcher:
            self._returning.pop(event.rank, None)
        self._set_end_time(event.rank, now)

    def add_loss(self, rank: int, reason: str, now: float, *, by_launcher: bool = False) -> None:
        """Note that nobody will report how this rank's worker ends; `by_launcher`: mpirun or srun ended its agent."""
        worker = self._workers[rank]
        worker.lost_reason = reason
        worker.killed_by_launcher |= by_launcher and worker.failure is None
        self._remove_process(rank)
        self._returning.pop(rank, None)
        if worker.failure is None:
            worker.ends_at = None
        self._set_end_time(rank, now)

    @property
    def handling_sigterm(self) -> tuple[int, ...]:
        """The ranks whose program runs and has a handler of its own for SIGTERM."""
        workers, since = self._workers, self._handlers_since
        return tuple(rank for rank in self.listening if workers[rank].handled_until.own_termination >= since)

    def mark_asked(self, ranks: Iterable[int]) -> None:
        """Note that these ranks were sent SIGTERM: what they report from now on is a consequence."""
        for rank in ranks:
            self._workers[rank].asked_to_end = True
        self.mark_killed(ranks)

    def mark_killed(self, ranks: Iterable[int]) -> None:
        """Note that the launcher kills these ranks; a rank that has reported a failure keeps that as its reason."""
        for rank in ranks:
            self._workers[rank].killed_by_launcher |= self._workers[rank].failure is None

    def add_injected_fault(self, rank: int, fault: InjectedFault) -> None:
        self._workers[rank].injected_faults.append(fault)

    def remove_injected_fault(self, rank: int, kind: str) -> None:
        worker = self._workers[rank]
        worker.injected_faults = [fault for fault in worker.injected_faults if fault.kind != kind]

    def outcomes(self, now: float) -> tuple[WorkerOutcome, ...]:
        """Return all outcomes: of a rank that was started again and has not failed again by itself, the one before."""
        return tuple(self._outcome_before(rank) or self.outcome(rank, now) for rank in self._workers)

    def _outcome_before(self, rank: int) -> WorkerOutcome | None:
        before, loss = self._returning.get(rank), self._lost.get(rank)
        return replace(before, was_survived=loss is not None and loss.was_survived) if before is not None else None

    def outcome(self, rank: int, now: float) -> WorkerOutcome:
        worker, loss = self._workers[rank], self._lost.get(rank)
        return WorkerOutcome(
            rank=rank,
            host=self.hosts[rank],
            time=now if worker.ends_at is None else worker.ends_at,
            status=worker.exit.status if worker.exit else None,
            failure=worker.failure,
            thread_failures=tuple(worker.thread_failures),
            lost_pool_workers=tuple(worker.lost_pool_workers),
            crash_dump=worker.exit.crash_dump if worker.exit else "",
            stderr_tail=worker.exit.stderr_tail if worker.exit else "",
            killed_by_launcher=worker.killed_by_launcher,
            finished=worker.finished,
            out_of_memory=worker.exit.out_of_memory if worker.exit else "",
            lost_reason=worker.lost_reason,
            injected_faults=tuple(worker.injected_faults),
            was_survived=loss is not None and loss.was_survived,
        )

    def _remove_process(self, rank: int) -> None:
        self._live.discard(rank)
        self._working.discard(rank)

    def _set_end_time(self, rank: int, now: float) -> None:
        if self._workers[rank].ends_at is None:
            self._workers[rank].ends_at = now
