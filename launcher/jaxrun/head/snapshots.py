"""Looks at ranks that run: on demand, to decide whether they are stuck, and whether they are still in step.

Each look has a purpose, which its answer carries; what is seen may end the job.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from jaxrun.diagnosis.stacks import STACKS_FILE
from jaxrun.head.actions import Action, EndReason, JobOutcome, PrintLine, WriteFile
from jaxrun.head.divergence_detector import DivergenceDetector
from jaxrun.head.early_exit import EarlyExitDetector
from jaxrun.head.events import TimeLimits
from jaxrun.head.stall import StallDetector
from jaxrun.protocol.agent_messages import SnapshotPurpose, SnapshotReply
from jaxrun.verdict.snapshot import Snapshot

_NOTHING_YET = "no rank has stacks to show yet"


@dataclass(frozen=True, slots=True)
class SnapshotResult:
    """What a look has led to: things to do, and why the job ends, if it does."""

    actions: tuple[Action, ...] = ()
    ending: JobOutcome | None = None


class Snapshots:
    """Those of one job. Times are seconds since the epoch."""

    def __init__(self, hosts: Mapping[int, str], limits: TimeLimits, lockstep: DivergenceDetector, now: float) -> None:
        self._hosts = hosts
        self._limits = limits
        self._lockstep = lockstep
        self._early: EarlyExitDetector | None = None
        self._stall: StallDetector | None = None
        self._alarms: dict[SnapshotPurpose, float] = {}
        if limits.job is not None:
            self._alarms[SnapshotPurpose.TIMEOUT] = now + limits.job
        self._over = False

    def start(self, now: float) -> None:
        """The program runs."""
        if self._limits.stall:
            self._stall = StallDetector(self._limits.stall, now)
            self._alarms[SnapshotPurpose.STALL] = now + self._stall.check_interval_s
        self._set(SnapshotPurpose.LOCKSTEP, self._lockstep.next_read_s(), now)

    def start_early_exit_checks(self, now: float) -> None:
        """Somebody's program has ended while others work."""
        if self._early is None:
            self._early = EarlyExitDetector(now, sees_calls=self._lockstep.is_enabled)
            self._alarms[SnapshotPurpose.EARLY_EXIT] = now + self._early.next_check_s

    def stop(self) -> None:
        """The job is being ended: no more looks."""
        self._over = True
        self._alarms.clear()

    def deadline(self) -> float | None:
        return min(self._alarms.values(), default=None)

    def pop_due(self, now: float) -> list[SnapshotPurpose]:
        """The purposes of the looks that are to be taken now."""
        due = [purpose for purpose, at in self._alarms.items() if at <= now]
        for purpose in due:
            del self._alarms[purpose]
        return due

    def handle(self, taken: SnapshotReply, finished: Iterable[int], now: float) -> SnapshotResult:
        """What to do about an answer; `finished` are the ranks whose program has ended."""
        judged = self._lockstep.handle_recorders(taken, now)
        if self._over and taken.purpose in (SnapshotPurpose.TIMEOUT, SnapshotPurpose.STALL, SnapshotPurpose.EARLY_EXIT):
            return SnapshotResult()
        match taken.purpose:
            case SnapshotPurpose.SHOW:
                return SnapshotResult((PrintLine(self._look(taken, finished, now).format() or _NOTHING_YET),))
            case SnapshotPurpose.KEEP | SnapshotPurpose.NATIVE:
                return SnapshotResult((WriteFile(STACKS_FILE, self._look(taken, finished, now).to_json()), *judged))
            case SnapshotPurpose.TIMEOUT:
                return SnapshotResult(ending=self._ending(EndReason.TIMEOUT, taken, now))
            case SnapshotPurpose.STALL:
                return self._look_for_stall(taken, finished, now)
            case SnapshotPurpose.EARLY_EXIT:
                return self._look_for_early_exit(taken, finished, now)
            case SnapshotPurpose.LOCKSTEP:
                self._set(SnapshotPurpose.LOCKSTEP, self._lockstep.next_read_s(), now)
        return SnapshotResult(tuple(judged))

    def _look_for_stall(self, taken: SnapshotReply, finished: Iterable[int], now: float) -> SnapshotResult:
        assert self._stall is not None
        stall, idle = self._stall, self._stall.update(taken, now)
        if idle >= stall.limit:
            return SnapshotResult(ending=self._ending(EndReason.STALL, taken, now))
        self._alarms[SnapshotPurpose.STALL] = now + min(stall.check_interval_s, stall.limit - idle)
        if stall.warned or idle < stall.limit / 2:
            return SnapshotResult()
        stall.warned = True
        limit = f"the job is stopped after {stall.limit:g} s of it (--stall-timeout)"
        text = f"no output, no call and no CPU time in any rank for {idle:.0f} s; {limit}"
        return SnapshotResult((PrintLine(f"{text} · {self._look(taken, finished, now).format()}"),))

    def _look_for_early_exit(self, taken: SnapshotReply, finished: Iterable[int], now: float) -> SnapshotResult:
        assert self._early is not None
        left_behind = self._lockstep.left_behind(set(finished)) is not None
        if self._early.check(taken, now, left_behind=left_behind):
            return SnapshotResult(ending=self._ending(EndReason.EARLY_EXIT, taken, now))
        self._alarms[SnapshotPurpose.EARLY_EXIT] = now + self._early.next_check_s
        return SnapshotResult()

    def _ending(self, reason: EndReason, taken: SnapshotReply, now: float) -> JobOutcome:
        return JobOutcome(
            reason,
            (),
            stacks=taken.stacks,
            kernel_waits=taken.kernel_waits,
            flights=dict(self._lockstep.flights),
            decided_at=now,
        )

    def _look(self, taken: SnapshotReply, finished: Iterable[int], now: float) -> Snapshot:
        natives = taken.native_stacks if taken.purpose == SnapshotPurpose.NATIVE else None
        flights = dict(self._lockstep.flights)
        return Snapshot(now, self._hosts, taken.stacks, taken.kernel_waits, flights, tuple(sorted(finished)), natives)

    def _set(self, purpose: SnapshotPurpose, pause: float | None, now: float) -> None:
        if pause is not None and not self._over:
            self._alarms[purpose] = now + pause
