"""Handles signals to the launcher: most of them end the job, others are passed on or ask for stacks.

    Ctrl-C     SIGINT, which is KeyboardInterrupt in every rank. A rank that it does not reach, stuck in C++,
               has the grace; one whose handlers run has the longer signal grace.
    SIGTERM,   A program that polls should_stop is asked to stop, and the job runs until it does; others get it as
    SIGHUP     JAX's notice of preemption, and are asked if they poll later. Both have the signal grace. Where nobody
               listens, the job ends at once.
    SIGUSR2    The same, where it is Slurm's warning of the time limit (--requeue).
    stop --now The same with a grace of half a second, for all programs.
    In a pod   SIGTERM says that this pod goes away. Where the job waits for the pod that takes its place
               (--wait-hosts), only the attempt ends, as above; the other pods keep their agents. With
               --keep-survivors only the ranks of the pod end, if it is not the head's: they are lost.
    To a rank  SIGTERM that something else sends to one rank is JAX's notice of preemption: a program that polls
               should_stop is asked to stop, on all ranks, and any other job goes on.
    Ctrl-Z     SIGTSTP: all ranks are stopped, and this process, until SIGCONT (`fg`). Time limits stand still.

All ranks are asked where they are before such a signal reaches them: the job may hang because of an exception that one
of them handles. A rank that handles the signal as it comes has its grace, even if its handler begins by giving the
signal back. Ranks that are late get SIGTERM, are asked again, and are killed. A second signal kills all at once,
and those whose agents then do not answer are not waited for.
"""

from __future__ import annotations

import signal

from msgspec import Struct, field
from msgspec.structs import replace

from jaxrun.analysis.diagnosis.job_end import EndedBySignal
from jaxrun.analysis.diagnosis.job_stacks import JobStacks
from jaxrun.analysis.diagnosis.wait_graph import wait_graph_of
from jaxrun.controller.head.divergence_detector import DivergenceDetector
from jaxrun.controller.head.head_state import REPEATED_SIGNAL_S, HeadState, JobPhase
from jaxrun.controller.head.health_checks import HealthChecks
from jaxrun.controller.head.job_shutdown import UNANSWERED_S, JobShutdown
from jaxrun.controller.head.leaving_pods import LeavingPods
from jaxrun.controller.head.queries import RankQueries, Replies
from jaxrun.controller.head.stall_checks import have_explained
from jaxrun.controller.head.timers import Then, Timer
from jaxrun.controller.head.worker_table import WorkerTable
from jaxrun.controller.roster import Roster
from jaxrun.job_events.actions import Action, PrintLine, PrintStacks, Send, SignalRanks, Suspend
from jaxrun.job_events.events import EndRequested, LauncherSignalled, ParentExited, Resumed, SignalRequested
from jaxrun.protocol.agent_id import AgentId
from jaxrun.protocol.agent_messages import AgentSignalled
from jaxrun.protocol.query_messages import RankDetail
from jaxrun.protocol.worker_messages import Exit, PreemptionNotice
from jaxrun.text import format_ranks, format_ranks_on_hosts, plural

_Order = SignalRequested | ParentExited | EndRequested
InterruptionEvent = LauncherSignalled | AgentSignalled | _Order | Resumed | PreemptionNotice
_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STOP_NOW_S = 0.5  # from SIGTERM to SIGKILL where a person wants the end now
KILL_DELAY_S = 1.0  # for late ranks to report where they are
_SIGNALLED_BEFORE_S = 1.0  # by a scheduler, which may send a signal to the ranks before it sends it to the launcher


