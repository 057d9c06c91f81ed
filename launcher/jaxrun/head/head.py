"""Brings a job together and decides how it ends: a state machine without I/O.

It is fed events (messages of the workers, exits, signals, the clock) and answers with actions for the agent.
Everything that affects the decision lives here; what it means for people is weighed in verdict.py.

    STARTING ──all have proved themselves──▶ RUNNING ──all done──▶ LEAVING ──▶ OVER
       └───────────┬─────────────────┬──────────┘ └──signal──▶ TERMINATING ──▶ OVER
             first failure    refusal, time limit
                   ▼                 ▼
               SETTLING ─clear─▶ STOPPING ──all have ended──▶ OVER

Where the ranks' calls leave a question open, CONCLUDING comes before OVER, until it is answered or has waited too long.
"""

from __future__ import annotations

import enum
import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace

from jaxrun.diagnosis.stacks import NATIVE_STACKS_SIGNAL
from jaxrun.errors import NotUniformError, UnavailableError
from jaxrun.head import consistency
from jaxrun.head.actions import Action, EndReason, Finish, JobOutcome, PrintLine, Send, SignalRanks, TakeSnapshot
from jaxrun.head.agent_registry import AgentRegistry
from jaxrun.head.divergence_detector import DivergenceDetector
from jaxrun.head.events import (
    AgentLost,
    Event,
    FaultRequested,
    LauncherSignalled,
    ParentExited,
    SignalRequested,
    TimeLimits,
)
from jaxrun.head.fault_injection import FaultInjector
from jaxrun.head.snapshots import Snapshots
from jaxrun.head.startup import Startup
from jaxrun.head.worker_table import WorkerTable
from jaxrun.job.fault_spec import FaultSpec
from jaxrun.protocol.agent_messages import (
    AgentReport,
    AgentSignalled,
    FaultNotInjected,
    ProgramDetails,
    RecorderSnapshot,
    SnapshotPurpose,
    SnapshotReply,
    StartFailed,
    WorkerExited,
    WorkerSpawned,
)
from jaxrun.protocol.env import STACKS_SIGNAL
from jaxrun.protocol.flight_file import LOCKSTEP_OFF
from jaxrun.protocol.worker_messages import (
    Call,
    CoordinatorReady,
    DeviceReport,
    Done,
    Exit,
    Failed,
    Hello,
    ThreadFailed,
)
from jaxrun.text import format_ranks, format_ranks_on_hosts, plural
from jaxrun.verdict import decide

MISMATCH_REPORTS_WAIT_S = 1.0  # seconds to wait for the others that were told of the same
SETTLE_S = 0.03  # seconds to wait for the cause after the first failure: collateral errors can win the race
ROOT_CAUSE_WAIT_S = 0.5  # seconds to wait for it when all that is known is collateral
CONCLUDE_TIMEOUT_S = 0.8  # seconds that the end may be put off to learn how the ranks fell out of step
PROGRESS = (2.0, 10.0)  # seconds until the start-up says whom it waits for, and between saying so again


class JobPhase(enum.Enum):
    STARTING = enum.auto()
    RUNNING = enum.auto()
    LEAVING = enum.auto()
    TERMINATING = enum.auto()
    SETTLING = enum.auto()
    STOPPING = enum.auto()
    CONCLUDING = enum.auto()
    OVER = enum.auto()


_HEALTHY = (JobPhase.STARTING, JobPhase.RUNNING)
_SNAPSHOT_SIGNALS: Mapping[int, SnapshotPurpose] = {
    signal.SIGQUIT: SnapshotPurpose.SHOW,
    STACKS_SIGNAL: SnapshotPurpose.KEEP,
    NATIVE_STACKS_SIGNAL: SnapshotPurpose.NATIVE,
}


