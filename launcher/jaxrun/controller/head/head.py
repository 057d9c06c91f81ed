"""Decides what is to be done about each event of a job: a state machine without I/O, for one attempt to run it.

Events (messages of workers and agents, exits, signals, time) go in by `handle`; actions come out. When all is over, the
last action is Finish, with a JobOutcome. What that means for people is not decided here but in verdict/.

    STARTING ──all ranks have joined──▶ RUNNING ──all done──▶ LEAVING ──▶ OVER
       └───────────┬─────────────────┬──────┘ └──signal──▶ TERMINATING ──▶ OVER
             first failure    refusal, time limit
                   ▼                 ▼
               SETTLING ─cause─▶ STOPPING ──all have ended──▶ OVER

With --pdb, DEBUGGING comes between SETTLING and STOPPING: the rank that caused the failure has the terminal.
CONCLUDING comes before OVER where flight recorders must be read to say how the ranks diverged, until they are or that
has taken too long.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence

from jaxrun.analysis.diagnosis.outcome import EndReason, JobOutcome
from jaxrun.analysis.diagnosis.root_cause import is_certain
from jaxrun.controller.head import consistency
from jaxrun.controller.head.agent_registry import AgentRegistry
from jaxrun.controller.head.clock_offsets import ClockOffsets
from jaxrun.controller.head.conclusion import Conclusion
from jaxrun.controller.head.debugger import DebuggerTurns
from jaxrun.controller.head.divergence_detector import DivergenceDetector
from jaxrun.controller.head.fault_injection import FaultInjector
from jaxrun.controller.head.head_state import PROGRESS_INTERVAL_S, HeadState, JobPhase, TimeLimits, Timeout
from jaxrun.controller.head.health_checks import HealthChecks
from jaxrun.controller.head.interruption import Interruption
from jaxrun.controller.head.profiles import Profiles
from jaxrun.controller.head.queries import RankQueries
from jaxrun.controller.head.requests import Requests
from jaxrun.controller.head.shutdown import JobShutdown
from jaxrun.controller.head.snapshots import Snapshots
from jaxrun.controller.head.startup import Startup, StartupEvent
from jaxrun.controller.head.straggler_detector import StragglerDetector
from jaxrun.controller.head.worker_table import WorkerReport, WorkerTable
from jaxrun.errors import NotUniformError, UnavailableError, UsageError
from jaxrun.protocol.agent_messages import (
    AgentConnected,
    AgentReport,
    AgentSignalled,
    ClockReply,
    FaultNotInjected,
    StartFailed,
    WorkerExited,
    WorkerSpawned,
)
from jaxrun.protocol.debugger_messages import DebuggerClosed, DebuggerOutput, DebuggerReadRequest, DebuggerRequest
from jaxrun.protocol.flight_file import LOCKSTEP_OFF
from jaxrun.protocol.snapshot_messages import ProgramDetailsReply, RankReply, RecorderSnapshot
from jaxrun.protocol.stop_messages import StopMessageToHead
from jaxrun.protocol.worker_messages import Call, Done, Failed, ProfileEnded
from jaxrun.records.event_log.actions import Action, PrintLine, SignalRanks
from jaxrun.records.event_log.events import (
    AgentLost,
    Event,
    FaultRequested,
    LauncherSignalled,
    ParentExited,
    Requested,
    Resumed,
    SignalRequested,
    TerminalLine,
    Tick,
)
from jaxrun.spec.job.fault_spec import FaultSpec

_END_REASONS = {
    NotUniformError: EndReason.REFUSED,
    UsageError: EndReason.USAGE,
    UnavailableError: EndReason.UNAVAILABLE,
}


class Head:
    """Times are seconds since the epoch, and always passed in."""

    def __init__(
        self,
        hosts: Mapping[int, str],
        expected: consistency.Expected,
        limits: TimeLimits,
        interface: str,
        now: float,
        registry: AgentRegistry | None = None,
        lockstep: str = LOCKSTEP_OFF,
        chaos: Sequence[FaultSpec] = (),
        no_terminal: str = "",
        *,
        requeue: bool = False,
    ) -> None:
        """`hosts` maps each rank to its host; `interface` is the address on rank 0's host for the coordinator;
        `no_terminal` says why no rank can be debugged, if none can; `requeue`: the job is started again after it was
        told to end.

        With a `registry`, hosts, `expected` and `interface` are only known once all agents have reported to it.
        """
        self._workers = WorkerTable(hosts)
        self._state = HeadState(self._workers, limits)
        self._started_at = now
        self._startup = Startup(self._workers.hosts, expected, interface, registry)
        self._queries = RankQueries(has_fault_handler=self._startup.has_hello)
        self._divergence = DivergenceDetector(lockstep, self._workers.hosts, self._queries)
        self._clocks = ClockOffsets(self._workers.hosts) if registry is not None else None
        self._stragglers = StragglerDetector(self._state, self._queries, self._clocks)
        self._snapshots = Snapshots(self._state, self._queries, self._divergence, self._stragglers)
        self._profiles = Profiles(self._state, self._queries, lockstep)
        self._faults = FaultInjector(chaos, self._workers)
        self._shutdown = JobShutdown(self._state, self._divergence.reports, lambda: not self._debugger.refusal)
        self._conclusion = Conclusion(
            self._state, self._shutdown, self._divergence, self._stragglers, self._faults, requeue=requeue
        )
        self._checks = HealthChecks(
            self._state, self._queries, self._snapshots, self._divergence, self._stragglers, self._shutdown.abort
        )
        self._requests = Requests(
            self._state, self._queries, self._snapshots, self._divergence, self._stragglers, self._profiles
        )
        self._debugger = DebuggerTurns(self._state, self._checks, no_terminal)
        self._interruption = Interruption(
            self._state, self._shutdown, self._snapshots, self._divergence, requeue=requeue
        )
        self._state.enter(JobPhase.STARTING, limits.at_start(now))

    @property
    def phase(self) -> JobPhase:
        return self._state.phase

    @property
    def hosts(self) -> Mapping[int, str]:
        """The host of each rank, as far as it is known."""
        return self._workers.hosts

    def deadline(self) -> float | None:
        """When the head wants its next Tick at the latest."""
        if self.phase is JobPhase.OVER:
            return None
        faults = self._faults.deadline() if self.phase is JobPhase.RUNNING else None
        deadlines = (
            self._state.timeouts.deadline(),
            self._queries.deadline(),
            self._divergence.deadline(),
            self._stragglers.deadline(),
            self._debugger.deadline(),
            faults,
        )
        return min((at for at in deadlines if at is not None), default=None)

    def handle(self, event: Event, now: float) -> list[Action]:
        """The actions for one event, to be carried out in their order."""
        if self.phase is JobPhase.OVER:
            return []
        actions = self._on_event(event, now)
        if isinstance(event, (AgentLost, Failed, Done, WorkerExited)):
            actions += self._profiles.remove_rank(event.rank)
        if self.phase is JobPhase.TERMINATING:
            actions += self._debugger.close(now)
        return [*actions, *self._conclusion.conclude_if_over(now)]

    def _on_event(self, event: Event, now: float) -> list[Action]:
        match event:
            case LauncherSignalled():
                return self._interruption.on_signal(event.signum, now)
            case Resumed():
                self._checks.discount(event.paused_s)
                return self._interruption.resume(event.paused_s)
            case SignalRequested():
                ranks = self._workers.working if self.phase is JobPhase.RUNNING else ()
                return [SignalRanks(ranks, event.signum)] if ranks else []
            case FaultRequested():
                inject = self._state.is_healthy
                return self._faults.inject(event.kind, event.ranks, "its gang", now) if inject else []
            case Requested():
                return self._requests.handle(event, now)
            case TerminalLine():
                return self._debugger.handle_line(event.line, now)
            case ParentExited():
                return self._interruption.end_at_once(signal.SIGHUP, now, event.reason)
            case ProgramDetailsReply():
                return self._divergence.reports.handle_details(event)
            case StartFailed():
                return self._on_start_failed(event, now)
            case Tick():
                return self._on_tick(now)
        known = event.rank in self._workers.hosts or isinstance(event, (AgentConnected, AgentReport))
        if not known:  # a report may know why it is not
            text = consistency.describe_unknown_rank(event.rank, len(self._workers.hosts))
            return self._abort(EndReason.REFUSED, text, now)
        if isinstance(event, StartupEvent):
            return self._on_startup(event, now)
        if isinstance(event, WorkerReport):
            self._workers.add_report(event)
            return []
        if isinstance(event, StopMessageToHead):
            return self._state.stop.handle(event)
        return self._on_worker_event(event, now)

    def _on_worker_event(self, event: Event, now: float) -> list[Action]:
        match event:
            case WorkerSpawned():
                self._workers.add_process(event.rank)
                return self._shutdown.kill((event.rank,)) if self.phase is JobPhase.STOPPING else []
            case AgentLost():
                return [*self._shutdown.on_agent_lost(event, now), *self._on_program_ended(now)]
            case AgentSignalled() if self._state.is_healthy:
                return self._interruption.on_signal(event.signum, now)
            case Call():
                return self._divergence.handle_call(event, self._workers.working_count, now)
            case RankReply():
                return self._queries.handle(event, now)
            case RecorderSnapshot():
                self._divergence.handle_recorder(event)
                self._stragglers.handle_recorder(event, now)
            case ClockReply() if self._clocks is not None:
                return self._clocks.handle(event, now)
            case ProfileEnded():
                return self._profiles.handle_ended(event)
            case FaultNotInjected():
                return self._faults.handle_not_injected(event)
            case Failed():
                self._workers.add_failure(event, now)
                handed = self._debugger.remove(event.rank, now)
                return [*handed, *self._shutdown.on_failure(event.rank, now), *self._on_program_ended(now)]
            case Done():
                self._workers.add_done(event.rank, now)
                self._divergence.remove_rank(event.rank, now)
                handed = self._debugger.remove(event.rank, now) + self._state.stop.agree()
                return handed + self._on_program_ended(now)
            case DebuggerClosed():
                return self._debugger.handle(event, now) + self._shutdown.on_debugger_closed(event.rank, now)
            case DebuggerRequest() | DebuggerOutput() | DebuggerReadRequest():
                return self._debugger.handle(event, now)
            case WorkerExited():
                handed = self._debugger.remove(event.rank, now)
                return [*handed, *self._shutdown.on_worker_exited(event, now), *self._on_program_ended(now)]
        return []

    # ---- start-up

    def _on_startup(self, event: StartupEvent, now: float) -> list[Action]:
        if self.phase is not JobPhase.STARTING:
            return []
        try:
            actions = self._startup.handle(event)
        except tuple(_END_REASONS) as error:
            return self._abort(_END_REASONS[type(error)], str(error), now)
        if self._startup.complete:
            self._state.phase = JobPhase.RUNNING
            self._state.run_at = now
            self._state.timeouts.cancel(Timeout.STARTUP, Timeout.PROGRESS)
            actions.append(PrintLine("", status=True))
            self._checks.start(self._startup.platform, now)
            self._faults.start(now)
            self._stragglers.start(now)
            actions += self._probe_clocks(now)
        return actions

    def _on_start_failed(self, event: StartFailed, now: float) -> list[Action]:
        if self.phase is JobPhase.SETTLING and not is_certain(self._workers.outcomes(now)):
            self._state.phase = JobPhase.RUNNING  # what failed since is a consequence of this
        return self._abort(EndReason.UNAVAILABLE, event.text, now, event.traceback)

    def _abort(self, reason: EndReason, text: str, now: float, traceback: str = "") -> list[Action]:
        return self._shutdown.abort(JobOutcome(reason, text=text, traceback=traceback, decided_at=now), now)

    def _on_program_ended(self, now: float) -> list[Action]:
        """A rank's program has ended: with status 0, or after the job was asked to end."""
        if self.phase not in (JobPhase.RUNNING, JobPhase.TERMINATING) or not self._workers.any_live:
            return []
        if not self._workers.any_working or (
            self.phase is JobPhase.TERMINATING and not self._workers.live_not_reported
        ):
            return self._shutdown.leave(now)
        if self.phase is JobPhase.RUNNING:
            self._checks.start_early_exit_checks(now)
        else:
            self._interruption.on_rank_ended(now)
        return []

    # ---- time, snapshots

    def _on_tick(self, now: float) -> list[Action]:
        actions: list[Action] = []
        while (timeout := self._state.timeouts.pop_expired(now)) is not None:
            actions += self._on_timeout(timeout, now)
        if self.phase is JobPhase.RUNNING:
            actions += self._faults.inject_due(now)
        actions += self._queries.expire(now)
        actions += self._stragglers.take_sample(now)
        actions += self._debugger.hand_over(now)
        return [*actions, *self._divergence.handle_timeouts(now)]

    def _on_timeout(self, timeout: Timeout, now: float) -> list[Action]:
        match timeout:
            case Timeout.STARTUP:
                text = self._startup.describe_missing(self._state.limits.init)
                return self._abort(EndReason.UNAVAILABLE, text, now)
            case Timeout.PROGRESS:
                self._state.timeouts.start(timeout, now + PROGRESS_INTERVAL_S)
                is_starting = self.phase is JobPhase.STARTING
                text = self._startup.describe_progress(now - self._started_at) if is_starting else ""
                return [PrintLine(text or self._shutdown.describe_wait(now), status=True)]
            case Timeout.SETTLE | Timeout.ROOT_CAUSE:
                return self._shutdown.settle(now)
            case Timeout.GRACE if self.phase not in (JobPhase.RUNNING, JobPhase.TERMINATING):
                return self._shutdown.on_grace_over(now)
            case Timeout.INTERRUPT | Timeout.GRACE | Timeout.KILL:
                return self._interruption.on_timeout(timeout, now)
            case Timeout.TIME_LIMIT_NEAR:
                left = self._state.limits.save or 0.0
                return self._interruption.begin_stop(f"time limit in {left:g} s", now, left)
            case Timeout.UNANSWERED:
                self._shutdown.give_up_unanswered(now)
                return self._on_program_ended(now)
            case Timeout.CONCLUDE:
                self._divergence.give_up_waiting()
                return []
        clocks = self._probe_clocks(now) if timeout is Timeout.DIVERGENCE_CHECK else []
        return [*clocks, *self._checks.on_timeout(timeout, now)]  # --timeout among them: the stacks come first

    def _probe_clocks(self, now: float) -> list[Action]:
        """Measure the clocks of other hosts, by which calls are compared."""
        return self._clocks.probe(self._workers.live, now) if self._clocks is not None else []