class Interruption(Struct):
    _state: HeadState
    _shutdown: JobShutdown
    _queries: RankQueries
    _divergence: DivergenceDetector
    _checks: HealthChecks
    _roster: Roster
    _leaving: LeavingPods
    _late: tuple[int, ...] = ()
    _stacks: JobStacks | None = None  # where the ranks were when the signal came
    _is_explained: bool = False  # a notice has told who waits for whom, as these stacks show it
    _others_leave: bool = False  # all ranks but rank 0, which is late, have been told to leave
    _stop_signal: tuple[int, float] | None = None  # the signal that asked a polling program to stop, and when
    _drained_at: dict[AgentId, float] = field(default_factory=dict)  # when a pod was told that it goes away

    @property
    def _workers(self) -> WorkerTable:
        return self._state.workers

    @property
    def _signum(self) -> int:
        """The signal that ends the job; 0 if something else does."""
        return self._state.end.signum if isinstance(self._state.end, EndedBySignal) else 0

    def handle(self, event: InterruptionEvent, now: float) -> list[Action]:
        """Handle a signal to the launcher or an agent, or an order of the launcher's parent."""
        match event:
            case AgentSignalled(signum=signal.SIGTERM) if self._leaving.may_leave(event.agent):
                return self._leaving.let_leave(event.agent, now)
            case LauncherSignalled() | AgentSignalled() if self._state.drains:
                return self._on_signal_in_pod(event, now)
            case ParentExited():
                return self.end_at_once(signal.SIGHUP, now, event.reason)
            case EndRequested():
                return self._end_now(event.reason, now)
            case SignalRequested():
                ranks = self._workers.working if self._state.phase is JobPhase.RUNNING else ()
                return [SignalRanks(ranks, event.signum)] if ranks else []
            case Resumed():
                return self._resume(event.paused_s)
            case PreemptionNotice():
                return self._on_preemption_notice(now)
            case AgentSignalled() if not self._state.is_healthy:
                return []
        return self._on_signal(event.signum, now)

    def _on_signal_in_pod(self, event: LauncherSignalled | AgentSignalled, now: float) -> list[Action]:
        """Handle a signal in a pod, whose place another takes: SIGTERM says that this pod goes away.

        The first one ends the attempt; further pods that go away meanwhile do not hurry it.
        """
        agent, drained = AgentId(0), self._state.drained
        if isinstance(event, AgentSignalled):
            agent = event.agent
        if event.signum not in _STOPPING:
            return self._on_signal(event.signum, now)
        if event.signum == signal.SIGTERM and agent in drained and now - self._drained_at[agent] < REPEATED_SIGNAL_S:
            return []
        if event.signum != signal.SIGTERM or agent in drained:  # the whole job is to end
            self._state.drains = False
            drained.clear()
            return self._on_signal(event.signum, now)
        is_first = not drained
        drained.add(agent)
        self._drained_at[agent] = now
        if not is_first or not (self._state.is_healthy or isinstance(event, LauncherSignalled)):
            return []
        host = self._workers.hosts.get(int(agent), "")  # the first rank of each host numbers its agent
        text = f"the pod of {host} goes away; the others stay until another takes its place (--wait-hosts)"
        return [PrintLine(text), *self._on_signal(event.signum, now)]

    def _on_signal(self, signum: int, now: float) -> list[Action]:
        phase, working = self._state.phase, self._workers.working
        if signum == signal.SIGTSTP:
            stops = [SignalRanks(live, signal.SIGSTOP)] if (live := self._workers.live) else []
            return [*stops, Suspend()]
        if phase is not JobPhase.CONCLUDING:
            if signum == signal.SIGUSR1 or (signum == signal.SIGUSR2 and not self._state.requeue):
                return [SignalRanks(working, signum)] if working else []
            if signum == signal.SIGQUIT:
                agents = self._roster.describe()  # empty if all are as usual
                return [*([PrintLine(f"agents: {agents}")] if agents else []), *self._queries.show(now)]
        if self._is_repeated(signum, now):
            return []
        is_running = phase is JobPhase.RUNNING and not self._state.waits_at_start
        return self._begin(signum, now) if is_running else self.end_at_once(signum, now)

    def _resume(self, paused_s: float) -> list[Action]:
        """Continue all ranks; meanwhile, only a scheduler's time limit has run on."""
        self._checks.discount(paused_s)
        self._state.timers.postpone(paused_s)
        ranks = self._workers.live
        return [SignalRanks(ranks, signal.SIGCONT)] if ranks else []

    def _end_now(self, reason: str, now: float) -> list[Action]:
        """End the job within a moment, in which ranks that listen to SIGTERM or poll should_stop may end by themselves.

        Where the job is ending, they have been asked already.
        """
        self._keep_handlers(now)
        is_running = self._state.phase is JobPhase.RUNNING and not self._state.waits_at_start
        if not is_running or self._stop_signal is not None:
            return self.end_at_once(signal.SIGHUP, now, reason)
        self._state.stop_requested = True
        end = EndedBySignal(signal.SIGHUP, reason)
        return self._end_unless_they_do(end, reason, now, STOP_NOW_S, self._kill_unheard)

    def end_at_once(self, signum: int, now: float, text: str = "") -> list[Action]:
        """End the job without grace; the reason stays for which one ends already."""
        self._state.stop_requested = True
        if self._state.phase is JobPhase.CONCLUDING:
            return self._divergence.give_up_waiting(now)
        hurry = not self._state.is_healthy
        if self._state.is_healthy:
            self._state.decide(self._with_stacks(EndedBySignal(signum, text)), now)
        return self._shutdown.kill_all(now, hurry=hurry)

    def _with_stacks(self, end: EndedBySignal) -> EndedBySignal:
        """Add where the ranks were when the signal came, if that is known already."""
        return end if self._stacks is None else replace(end, stacks=self._stacks, is_explained=self._is_explained)

    def _ask_stacks(self, now: float, then: Then | None = None) -> list[Action]:
        """Ask all ranks where they are, for the verdict, and call `then` once they have answered or had their time."""

        def keep(replies: Replies, now: float) -> list[Action]:
            self._stacks = self._queries.stacks(replies, now)
            self._is_explained = have_explained(self._state, self._stacks)
            if isinstance(self._state.end, EndedBySignal):
                self._state.refine(self._with_stacks(self._state.end))
            return then(now) if then is not None else []

        return self._queries.ask_stacks(self._workers.working, keep, now)

    def begin_stop(self, reason: str, now: float, grace: float | None = None, signum: int = 0) -> list[Action]:
        """Ask the program to stop, because of `reason`: all of its ranks at the same step, and those that do not poll
        yet once they do. A program that listens to SIGTERM and does not poll gets that.

        grace:   seconds until SIGKILL, instead of the signal grace, for a program that gets SIGTERM or if `signum` has
                 asked for it; any other has no limit to it here
        """
        self._state.stop_requested = True
        self._keep_handlers(now)
        stop = self._state.stop
        grace = self._state.limits.signal_grace if grace is None else grace
        if not stop.polling and self._state.phase is JobPhase.RUNNING and self._workers.listening:
            end = EndedBySignal(signal.SIGTERM)
            return self._send_termination(end, reason, now, grace, self._on_grace_over)
        actions = stop.request(reason)
        text = f"{reason}: asked {format_ranks(stop.polling)} to stop (should_stop)" if stop.polling else ""
        if signum:
            self._stop_signal = signum, now
            self._shutdown.start_grace(now, grace, self._on_grace_over)
            text += f"; {_describe_grace(grace)}"
            actions = [*self._ask_stacks(now), *actions]
        return [PrintLine(text), *actions] if text else actions

    def _begin(self, signum: int, now: float) -> list[Action]:
        if self._stop_signal is not None:
            return self.end_at_once(self._stop_signal[0], now)
        self._keep_handlers(now)
        if signum != signal.SIGINT and self._state.stop.polling:
            return self.begin_stop(signal.Signals(signum).name, now, signum=signum)
        end, ranks = EndedBySignal(signum), self._workers.working
        if signum == signal.SIGINT:
            self._state.decide(end, now)
            self._state.enter(JobPhase.TERMINATING)
            self._state.timers.set(Timer.INTERRUPT, now + self._state.limits.grace, self._end_not_interrupted)
            self._shutdown.start_grace(now, self._state.limits.signal_grace, self._on_grace_over)
            text = f"Ctrl-C: KeyboardInterrupt in {format_ranks(ranks)}; another Ctrl-C kills at once"
            return [PrintLine(text), *self._ask_stacks(now), SignalRanks(ranks, signal.SIGINT)]
        name, grace = signal.Signals(signum).name, self._state.limits.signal_grace
        return self._end_unless_they_do(end, name, now, grace, self._on_grace_over)

    def _keep_handlers(self, now: float) -> None:
        """Give the grace to each rank that handled signals as this one came, even if its handler gives them back."""
        self._workers.keep_handlers(now - _SIGNALLED_BEFORE_S)

    def _end_unless_they_do(
        self, end: EndedBySignal, reason: str, now: float, grace: float, then: Then
    ) -> list[Action]:
        """Send SIGTERM, and call `then` after the grace; ranks of which none handles SIGTERM are killed.

        end:  why the job ends; `reason` is shown
        """
        if self._workers.listening or self._state.stop.polling:
            return self._send_termination(end, reason, now, grace, then)
        self._state.decide(replace(end, unheard=True), now)
        self._state.enter(JobPhase.TERMINATING)
        text = f"{reason}: no rank handles SIGTERM; stopping {plural(len(self._workers.working), 'rank')}"
        return [PrintLine(text), *self._ask_stacks(now, self._kill_unheard)]

    def _kill_unheard(self, now: float) -> list[Action]:
        return self._shutdown.kill_all(now) if self._state.phase is JobPhase.TERMINATING else []

    def _send_termination(self, end: EndedBySignal, reason: str, now: float, grace: float, then: Then) -> list[Action]:
        """Send SIGTERM to a program that listens to it and does not poll; if it polls later, it is asked then."""
        ranks = self._workers.working
        self._state.decide(end, now)
        self._state.enter(JobPhase.TERMINATING)
        self._shutdown.start_grace(now, grace, then)
        text = f"{reason}: asked {format_ranks(ranks)} to end (SIGTERM); {_describe_grace(grace)}"
        ask = self._ask_stacks(now)
        return [PrintLine(text), *ask, SignalRanks(ranks, signal.SIGTERM), *self._state.stop.request(reason)]

    def _on_preemption_notice(self, now: float) -> list[Action]:
        """Handle that something else than jaxrun has sent SIGTERM to one rank, which JAX has handled.

        JAX's notice does not say to which rank; that rank's stderr does, unless the program has silenced JAX's log.
        """
        stop = self._state.stop
        if self._state.phase is not JobPhase.RUNNING or stop.reason:
            return []
        if stop.polling:
            self._state.stop_requested = True
            did = f"asked {format_ranks(stop.polling)} to stop (should_stop)"
        else:
            heard = "JAX says so to a program that asks for it (should_stop, reached_preemption_sync_point)"
            how = "" if self._workers.listening else "; to end the job, send SIGTERM to jaxrun"
            did = f"{heard}; the job goes on{how}"

        def tell(replies: Replies, now: float) -> list[Action]:
            ranks = [rank for rank, reply in replies.items() if reply.got_sigterm]
            who = format_ranks_on_hosts(ranks, self._workers.hosts) if ranks else "one rank"
            return [PrintLine(f"SIGTERM to {who}, not by jaxrun: {did}")]

        requests = stop.request("SIGTERM to one rank, not by jaxrun")
        return [*requests, *self._queries.ask(self._workers.live, RankDetail.SIGTERM, tell, now)]

    def _is_repeated(self, signum: int, now: float) -> bool:
        """Whether the signal repeats the one that already ends the job, or asks it to stop."""
        decided_at = self._state.decided_at
        if self._stop_signal is not None and self._stop_signal[0] == signum:
            return now - self._stop_signal[1] < REPEATED_SIGNAL_S
        if self._state.phase not in (JobPhase.TERMINATING, JobPhase.STOPPING) or signum != self._signum:
            return False
        return decided_at is not None and now - decided_at < REPEATED_SIGNAL_S

    def on_rank_ended(self, now: float) -> list[Action]:
        """Handle that a rank has ended, or reported that it will, while the job is being interrupted."""
        workers, timers = self._workers, self._state.timers
        if not workers.any_live:
            return []
        if not workers.working_count or not workers.live_not_reported:
            return self._shutdown.leave(now)
        if self._only_rank_0_is_late and not self._others_leave:
            self._others_leave = True
            timers.set(Timer.GRACE, now + self._state.limits.grace, self._shutdown.kill_all)
            return [Send(tuple(rank for rank in workers.live if rank != 0), Exit())]
        if self._signum != signal.SIGINT and not workers.listening:  # the other ranks do not listen
            timers.advance(Timer.GRACE, now + self._state.limits.grace, self._on_grace_over)
        if workers.live == (0,) and self._late == (0,):  # it may continue, now that it waits for nobody any more
            timers.set(Timer.KILL, now + KILL_DELAY_S, self._kill_late)
        return []

    @property
    def _only_rank_0_is_late(self) -> bool:
        """Whether rank 0 has had its time, and all others that live have reported how they end, and wait to leave."""
        workers, has_had_its_time = self._workers, self._state.timers.at(Timer.KILL) is None
        return has_had_its_time and workers.live_not_reported == self._late == (0,) != workers.live

    def _end_not_interrupted(self, now: float) -> list[Action]:
        """End ranks in which KeyboardInterrupt should have been raised by now."""
        return self._end_late(self._workers.not_interrupted, now)

    def _on_grace_over(self, now: float) -> list[Action]:
        if self._state.phase is JobPhase.RUNNING:  # a program that polls has not ended after the signal
            assert self._stop_signal is not None
            signum, asked_at = self._stop_signal
            self._state.decide(self._with_stacks(EndedBySignal(signum)), asked_at)
            self._state.enter(JobPhase.TERMINATING)
        return self._end_late(self._workers.live_not_reported or self._workers.live, now)

    def _give_up_unanswered(self, now: float) -> list[Action]:
        return [*self._shutdown.give_up_unanswered(now), *self.on_rank_ended(now)]

    def _on_late_stacks(self, replies: Replies, now: float) -> list[Action]:
        end = self._state.end
        if self._state.phase is not JobPhase.TERMINATING or not isinstance(end, EndedBySignal):
            return []
        heading = f"{self._describe_late(self._late or tuple(replies), now)} · "
        stacks = self._queries.stacks(replies, now)
        end = replace(
            end,
            late_stacks={**end.late_stacks, **stacks.dumps},
            late_waits={**end.late_waits, **stacks.waits},
            is_explained=end.is_explained or bool(wait_graph_of(stacks).unseen_errors),
        )
        self._state.refine(end)
        return [PrintStacks(stacks, heading), *self._kill_late(now)]

    def _kill_late(self, now: float) -> list[Action]:
        """Kill the late ranks; rank 0 with the last of the others, because JAX aborts ranks without its coordinator."""
        live = self._workers.live
        if set(live) <= set(self._late):
            return self._shutdown.kill_all(now)
        self._state.timers.cancel(Timer.KILL)
        late, self._late = self._late, tuple(rank for rank in self._late if rank == 0)
        if late != self._late:
            self._state.timers.set(Timer.UNANSWERED, now + UNANSWERED_S, self._give_up_unanswered)
        kills = self._shutdown.kill(tuple(rank for rank in late if rank in live and rank != 0))
        return [*kills, *self.on_rank_ended(now)]

    def _describe_late(self, late: tuple[int, ...], now: float) -> str:
        """Write `rank 2 (h1) did not end within 5 s; sent SIGTERM and SIGKILL`."""
        decided_at = self._state.decided_at
        seconds = now - decided_at if decided_at is not None else 0.0
        who = format_ranks_on_hosts(late, self._workers.hosts)
        return f"{who} did not end within {seconds:.0f} s; sent SIGTERM and SIGKILL"

    def _end_late(self, ranks: tuple[int, ...], now: float) -> list[Action]:
        if set(ranks) <= set(self._late):
            return []
        self._late = ranks
        self._state.timers.set(Timer.KILL, now + KILL_DELAY_S, self._kill_late)
        return [*self._queries.ask_stacks(ranks, self._on_late_stacks, now), SignalRanks(ranks, signal.SIGTERM)]


def _describe_grace(grace: float) -> str:
    return f"SIGKILL follows in {grace:g} s, or at once with Ctrl-C"
