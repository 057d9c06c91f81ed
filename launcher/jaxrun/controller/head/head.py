"""Decides how to react to each event of a job: a state machine without I/O, for one attempt to run it.

`handle` takes events (messages of workers and agents, exits, signals, time) and returns actions. When everything is
over, the last action is Finish, with a JobOutcome. verdict/ decides what the outcome means for people.

    STARTING ──all ranks have joined──▶ RUNNING ──all done──▶ LEAVING ──▶ OVER
       └───────────┬─────────────────┬──────┘ └──signal──▶ TERMINATING ──▶ OVER
             first failure    refusal, time limit
                   ▼                 ▼
               SETTLING ─cause─▶ STOPPING ──all have ended──▶ OVER

With --pdb or --debug-post-mortem, DEBUGGING comes between SETTLING and STOPPING: the rank that caused the failure has
the terminal, or waits for an editor.
CONCLUDING comes before OVER if flight recorders must be read to find out how the ranks diverged; it ends when they
are read or that has taken too long.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from msgspec.structs import replace

from jaxrun.analysis.diagnosis.job_end import Diverged, HostCheckFailed, Refused, Unavailable, Unsupported
from jaxrun.analysis.diagnosis.root_cause import is_certain
from jaxrun.analysis.lockstep.told_progress import find_told_step
from jaxrun.controller.head.agent_registry import AgentRegistry, HostCheckError
from jaxrun.controller.head.clock_offsets import ClockOffsets
from jaxrun.controller.head.conclusion import Conclusion
from jaxrun.controller.head.consistency import describe_unknown_rank
from jaxrun.controller.head.core_shortage import CoreShortage
from jaxrun.controller.head.debugger_turns import DebuggerTurns
from jaxrun.controller.head.device_orders import DeviceOrders
from jaxrun.controller.head.divergence_detector import DivergenceDetector
from jaxrun.controller.head.editor_debuggers import EditorDebuggers
from jaxrun.controller.head.fault_injection import FaultInjector
from jaxrun.controller.head.head_state import FIRST_PROGRESS_S, PROGRESS_INTERVAL_S, HeadJob, HeadState, JobPhase
from jaxrun.controller.head.health_checks import HealthChecks
from jaxrun.controller.head.host_wait import HostWait
from jaxrun.controller.head.interruption import Interruption, InterruptionEvent
from jaxrun.controller.head.job_shutdown import JobShutdown
from jaxrun.controller.head.leaving_pods import LOST_REASON, LeavingPods
from jaxrun.controller.head.memory_shortages import MemoryShortages
from jaxrun.controller.head.queries import RankQueries
from jaxrun.controller.head.rank_returns import RankReturns
from jaxrun.controller.head.replacement_hosts import ReplacementHosts
from jaxrun.controller.head.requests import RequestEvent, Requests
from jaxrun.controller.head.scale_up import ScaleUp
from jaxrun.controller.head.standstill_detector import StandstillDetector
from jaxrun.controller.head.startup import Startup, StartupEvent
from jaxrun.controller.head.straggler_detector import StragglerDetector
from jaxrun.controller.head.survivors import Survivors
from jaxrun.controller.head.time_accounting import TimeAccounting
from jaxrun.controller.head.timers import Timer
from jaxrun.controller.head.worker_table import WorkerReport, WorkerTable
from jaxrun.errors import NotUniformError, UnavailableError, UsageError
from jaxrun.job_events.actions import Action, PrintLine
from jaxrun.job_events.events import AgentLost, Event, FaultRequested, HostsFound, TerminalLine, Tick
from jaxrun.protocol.agent_messages import (
    AgentConnected,
    AgentReport,
    ClockReply,
    FaultNotInjected,
    MemoryShortage,
    StartFailed,
    WorkerExited,
    WorkerSpawned,
)
from jaxrun.protocol.codec import list_handlers
from jaxrun.protocol.debugger_messages import DebuggerMessage
from jaxrun.protocol.debugpy_messages import DebugpyFromRank
from jaxrun.protocol.flight import ToldStep
from jaxrun.protocol.flight_file import LOCKSTEP_FAIL
from jaxrun.protocol.query_messages import FlightAtEnd, ProgramDetailsReply, RankReply
from jaxrun.protocol.stop_messages import StopEvent
from jaxrun.protocol.survivor_messages import LiveRanksAsked
from jaxrun.protocol.worker_messages import Call, DeviceReport, Done, Failed, Hello, MpiImported

_CHECK_GRACE_S = 10.0  # for agents to report the end of --host-check


Handler = Callable[[Any, float], list[Action]]


class Head:
    def __init__(self, job: HeadJob, now: float, registry: AgentRegistry) -> None:
        """The hosts, and what is expected, are only certain once all agents have reported to the `registry`."""
        options, expected = job.options, job.expected
        self._workers = workers = WorkerTable(job.hosts)
        self._state = state = HeadState(
            workers,
            job.limits,
            options.lockstep,
            options.no_terminal,
            options.requeue,
            options.drains,
            options.post_mortem,
            waits_at_start=options.debug,
        )
        self._started_at = now
        self._agents, self._registry = job.agents, registry
        self._startup = Startup(workers.hosts, expected, registry)
        self._queries = queries = RankQueries(state, has_fault_handler=self._startup.has_hello)
        self._divergence = divergence = DivergenceDetector(state, queries, ends_apart=options.keep_survivors)
        clocks = ClockOffsets(workers.hosts, registry) if options.has_other_clocks else None
        self._stragglers = stragglers = StragglerDetector(state, queries, clocks)
        self._faults = FaultInjector(state, options.chaos)
        orders = DeviceOrders(len(job.hosts))
        most, used = options.returns, options.returns_used
        hosts = ReplacementHosts(state, registry)
        self._returns = returns = RankReturns(state, self._startup, orders, hosts, most=most, used=used)
        kept = options.keep_survivors
        self._survivors = survivors = Survivors(
            state, divergence, returns, orders, hosts, registry.roster, are_kept=kept
        )
        self._shutdown = shutdown = JobShutdown(state, divergence.reports, survivors)
        self._time = TimeAccounting(state)
        self._conclusion = Conclusion(state, shutdown, divergence, stragglers, self._faults, self._time)
        shortage = CoreShortage(state, options.cores, expected.local_devices or 1)
        self._checks = HealthChecks(state, queries, divergence, stragglers, shutdown, self._time, shortage)
        self._standstill = StandstillDetector(state, queries, divergence, shutdown)
        self._scale_up = ScaleUp(state)
        self._wait = HostWait(state, shutdown, registry, now)
        self._editors = EditorDebuggers(state, shutdown)
        self._requests = Requests(state, queries, divergence, stragglers, self._wait, self._editors)
        self._debugger = DebuggerTurns(state, shutdown)
        roster, checks = registry.roster, self._checks
        self._leaving = leaving = LeavingPods(state, survivors, roster, in_pods=options.in_pods and kept)
        self._interruption = Interruption(state, shutdown, queries, divergence, checks, roster, leaving)
        self._handlers = self._make_handlers()
        self._start_clocks(now)

    def _make_handlers(self) -> dict[type, Handler]:
        """Return the handler of each kind of event."""
        table: dict[Any, Handler] = {
            Tick: self._on_tick,
            InterruptionEvent: self._interruption.handle,
            RequestEvent: self._requests.handle,
            HostsFound: self._on_hosts_found,
            FaultRequested: self._faults.handle_request,
            FaultNotInjected: self._faults.handle_not_injected,
            TerminalLine: self._debugger.handle_line,
            DebuggerMessage: self._debugger.handle,
            DebugpyFromRank: self._editors.handle,
            StartupEvent: self._on_startup,
            StartFailed: self._on_start_failed,
            StopEvent: self._state.stop.handle,
            LiveRanksAsked: self._survivors.handle,
            WorkerReport: self._workers.add_report,
            MpiImported: self._on_mpi_imported,
            RankReply: self._queries.handle,
            MemoryShortage: MemoryShortages(self._state, self._queries).handle,
            FlightAtEnd: self._on_recorder,
            ClockReply: self._stragglers.handle_clock,
            Call: self._divergence.handle_call,
            ProgramDetailsReply: self._divergence.reports.handle_details,
            WorkerSpawned: self._on_spawned,
            Failed: self._on_failed,
            Done: self._on_done,
            WorkerExited: self._on_exited,
            AgentLost: self._on_agent_lost,
        }
        return list_handlers(table)

    @property
    def phase(self) -> JobPhase:
        return self._state.phase

    @property
    def is_healthy(self) -> bool:
        """Whether nothing has happened yet that ends the job."""
        return self._state.is_healthy

    @property
    def told_step(self) -> ToldStep | None:
        """The steps that the program has told, as far as the flight recorders were read."""
        return find_told_step(self._state.flights)

    @property
    def hosts(self) -> Mapping[int, str]:
        """The host of each rank, as far as known."""
        return self._workers.hosts

    def deadline(self) -> float | None:
        """The latest time at which the head needs its next Tick."""
        if self.phase is JobPhase.OVER:
            return None
        return self._state.timers.next_at()

    def handle(self, event: Event, now: float) -> list[Action]:
        """Return the actions for one event, in the order in which to execute them."""
        if self.phase is JobPhase.OVER:
            return []
        if (stranger := self._find_stranger(event)) is None:
            actions = self._handlers[type(event)](event, now)
        else:
            actions = self._shutdown.abort(Refused(describe_unknown_rank(stranger, len(self.hosts))), now)
        actions += self._end_if_diverged(now)
        if self.phase is JobPhase.TERMINATING:
            actions += [*self._debugger.close(now), *self._editors.close(now)]
        if not self._state.is_healthy:
            self._time.close(now)
        return [*actions, *self._conclusion.conclude_if_over(now)]

    def _find_stranger(self, event: Event) -> int | None:
        """Return the rank or the agent that an event is about where the job has none such.

        The registry says why it refuses an agent that connects and reports.
        """
        rank, agent = getattr(event, "rank", None), getattr(event, "agent", None)
        if rank is not None and rank not in self._workers.hosts:
            return int(rank)
        if agent is None or isinstance(event, (AgentConnected, AgentReport)) or agent in self._agents:
            return None
        return int(agent)

    def _end_if_diverged(self, now: float) -> list[Action]:
        """End the job at once, with --lockstep fail, if ranks were found out of step."""
        if self._state.lockstep != LOCKSTEP_FAIL or not self._divergence.reports.shown:
            return self._standstill.start_if_diverged(now)
        return self._shutdown.abort(Diverged(), now)

    # ---- start-up

    def _on_startup(self, event: StartupEvent, now: float) -> list[Action]:
        if self.phase is not JobPhase.STARTING:
            if isinstance(event, Hello | DeviceReport) and self._returns.is_under_way(event.rank):
                back = self._returns.handle(event, now)
                return [*back, *(self._stragglers.probe_clocks(now) if isinstance(event, DeviceReport) else ())]
            if isinstance(event, AgentReport):
                self._startup.add_late(event)
                ranks = self._registry.agents.get(event.agent, ())
                return [*self._returns.on_report(event, ranks, now), *self._survivors.answer_waiting(now)]
            return []
        was_waiting = self._wait.is_waiting
        back = self._wait.handle_report(event, now) if isinstance(event, AgentReport) else []
        self._limit_startup(now, anew=was_waiting)
        try:
            actions = [*back, *self._startup.handle(event)]
        except HostCheckError as error:
            return self._shutdown.abort(HostCheckFailed(str(error), failed=error.failed), now)
        except NotUniformError as error:
            return self._shutdown.abort(Refused(str(error)), now)
        except UsageError as error:
            return self._shutdown.abort(Unsupported(str(error)), now)
        except UnavailableError as error:
            return self._shutdown.abort(Unavailable(str(error)), now)
        if self._startup.is_staging:  # however long it takes: an agent that receives nothing any more reports that
            self._state.timers.hold(now, Timer.STARTUP)
        else:
            self._state.timers.resume(now, Timer.STARTUP)
        if not self._startup.complete:
            return actions
        self._state.enter(JobPhase.RUNNING)
        self._state.run_at = now
        self._time.start(now)
        self._state.timers.cancel(Timer.STARTUP, Timer.PROGRESS)
        self._state.platform = self._startup.platform
        self._checks.start(now)
        self._scale_up.start(now)
        self._faults.start(now)
        if self._state.waits_at_start:
            actions = self._editors.hold_start(actions, now)
        return [*actions, PrintLine("", status=True), *self._stragglers.start(now)]

    def _limit_startup(self, now: float, *, anew: bool) -> None:
        """Set the limit of time for the start-up, which does not count while hosts are awaited.

        Each --host-check may last as long as all the rest. `anew`: all the time counts again from now on.
        """
        if self._wait.is_waiting:
            self._state.timers.cancel(Timer.STARTUP)
            return
        if anew:
            self._state.timers.set(Timer.STARTUP, now + self._state.limits.init, self._on_startup_timeout)
        if self._startup.is_checking:
            limit = self._state.limits.init + _CHECK_GRACE_S
            self._state.timers.set(Timer.STARTUP, now + limit, self._on_startup_timeout)

    def _on_start_failed(self, event: StartFailed, now: float) -> list[Action]:
        if event.rank in self._workers.returning:
            return [*self._returns.on_start_failed(event.rank, event.text), *self._survivors.answer_waiting(now)]
        if self.phase is JobPhase.SETTLING and not is_certain(self._workers.outcomes(now)):
            self._state.enter(JobPhase.RUNNING)  # failures from now on are consequences of this
        return self._shutdown.abort(Unavailable(event.sentence, event.traceback), now)

    # ---- workers start, tell and end

    def _on_spawned(self, event: WorkerSpawned, now: float) -> list[Action]:
        self._workers.add_process(event.rank)
        is_too_late = event.rank in self._workers.returning and self.phase is not JobPhase.RUNNING
        return self._shutdown.kill((event.rank,)) if self.phase is JobPhase.STOPPING or is_too_late else []

    def _on_mpi_imported(self, event: MpiImported, now: float) -> list[Action]:
        is_known, self._workers.uses_mpi = self._workers.uses_mpi, True
        return [] if is_known else self._wait.handle_mpi()

    def _on_recorder(self, event: FlightAtEnd, now: float) -> list[Action]:
        self._state.flights[event.rank] = event.flight
        self._stragglers.handle_recorder(event, now)
        return []

    def _on_failed(self, event: Failed, now: float) -> list[Action]:
        self._workers.add_failure(event, now)
        handed = self._remove_debugger(event.rank, now)
        asked = self._shutdown.on_asked_ended(event.rank, now, finished=False)
        return [*handed, *asked, *self._shutdown.on_failure(event.rank, now), *self._on_program_ended(event.rank, now)]

    def _on_done(self, event: Done, now: float) -> list[Action]:
        self._workers.add_done(event.rank, now)
        self._divergence.on_done(event.rank, now)
        handed = self._remove_debugger(event.rank, now)
        asked = self._shutdown.on_asked_ended(event.rank, now, finished=True)
        handed += self._survivors.on_done(event.rank)
        return [*handed, *asked, *self._on_program_ended(event.rank, now)]

    def _on_exited(self, event: WorkerExited, now: float) -> list[Action]:
        handed = self._remove_debugger(event.rank, now)
        ended = [*self._shutdown.on_worker_exited(event, now), *self._on_program_ended(event.rank, now)]
        return [*handed, *ended, *self._returns.on_exited(event.rank, now)]

    def _remove_debugger(self, rank: int, now: float) -> list[Action]:
        return [*self._debugger.remove(rank, now), *self._editors.remove(rank, now)]

    def _on_agent_lost(self, event: AgentLost, now: float) -> list[Action]:
        if self._wait.handle_lost(event, now):
            self._limit_startup(now, anew=False)
            return []
        ranks = self._registry.agents.get(event.agent, ())
        if event.agent in self._state.leaving:
            event = replace(event, reason=LOST_REASON)
        handed = [action for rank in ranks for action in self._remove_debugger(rank, now)]
        lost = self._shutdown.on_agent_lost(event, ranks, now, was_there=self._startup.has_all_agents)
        lost += self._survivors.on_agent_lost(ranks, now)
        ended = [action for rank in ranks for action in self._on_program_ended(rank, now)]
        self._state.leaving.discard(event.agent)
        return [*handed, *lost, *ended]

    def _on_program_ended(self, rank: int, now: float) -> list[Action]:
        """Handle the end of a rank's program, successful or not."""
        told = [*self._survivors.on_ended(rank, now), *self._leaving.on_ended(rank, now)]
        if self.phase in (JobPhase.RUNNING, JobPhase.TERMINATING):
            told += self._state.stop.advance()
        return [*told, *self._leave_if_all_ended(now), *self._requests.remove_rank(rank, now)]

    def _leave_if_all_ended(self, now: float) -> list[Action]:
        if self.phase is JobPhase.TERMINATING:
            return self._interruption.on_rank_ended(now)
        if self.phase is not JobPhase.RUNNING or not self._workers.any_live:
            return []
        if not self._workers.working_count:
            return self._shutdown.leave(now)
        if not self._survivors.are_kept:
            self._checks.start_early_exit_checks(now)
        return []

    # ---- time

    def _start_clocks(self, now: float) -> None:
        """Set the timers that run from the start of the job."""
        limits, timers = self._state.limits, self._state.timers
        timers.set(Timer.PROGRESS, now + FIRST_PROGRESS_S, self._print_progress)
        if limits.job is not None:
            timers.set(Timer.JOB, now + limits.job, self._checks.on_job_timeout)
        if limits.save is not None and limits.job is not None:
            timers.set(Timer.TIME_LIMIT_NEAR, now + limits.job - limits.save, self._on_time_limit_near)
        if limits.save is not None and limits.ends_at is not None:
            timers.set(Timer.ALLOCATION_NEAR, limits.ends_at - limits.save, self._on_time_limit_near)
        self._limit_startup(now, anew=True)

    def _on_tick(self, event: Tick, now: float) -> list[Action]:
        return [*self._state.timers.fire(now), *self._survivors.answer_waiting(now)]  # some may be given up now

    def _on_startup_timeout(self, now: float) -> list[Action]:
        return self._shutdown.abort(Unavailable(self._startup.describe_missing(self._state.limits.init)), now)

    def _print_progress(self, now: float) -> list[Action]:
        self._state.timers.set(Timer.PROGRESS, now + PROGRESS_INTERVAL_S, self._print_progress)
        text = self._wait.describe(now) or self._startup.describe_progress(now - self._started_at)
        return [PrintLine(text, status=True)]

    def _on_hosts_found(self, event: HostsFound, now: float) -> list[Action]:
        handler = self._wait if self.phase is JobPhase.STARTING else self._scale_up
        return handler.handle_found(event, now)

    def _on_time_limit_near(self, now: float) -> list[Action]:
        """Ask the program to stop by itself, only once even if several limits come near."""
        self._state.timers.cancel(Timer.TIME_LIMIT_NEAR, Timer.ALLOCATION_NEAR)
        left = self._state.limits.save or 0.0
        return self._interruption.begin_stop(f"time limit in {left:g} s", now, left)