class Head:
    """One job. `hosts` maps each rank to its host; times are seconds since the epoch, always passed in.

    `interface` is the address of rank 0's host at which the coordinator is to listen; a `muster` knows better than it,
    `hosts` and `expected`, once all agents have reported.
    """

    def __init__(
        self,
        hosts: Mapping[int, str],
        expected: consistency.Expected,
        limits: TimeLimits,
        interface: str,
        now: float,
        muster: AgentRegistry | None = None,
        lockstep: str = LOCKSTEP_OFF,
        chaos: Sequence[FaultSpec] = (),
    ) -> None:
        self._workers = WorkerTable(hosts)
        self._startup = Startup(self._workers.hosts, expected, interface, muster)
        self._faults = FaultInjector(chaos, self._workers)
        self._limits = limits
        self._started = now
        self._run_at: float | None = None
        self._phase = JobPhase.STARTING
        self._ending = JobOutcome(EndReason.OK, ())
        self._frozen = False
        self._divergence = DivergenceDetector(lockstep, self._workers.hosts)
        self._snapshots = Snapshots(self._workers.hosts, limits, self._divergence, now)
        self._alarms: dict[str, float] = {"init": now + limits.init, "progress": now + PROGRESS[0]}

    @property
    def phase(self) -> JobPhase:
        return self._phase

    @property
    def hosts(self) -> Mapping[int, str]:
        """The host of each rank, as far as it is known."""
        return self._workers.hosts

    def deadline(self) -> float | None:
        """When the head wants its next Tick at the latest."""
        if self._phase is JobPhase.OVER:
            return None
        chaos = self._faults.deadline() if self._phase is JobPhase.RUNNING else None
        deadlines = (*self._alarms.values(), self._snapshots.deadline(), self._divergence.deadline(), chaos)
        return min((at for at in deadlines if at is not None), default=None)

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take one event; returns what is to be done, in order."""
        if self._phase is JobPhase.OVER:
            return []
        match event:
            case LauncherSignalled():
                return self._on_signal(event.signum, now)
            case SignalRequested() | FaultRequested() | ParentExited():
                return self._on_request(event, now)
            case SnapshotReply():
                return self._on_stacks(event, now)
            case ProgramDetails():
                return self._or_finish(self._divergence.on_described(event), now)
            case StartFailed():
                return self._on_unavailable(event, now)
        rank = getattr(event, "rank", None)
        if rank is None:
            return self._on_time(now)
        if rank not in self._workers.hosts:
            return self._give_up(
                EndReason.REFUSED, consistency.describe_unknown_rank(rank, len(self._workers.hosts)), now
            )
        return self._on_worker(event, now)

    def _on_worker(self, event: Event, now: float) -> list[Action]:
        match event:
            case WorkerSpawned():
                return self._on_spawned(event.rank)
            case AgentReport() | Hello() | CoordinatorReady() | DeviceReport():
                return self._on_start_up(event, now)
            case AgentLost():
                return self._on_lost(event, now)
            case AgentSignalled() if self._phase in _HEALTHY:
                return self._on_signal(event.signum, now)
            case Call():
                return self._divergence.on_call(event, self._workers.working_count, now)
            case RecorderSnapshot():
                self._divergence.on_flown(event)
            case ThreadFailed():
                self._workers.add_thread_failure(event)
            case FaultNotInjected():
                return self._faults.handle_not_injected(event)
            case Failed():
                self._workers.add_failure(event, now)
                return self._on_failure(event.rank, now)
            case Done():
                self._workers.add_done(event.rank, now)
                self._divergence.remove_rank(event.rank, now)
                return self._on_finished(now)
            case WorkerExited():
                return self._on_exit(event, now)
        return []

    # ---- bringing the job together

    def _on_spawned(self, rank: int) -> list[Action]:
        self._workers.add_process(rank)
        return self._kill((rank,)) if self._phase is JobPhase.STOPPING else []

    def _on_start_up(self, event: AgentReport | Hello | CoordinatorReady | DeviceReport, now: float) -> list[Action]:
        if self._phase is not JobPhase.STARTING:
            return []
        try:
            actions = self._startup.handle(event)
        except NotUniformError as error:
            return self._give_up(EndReason.REFUSED, str(error), now)
        except UnavailableError as error:
            return self._give_up(EndReason.UNAVAILABLE, str(error), now)
        if self._startup.complete:
            self._phase = JobPhase.RUNNING
            self._run_at = now
            del self._alarms["init"], self._alarms["progress"]
            self._snapshots.start(now)
            self._faults.start(now)
        return [*actions]

    def _on_unavailable(self, event: StartFailed, now: float) -> list[Action]:
        if self._phase is JobPhase.SETTLING and not decide.is_certain(self._workers.outcomes(now)):
            self._phase = JobPhase.RUNNING  # what was lost since is explained by this
        return self._give_up(EndReason.UNAVAILABLE, event.text, now, traceback=event.traceback)

    def _give_up(self, reason: EndReason, text: str, now: float, traceback: str = "") -> list[Action]:
        if self._phase not in _HEALTHY:
            return []
        self._ending = JobOutcome(reason, (), text=text, traceback=traceback, decided_at=now)
        return self._stop(now, self._workers.live)

    # ---- a worker ends

    def _on_finished(self, now: float) -> list[Action]:
        """Somebody's program has ended well: when all have, they leave, rank 0 and its coordinator last."""
        if self._phase not in (JobPhase.RUNNING, JobPhase.TERMINATING):
            return []
        if self._workers.any_working:
            if self._phase is JobPhase.RUNNING:
                self._snapshots.start_early_exit_checks(now)
            return []
        self._snapshots.stop()
        self._alarms = {"kill": now + self._limits.grace}
        self._phase = JobPhase.LEAVING
        live = self._workers.live
        return [Send(tuple(rank for rank in live if rank != 0) or live, Exit())]

    def _on_exit(self, exited: WorkerExited, now: float) -> list[Action]:
        self._workers.add_exit(exited, now)
        well = exited.status == 0 and self._run_at is not None
        if self._phase in _HEALTHY and not well:
            return self._on_failure(exited.rank, now)
        if self._phase is JobPhase.LEAVING and self._ending.reason is EndReason.OK and not well:
            self._ending = JobOutcome(EndReason.FAILED, (), decided_at=now)
        if not self._workers.any_live:
            return self._finish(now)
        if self._phase in (JobPhase.LEAVING, JobPhase.STOPPING) and self._workers.only_rank_0_left:
            return self._let_rank_0_go()
        return self._settle(now, exited.rank) if self._phase is JobPhase.SETTLING else self._on_finished(now)

    def _on_lost(self, lost: AgentLost, now: float) -> list[Action]:
        if not self._workers.has_worker(lost.rank):
            if self._phase not in _HEALTHY:
                return []
            whose = format_ranks_on_hosts([lost.rank], self._workers.hosts)
            text = f"the agent of {whose} went away before its worker was started"
            return self._give_up(EndReason.UNAVAILABLE, f"{text}: {lost.reason}", now)
        if self._workers.has_ended(lost.rank):
            return []
        self._workers.add_loss(lost, now)
        if self._phase in _HEALTHY:
            return self._on_failure(lost.rank, now)
        if self._phase is JobPhase.LEAVING and self._ending.reason is EndReason.OK:
            self._ending = JobOutcome(EndReason.FAILED, (), decided_at=now)
        if not self._workers.any_live:
            return self._finish(now)
        if self._phase is JobPhase.SETTLING:
            self._alarms["settle"] = now + SETTLE_S  # the other ranks of its host are lost with it
        goes_last = self._phase in (JobPhase.LEAVING, JobPhase.STOPPING) and self._workers.only_rank_0_left
        return self._let_rank_0_go() if goes_last else []

    def _on_failure(self, rank: int, now: float) -> list[Action]:
        """A rank has failed, or is about to: wait a moment for the cause, for it may be another's."""
        if self._phase in _HEALTHY:
            self._phase = JobPhase.SETTLING
            self._ending = JobOutcome(EndReason.FAILED, (), decided_at=now)
            self._snapshots.stop()
            wait = MISMATCH_REPORTS_WAIT_S if self._divergence.was_told(rank) else SETTLE_S
            self._alarms = {"settle": now + wait, "patience": now + ROOT_CAUSE_WAIT_S}
        return self._settle(now, rank) if self._phase is JobPhase.SETTLING else []

    def _settle(self, now: float, rank: int | None = None) -> list[Action]:
        """Stop the others once the cause is known; `rank` is the only one of which more is known than before."""
        if not self._workers.any_live:
            return self._finish(now)
        if (
            rank is not None
            and self._divergence.was_told(rank)
            and not any(map(self._divergence.was_told, self._workers.live_without_failure))
        ):
            self._alarms.pop("settle", None)  # all have said it
        if "settle" in self._alarms:
            return []
        news = self._workers.outcomes(now) if rank is None else (self._workers.outcome(rank, now),)
        if "patience" in self._alarms and not decide.is_certain(news):
            return []
        ends = self._workers.outcomes(now)
        victims = self._workers.live_without_failure
        blamed = format_ranks_on_hosts(decide.culprit_ranks(ends), self._workers.hosts)
        others = f"; stopping {plural(len(victims), 'other')}" if victims else ""
        # Those that have said their last words are running their exit handlers, and have the grace for it.
        wait = len(victims) < len(self._workers.live)
        return [PrintLine(f"{blamed} failed{others}"), *self._stop(now, victims, wait=wait)]

    def _stop(self, now: float, victims: tuple[int, ...], *, wait: bool = False) -> list[Action]:
        """Kill the victims; with `wait`, the other live ranks only when the grace is over.

        Those are running their exit handlers, and JAX would abort them without the coordinator: then rank 0, which
        holds it, is only frozen, and goes last.
        """
        self._phase = JobPhase.STOPPING
        self._snapshots.stop()
        self._alarms = {"kill": now + self._limits.grace} if wait else {}
        if not self._workers.any_live:
            return self._finish(now)
        if wait and self._workers.live == (0,):
            return self._let_rank_0_go()
        if wait and 0 in victims:
            self._frozen = True
            return [SignalRanks((0,), signal.SIGSTOP), *self._kill(tuple(rank for rank in victims if rank != 0))]
        return self._kill(victims)

    def _let_rank_0_go(self) -> list[Action]:
        if 0 not in self._workers.live_reported:
            return self._kill((0,))
        # Its last words may have crossed with the order to freeze it.
        thaw = [SignalRanks((0,), signal.SIGCONT)] if self._frozen else []
        return [*thaw, Send((0,), Exit())]

    def _kill(self, ranks: tuple[int, ...]) -> list[Action]:
        self._workers.mark_killed(ranks)
        return [SignalRanks(ranks, signal.SIGKILL)] if ranks else []

    def _finish(self, now: float) -> list[Action]:
        if self._phase is not JobPhase.CONCLUDING:
            self._phase = JobPhase.CONCLUDING
            self._snapshots.stop()
            self._alarms = {"conclude": now + CONCLUDE_TIMEOUT_S}
            questions = self._divergence.conclude(now, well=self._ending.reason is EndReason.OK)
            if self._divergence.busy:
                return questions
        ends = self._workers.outcomes(now)
        divergence = self._divergence.divergence
        flights = self._ending.flights or dict(self._divergence.flights)
        ending = replace(self._ending, workers=ends, run_at=self._run_at, divergence=divergence, flights=flights)
        ended_well = all(end.finished or end.status == 0 for end in ends)
        if ending.reason is EndReason.INTERRUPTED and ending.signum == signal.SIGTERM and ended_well:
            ending = replace(ending, reason=EndReason.PREEMPTED)
        self._phase = JobPhase.OVER
        self._alarms = {}
        return [*(self._faults.report_remaining() if ending.reason is EndReason.OK else ()), Finish(ending)]

    def _or_finish(self, actions: list[Action], now: float) -> list[Action]:
        """An answer has come: was it the last that the end has waited for?"""
        concluded = self._phase is JobPhase.CONCLUDING and not self._divergence.busy
        return [*actions, *self._finish(now)] if concluded else actions

    # ---- signals, requests, time, stacks

    def _on_signal(self, signum: int, now: float) -> list[Action]:
        if self._phase is JobPhase.CONCLUDING:
            return self._finish(now)
        asked = self._workers.working
        if signum in (signal.SIGUSR1, signal.SIGUSR2):
            return [SignalRanks(asked, signum)] if asked else []
        if signum in _SNAPSHOT_SIGNALS:
            return [self._take_stacks(_SNAPSHOT_SIGNALS[signum])]
        if self._phase in _HEALTHY:
            self._ending = JobOutcome(EndReason.INTERRUPTED, (), signum=signum, decided_at=now)
        if self._phase is not JobPhase.RUNNING:
            return self._stop(now, self._workers.live)
        self._phase = JobPhase.TERMINATING
        self._snapshots.stop()
        self._alarms = {"kill": now + self._limits.grace}
        name = signal.Signals(signum).name
        grace = f"SIGKILL follows in {self._limits.grace:g} s, or at once with Ctrl-C"
        return [
            PrintLine(f"{name}: asked {format_ranks(asked)} to end (SIGTERM); {grace}"),
            SignalRanks(asked, signal.SIGTERM),
        ]

    def _on_request(self, asked: SignalRequested | FaultRequested | ParentExited, now: float) -> list[Action]:
        match asked:
            case SignalRequested():
                ranks = self._workers.working if self._phase is JobPhase.RUNNING else ()
                return [SignalRanks(ranks, asked.signum)] if ranks else []
            case FaultRequested():
                healthy = self._phase in _HEALTHY
                return self._faults.inject(asked.kind, asked.ranks, "its gang", now) if healthy else []
        if self._phase is JobPhase.CONCLUDING:
            return self._finish(now)
        if self._phase in _HEALTHY:
            self._ending = JobOutcome(
                EndReason.INTERRUPTED, (), text=asked.reason, signum=signal.SIGHUP, decided_at=now
            )
        return self._stop(now, self._workers.live)

    def _on_time(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for name in [name for name, at in self._alarms.items() if at <= now]:
            if self._alarms.pop(name, None) is not None:
                actions += self._on_alarm(name, now)
        if self._phase is JobPhase.RUNNING:
            actions += self._faults.inject_due(now)
        actions += [self._take_stacks(purpose) for purpose in self._snapshots.pop_due(now)]
        return self._or_finish([*actions, *self._divergence.handle_timeouts(now)], now)

    def _on_alarm(self, name: str, now: float) -> list[Action]:
        match name:
            case "settle" | "patience":
                return self._settle(now)
            case "kill":
                roster = self._workers
                late = roster.live_reported if self._phase is JobPhase.STOPPING else roster.working or roster.live
                who = format_ranks_on_hosts(late, roster.hosts)
                text = f"{who} did not end within {self._limits.grace:g} s; sent SIGKILL"
                return [PrintLine(text), *self._stop(now, roster.live)]
            case "progress":
                self._alarms[name] = now + PROGRESS[1]
                return [PrintLine(self._startup.describe_progress(now - self._started))]
            case "init":
                return self._give_up(EndReason.UNAVAILABLE, self._startup.describe_missing(self._limits.init), now)
        self._divergence.give_up_waiting()
        return self._finish(now)

    def _take_stacks(self, purpose: SnapshotPurpose) -> TakeSnapshot:
        # Only of those with a fault handler: before its hello, the signal that asks would kill a worker.
        ranks = self._workers.live if purpose.recorders_only else self._workers.working
        return TakeSnapshot(tuple(filter(self._startup.has_hello, ranks)), purpose)

    def _on_stacks(self, taken: SnapshotReply, now: float) -> list[Action]:
        seen = self._snapshots.handle(taken, self._workers.live_reported, now)
        if seen.ending is None or self._phase not in _HEALTHY:
            return self._or_finish([*seen.actions], now)
        self._ending = seen.ending
        return [*seen.actions, *self._stop(now, self._workers.live)]
