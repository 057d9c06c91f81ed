"""Takes snapshots of running ranks: on request, to find hangs and divergence, and when --timeout is over."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from jaxrun.analysis.diagnosis.job_outcome import EndReason, JobOutcome
from jaxrun.analysis.diagnosis.snapshot import Snapshot
from jaxrun.controller.head.attempt import Attempt
from jaxrun.controller.head.divergence_detector import DivergenceDetector
from jaxrun.controller.head.early_exit_detector import EarlyExitDetector
from jaxrun.controller.head.stall_detector import StallDetector
from jaxrun.controller.head.straggler_detector import StragglerDetector
from jaxrun.controller.head.timeouts import Timeout
from jaxrun.protocol.requests import Answer, AnswerState, StacksRequest
from jaxrun.protocol.snapshot_messages import SnapshotPurpose, SnapshotReply
from jaxrun.records.event_log.actions import (
    Action,
    AnswerRequests,
    PrintSnapshot,
    PrintStallNotice,
    TakeSnapshot,
)

_PURPOSE_OF_TIMEOUT: Mapping[Timeout, SnapshotPurpose] = {
    Timeout.JOB: SnapshotPurpose.TIMEOUT,
    Timeout.EARLY_EXIT_CHECK: SnapshotPurpose.EARLY_EXIT,
    Timeout.DIVERGENCE_CHECK: SnapshotPurpose.LOCKSTEP,
}


@dataclass(frozen=True, slots=True)
class SnapshotResult:
    """What follows from a snapshot: actions, and how the job ends if it does."""

    actions: tuple[Action, ...] = ()
    outcome: JobOutcome | None = None


class Snapshots:
    """Times are seconds since the epoch."""

    def __init__(
        self,
        attempt: Attempt,
        divergence: DivergenceDetector,
        stragglers: StragglerDetector,
        can_answer: Callable[[int], bool],
    ) -> None:
        """`can_answer`: whether a rank has a fault handler, without which the signal for its stack would kill it."""
        self._attempt = attempt
        self._divergence = divergence
        self._stragglers = stragglers
        self._can_answer = can_answer
        self._asked: dict[SnapshotPurpose, list[str]] = {}  # the requests that wait for a snapshot
        self._early_exit: EarlyExitDetector | None = None
        self._stall: StallDetector | None = None

    def start_checks(self, platform: str, now: float) -> None:
        """The program runs on devices of this platform."""
        limits = self._attempt.limits
        self._stall = StallDetector(now, limit=limits.stall, notice=limits.stall_notice, polls=platform != "cpu")
        if self._stall.is_needed:
            self._attempt.timeouts.start(Timeout.STALL_CHECK, now + self._stall.next_check_s)
        self._schedule_divergence_check(now)

    def hold_stall_clock(self, rank: int) -> None:
        """A person debugs this rank: that the job stands still meanwhile is no stall."""
        if self._stall is not None:
            self._stall.hold(rank)

    def release_stall_clock(self, rank: int) -> None:
        """The rank goes on."""
        if self._stall is not None:
            self._stall.release(rank)

    def start_early_exit_checks(self, now: float) -> None:
        """A rank's program has ended while others work."""
        if self._early_exit is None:
            self._early_exit = EarlyExitDetector(now, has_calls=self._divergence.is_enabled)
            self._attempt.timeouts.start(Timeout.EARLY_EXIT_CHECK, now + self._early_exit.next_check_s)

    def on_timeout(self, timeout: Timeout) -> TakeSnapshot:
        if timeout is Timeout.STALL_CHECK:
            assert self._stall is not None
            return self.take(self._stall.purpose)
        return self.take(_PURPOSE_OF_TIMEOUT[timeout])

    def take(self, purpose: SnapshotPurpose, ranks: Sequence[int] | None = None) -> TakeSnapshot:
        """Ask what `ranks` are doing; without them, all that work."""
        workers = self._attempt.workers
        if ranks is None:
            ranks = workers.live if purpose.recorders_only else workers.working
        return TakeSnapshot(tuple(filter(self._can_answer, ranks)), purpose)

    def handle_request(self, number: str, request: StacksRequest) -> TakeSnapshot:
        """Another process asks where the ranks are."""
        purpose = SnapshotPurpose.NATIVE if request.native else SnapshotPurpose.KEEP
        self._asked.setdefault(purpose, []).append(number)
        return self.take(purpose)

    def show(self, reply: SnapshotReply, now: float, heading: str) -> PrintSnapshot:
        return PrintSnapshot(self._snapshot(reply, now), f"{heading} · ")

    def handle(self, reply: SnapshotReply, now: float) -> SnapshotResult:
        actions = tuple(self._divergence.handle_recorders(reply, now))
        match reply.purpose:
            case SnapshotPurpose.SHOW:
                return SnapshotResult((PrintSnapshot(self._snapshot(reply, now)),))
            case SnapshotPurpose.KEEP | SnapshotPurpose.NATIVE:
                actions = (*actions, *self._stragglers.add(reply.flights, {}, now))
                answer = Answer(AnswerState.DONE, content=self._snapshot(reply, now))
                return SnapshotResult((AnswerRequests(tuple(self._asked.pop(reply.purpose, ())), answer), *actions))
        if not self._attempt.is_healthy:
            return SnapshotResult(actions)
        match reply.purpose:
            case SnapshotPurpose.TIMEOUT:
                return SnapshotResult(outcome=self._outcome(EndReason.TIMEOUT, reply, now))
            case SnapshotPurpose.STALL | SnapshotPurpose.PROGRESS:
                return self._check_progress(reply, now)
            case SnapshotPurpose.EARLY_EXIT:
                return self._check_early_exit(reply, now)
            case SnapshotPurpose.STRAGGLER:
                return SnapshotResult(tuple(self._stragglers.handle_sample(reply, self._divergence.flights)))
            case SnapshotPurpose.LOCKSTEP:
                self._schedule_divergence_check(now)
                actions = (*actions, *self._stragglers.add(reply.flights, reply.core_waits, now))
        return SnapshotResult(actions)

    def _check_progress(self, reply: SnapshotReply, now: float) -> SnapshotResult:
        assert self._stall is not None
        check = self._stall.update(reply, now)
        if check.is_over:
            return SnapshotResult(outcome=self._outcome(EndReason.STALL, reply, now))
        self._attempt.timeouts.start(Timeout.STALL_CHECK, now + self._stall.next_check_s)
        if check.is_half:
            limit = f"the job is stopped after {self._stall.limit:g} s of it (--stall-timeout)"
            heading = f"no progress for {check.idle_s:.0f} s; {limit} · "
            return SnapshotResult((PrintSnapshot(self._snapshot(reply, now), heading),))
        notice = (PrintStallNotice(self._snapshot(reply, now), check.idle_s),) if check.is_told else ()
        return SnapshotResult(notice)

    def _check_early_exit(self, reply: SnapshotReply, now: float) -> SnapshotResult:
        assert self._early_exit is not None
        left_behind = self._divergence.left_behind(self._attempt.workers.live_reported) is not None
        if self._early_exit.check(reply, now, left_behind=left_behind):
            return SnapshotResult(outcome=self._outcome(EndReason.EARLY_EXIT, reply, now))
        self._attempt.timeouts.start(Timeout.EARLY_EXIT_CHECK, now + self._early_exit.next_check_s)
        return SnapshotResult()

    def _schedule_divergence_check(self, now: float) -> None:
        pause = self._divergence.next_read_s()
        if pause is not None:
            self._attempt.timeouts.start(Timeout.DIVERGENCE_CHECK, now + pause)

    def _outcome(self, reason: EndReason, reply: SnapshotReply, now: float) -> JobOutcome:
        return JobOutcome(
            reason,
            stacks=reply.stacks,
            kernel_waits=reply.kernel_waits,
            flights=dict(self._divergence.flights),
            fork_places=self._attempt.workers.fork_places(),
            decided_at=now,
        )

    def _snapshot(self, reply: SnapshotReply, now: float) -> Snapshot:
        return Snapshot(
            time=now,
            hosts=self._attempt.workers.hosts,
            dumps=reply.stacks,
            waits=reply.kernel_waits,
            flights=dict(self._divergence.flights),
            finished=self._attempt.workers.live_reported,
            fork_places=self._attempt.workers.fork_places(),
            straggler=self._stragglers.straggler,
            natives=reply.native_stacks if reply.purpose is SnapshotPurpose.NATIVE else None,
        )
