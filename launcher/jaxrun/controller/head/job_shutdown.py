"""Ends a job: after a failure, a refusal, a time limit, or when all programs have finished.

After a failure, the others are stopped only once its root cause is known, because another rank may have caused it.
Workers that have reported their failure get the grace to run their exit handlers; JAX would abort them without the
coordinator, so rank 0, which holds it, is then only frozen, and killed last.

The others are killed, at once or after SIGTERM:

    with --grace, if a program handles SIGTERM   they have that time, and are killed once all that handle it have ended
    on GPUs                                      they have TEARDOWN_S: a process that dies while it exchanges data over
                                                 NVLink can fault its peers; soon all wait for the rank that failed
    else                                         at once, as JAX would swallow SIGTERM

A stopped agent, or one on a swapping host, does not report its worker's end: the job ends without it after a while.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence

from jaxrun.analysis.diagnosis.job_end import Completed, End, LostAtStart, RankFailed, Unavailable
from jaxrun.analysis.diagnosis.root_cause import find_culprits, is_certain
from jaxrun.controller.head.divergence_reports import DivergenceReports
from jaxrun.controller.head.head_state import FIRST_PROGRESS_S, PROGRESS_INTERVAL_S, HeadState, JobPhase
from jaxrun.controller.head.survivors import Survivors
from jaxrun.controller.head.timers import Then, Timer
from jaxrun.job_events.actions import Action, PrintLine, Send, SignalRanks
from jaxrun.job_events.events import AgentLost
from jaxrun.protocol.agent_messages import WorkerExited
from jaxrun.protocol.debugger_messages import DebuggerDecision
from jaxrun.protocol.worker_messages import Exit
from jaxrun.text import format_ranks_on_hosts, plural

SETTLE_S = 0.03  # after a failure, wait for others that came with it: a consequence may arrive before its cause
ROOT_CAUSE_WAIT_S = 0.5  # wait for the root cause while only consequences are known
UNANSWERED_S = 10.0  # for agents to report the end of the workers that were killed
UNANSWERED_HURRY_S = 2.0  # the same after a second signal
TEARDOWN_S = 2.0  # on GPUs, between SIGTERM and SIGKILL for ranks that have not failed
MISMATCH_REPORTS_WAIT_S = 1.0  # for all ranks that know of a mismatch to raise it


_GPU = "gpu"  # JAX's name of the platform


class JobShutdown:
    def __init__(self, state: HeadState, reports: DivergenceReports, survivors: Survivors) -> None:
        """`reports` knows which ranks were told that they differ, and `survivors` whether the job goes on without one.

        unanswered:  the ranks whose end was not reported
        """
        self._state = state
        self._workers = state.workers
        self._reports = reports
        self._survivors = survivors
        self._culprits: dict[int, str] = {}  # with their hosts; those may have been replaced since
        self._debugged: int | None = None  # the culprit, with --pdb
        self._job_ends_at: float | None = None  # at the first failure, by --timeout
        self._rank_0_is_frozen = False
        self._asked: set[int] = set()  # live ranks with SIGTERM that have time to end
        self._over: set[int] = set()  # the ranks among them whose program has ended
        self._all_killed_at: float | None = None
        self.unanswered: tuple[int, ...] = ()

    def leave(self, now: float) -> list[Action]:
        """Let the workers exit after all programs have ended, rank 0 and its coordinator last."""
        limits, until = self._state.limits, self._state.timers.at(Timer.GRACE)
        if not limits.unhurried:
            until = max(now + limits.grace, until or 0.0)
        self._state.enter(JobPhase.LEAVING)
        if until is not None:
            self._state.timers.set(Timer.GRACE, until, self._on_grace_over)
        self._start_progress(now)
        too_late = tuple(rank for rank in self._workers.returning if rank in self._workers.live)
        live = tuple(rank for rank in self._workers.live if rank not in too_late)
        return [*self.kill(too_late), Send(tuple(rank for rank in live if rank != 0) or live, Exit())]

    def abort(self, end: End, now: float) -> list[Action]:
        """End a healthy job for a known reason: kill all workers."""
        if not self._state.is_healthy:
            return []
        self._state.decide(end, now)
        return self.kill_all(now)

    def prepare_abort(self, end: End, now: float) -> None:
        """Decide why a healthy job ends, without killing anything yet: until `kill_all`, no failure counts."""
        self._state.decide(end, now)
        self._state.enter(JobPhase.STOPPING)

    def kill_all(self, now: float, *, hurry: bool = False) -> list[Action]:
        """Kill all live workers, and wait for the reports of their ends; in a `hurry`, not for long."""
        if self._all_killed_at is None:
            self._all_killed_at = now
        until = max(now, self._all_killed_at + (UNANSWERED_HURRY_S if hurry else UNANSWERED_S))
        self._state.enter(JobPhase.STOPPING)
        self._state.timers.set(Timer.UNANSWERED, until, self.give_up_unanswered)
        self._start_progress(now)
        return self.kill(self._workers.live)

    def give_up_unanswered(self, now: float) -> list[Action]:
        """Count ranks as lost whose end nobody reports; the launch command ends their agents, too."""
        all_killed_at = self._all_killed_at
        waited = now - all_killed_at if all_killed_at is not None else UNANSWERED_S
        silent = self._workers.live if all_killed_at is not None else self._workers.live_killed
        reason = f"no end was reported within {waited:.0f} s of SIGKILL"
        self.unanswered += silent
        for rank in silent:
            self._workers.add_loss(rank, reason, now)
        return []

    def kill(self, ranks: tuple[int, ...]) -> list[Action]:
        self._workers.mark_killed(ranks)
        return [SignalRanks(ranks, signal.SIGKILL)] if ranks else []

    # ---- after a failure

    def on_failure(self, rank: int, now: float) -> list[Action]:
        if self._survivors.go_on_without(rank):
            return self._survivors.on_loss(rank, now)
        if self._state.is_healthy:
            self._state.decide(RankFailed(), now)
            self._workers.note_survived(rank, now)
            self._job_ends_at = self._state.timers.ends_at(Timer.JOB, now)
            wait = MISMATCH_REPORTS_WAIT_S if self._reports.was_told(rank) else SETTLE_S
            self._state.enter(JobPhase.SETTLING)
            self._state.timers.set(Timer.SETTLE, now + wait, self.settle)
            self._state.timers.set(Timer.ROOT_CAUSE, now + ROOT_CAUSE_WAIT_S, self.settle)
        elif self._state.phase not in (JobPhase.SETTLING, JobPhase.DEBUGGING):
            return [Send((rank,), DebuggerDecision(False))] if rank in self._workers.waiting_for_debugger else []
        return self.settle(now, rank)

    def settle(self, now: float, rank: int | None = None) -> list[Action]:
        """Stop the job once the root cause is known; `rank` is the only one about which something new is known."""
        state, workers = self._state, self._workers
        if state.phase is not JobPhase.SETTLING or not workers.any_live:
            return []
        told = self._reports.was_told
        if rank is not None and told(rank) and not any(map(told, workers.live_without_failure)):
            state.timers.cancel(Timer.SETTLE)  # all ranks that were told about the mismatch have raised it
        if state.timers.at(Timer.SETTLE) is not None:
            return []
        news = workers.outcomes(now) if rank is None else (workers.outcome(rank, now),)
        if state.timers.at(Timer.ROOT_CAUSE) is not None and not is_certain(news):
            return []
        self._culprits = {worker.rank: worker.host for worker in find_culprits(workers.outcomes(now))}
        waiting = [rank for rank in self._culprits if rank in workers.waiting_for_debugger]
        if waiting and state.post_mortem:
            return self._keep_frames(waiting, now)
        if waiting and not state.terminal_refusal:
            state.enter(JobPhase.DEBUGGING)
            self._debugged = waiting[0]
            failure = workers.outcome(waiting[0], now).failure
            error = f": {failure.error}: {failure.message}" if failure is not None else ""
            text = f"{self._describe_culprits()}{error}\nits debugger follows (--pdb)"
            return [PrintLine(text), Send((waiting[0],), DebuggerDecision(True))]
        return self._stop(now)

    def _keep_frames(self, ranks: Sequence[int], now: float) -> list[Action]:
        """Wait for an editor: until it has let go, --timeout is over, or the user ends the job."""
        self._state.enter(JobPhase.DEBUGGING)
        if self._job_ends_at is not None:
            self._state.timers.set(Timer.JOB, self._job_ends_at, self._stop)
        failure = self._workers.outcome(ranks[0], now).failure
        assert failure is not None
        what = f"{self._describe_culprits()}: {failure.error}: {failure.message}"
        keeps = f"the frames of rank {ranks[0]} are kept for an editor: jaxrun debug --rank {ranks[0]}"
        return [PrintLine(f"{what}\n{failure.traceback}{keeps}; Ctrl-C ends the job")]

    def on_editor_ready(self, rank: int) -> list[Action]:
        """Show an editor that has connected where its rank failed, if its frames were kept."""
        if self._state.phase is not JobPhase.DEBUGGING or rank not in self._workers.waiting_for_debugger:
            return []
        self._debugged = rank
        return [Send((rank,), DebuggerDecision(True))]

    def on_debugger_closed(self, rank: int, now: float) -> list[Action]:
        """Handle that the rank no longer needs the terminal: after its failure, the job is stopped."""
        return self._stop(now) if self._state.phase is JobPhase.DEBUGGING and rank == self._debugged else []

    def _describe_culprits(self) -> str:
        hosts = {**self._workers.hosts, **self._culprits}
        return f"{format_ranks_on_hosts(list(self._culprits), hosts)} failed"

    def _stop(self, now: float) -> list[Action]:
        victims = self._workers.live_without_failure
        others = f"; stopping {plural(len(victims), 'other')}" if victims else ""
        told = [rank for rank in self._workers.waiting_for_debugger if rank != self._debugged]
        refusals = [Send(tuple(told), DebuggerDecision(False))] if told else []
        asked, seconds = self._who_may_end(victims)
        if asked:
            others += f" (SIGTERM; SIGKILL follows in {seconds:g} s)"
            ends = self._ask_victims(victims, asked, now, seconds)
        else:
            ends = self._stop_victims(victims, now)
        reasons = (why for rank in self._culprits if (why := self._survivors.why_all_end(rank)))
        why = next((f"; {reason}" for reason in reasons), "")
        return [PrintLine(f"{self._describe_culprits()}{why}{others}"), *refusals, *ends]

    def _who_may_end(self, victims: tuple[int, ...]) -> tuple[tuple[int, ...], float]:
        """Return for which ranks SIGKILL waits after SIGTERM, and for how long; none if it comes at once."""
        given = self._state.limits.teardown
        handling = tuple(rank for rank in self._workers.handling_sigterm if rank in victims)
        if handling and given:
            return handling, given
        if self._state.platform == _GPU and given != 0:
            return victims, min(TEARDOWN_S, given or TEARDOWN_S)
        return (), 0.0

    def _ask_victims(
        self, victims: tuple[int, ...], asked: tuple[int, ...], now: float, seconds: float
    ) -> list[Action]:
        """Send SIGTERM to the victims, and kill them once the `asked` ones have ended, or after this time.

        Whatever they report from now on is a consequence.
        """
        self._state.enter(JobPhase.STOPPING)
        self._workers.mark_asked(victims)
        self._asked = set(asked)
        self._state.timers.set(Timer.TEARDOWN, now + seconds, self._end_teardown)
        if self._workers.live_reported:
            self._state.timers.set(Timer.GRACE, now + self._state.limits.grace, self._on_grace_over)
        self._start_progress(now)
        return [SignalRanks(victims, signal.SIGTERM)]

    def on_asked_ended(self, rank: int, now: float, *, finished: bool) -> list[Action]:
        """Handle that a program has ended to which SIGTERM was sent; `finished`: so have its exit handlers."""
        if rank not in self._asked:
            return []
        self._over.add(rank)
        if not finished:
            return self._end_teardown_if_over(now)
        self._asked.discard(rank)
        leave: list[Action] = [Send((rank,), Exit())] if rank else []
        return [*leave, *self._end_teardown_if_over(now)]

    def _end_teardown_if_over(self, now: float) -> list[Action]:
        """Kill the rest once all ranks have ended that had time. Rank 0 leaves last, as it has the coordinator."""
        if self._state.timers.at(Timer.TEARDOWN) is None:
            return []
        self._asked &= set(self._workers.live)
        if self._workers.live == (0,) and 0 in self._over:
            return [Send((0,), Exit())]
        return [] if self._asked else self._end_teardown(now)

    def _end_teardown(self, now: float) -> list[Action]:
        self._state.timers.cancel(Timer.TEARDOWN)
        self._asked.clear()
        victims = self._workers.live_without_failure
        return self._stop_victims(victims, now) if victims else self._release_rank_0_if_last()

    def _stop_victims(self, victims: tuple[int, ...], now: float) -> list[Action]:
        """Kill the ranks that have reported no failure; the others are killed when the grace is over."""
        live = self._workers.live
        if len(victims) == len(live):
            return self.kill_all(now)
        until = self._state.timers.at(Timer.GRACE)
        self._state.enter(JobPhase.STOPPING)
        self.start_grace(now, self._state.limits.grace if until is None else until - now, self._on_grace_over)
        if live == (0,):
            return self._release_rank_0()
        if 0 in victims:
            self._rank_0_is_frozen = True
            return [SignalRanks((0,), signal.SIGSTOP), *self.kill(tuple(rank for rank in victims if rank != 0))]
        return self.kill(victims)

    # ---- workers end

    def on_worker_exited(self, event: WorkerExited, now: float) -> list[Action]:
        self._workers.add_exit(event, now)
        if event.status != 0 or self._state.run_at is None:
            if self._state.is_healthy:
                return self.on_failure(event.rank, now)
            self._fail_if_leaving(event.rank, now)
        if self._state.phase is JobPhase.DEBUGGING and self._workers.any_live:
            return self._on_debugged_lost(event.rank, now)
        rest = self._end_teardown_if_over(now)
        return [*rest, *self._release_rank_0_if_last(), *self.settle(now, event.rank)]

    def _on_debugged_lost(self, rank: int, now: float) -> list[Action]:
        """Stop the job if no culprit is left to be debugged."""
        is_left = rank != self._debugged and any(map(self._workers.waiting_for_debugger.__contains__, self._culprits))
        return [] if is_left else self._stop(now)

    def on_agent_lost(self, event: AgentLost, ranks: Sequence[int], now: float, *, was_there: bool) -> list[Action]:
        """Handle the loss of an agent: these `ranks` are lost with it.

        was_there:  all agents had reported, so that another attempt may do better if this one has not begun
        """
        if not all(map(self._workers.has_worker, ranks)):
            agent = f"the agent of {format_ranks_on_hosts(ranks, self._workers.hosts)}"
            text = f"{agent} was lost before it started its worker{'s' if len(ranks) > 1 else ''}: {event.reason}"
            lost = dict.fromkeys(ranks, event.reason)
            for rank in (rank for rank in ranks if rank in self._workers.live):  # some may have been started
                self._workers.add_loss(rank, event.reason, now)
            return self.abort(LostAtStart(text, lost=lost) if was_there else Unavailable(text), now)
        return [action for rank in ranks for action in self._on_rank_lost(rank, event, now)]

    def _on_rank_lost(self, rank: int, event: AgentLost, now: float) -> list[Action]:
        if self._workers.has_ended(rank):
            return []
        self._workers.add_loss(rank, event.reason, now, by_launcher=event.ended_by_launch_command)
        if self._state.is_healthy:
            return self.on_failure(rank, now)
        self._fail_if_leaving(rank, now)
        if self._state.phase is JobPhase.SETTLING:  # the other ranks of its host are lost with it
            self._state.timers.set(Timer.SETTLE, now + SETTLE_S, self.settle)
        if self._state.phase is JobPhase.DEBUGGING and self._workers.any_live:
            return self._on_debugged_lost(rank, now)
        return [*self._end_teardown_if_over(now), *self._release_rank_0_if_last()]

    # ---- waiting for ranks that should end

    def start_grace(self, now: float, grace: float, then: Then) -> None:
        """Print which ranks should end within `grace` seconds, and call `then` if some have not."""
        self._state.timers.set(Timer.GRACE, now + grace, then)
        self._start_progress(now)

    def _start_progress(self, now: float) -> None:
        self._state.timers.set(Timer.PROGRESS, now + FIRST_PROGRESS_S, self._print_progress)

    def _print_progress(self, now: float) -> list[Action]:
        self._state.timers.set(Timer.PROGRESS, now + PROGRESS_INTERVAL_S, self._print_progress)
        return [PrintLine(self.describe_wait(now), status=True)]

    def _on_grace_over(self, now: float) -> list[Action]:
        """Kill all live workers, because some that were asked to end have not."""
        workers = self._workers
        is_stopping = self._state.phase is JobPhase.STOPPING
        late = (workers.live_reported if is_stopping else workers.working) or workers.live
        grace = f"{self._state.limits.grace:g} s"
        text = f"{format_ranks_on_hosts(late, workers.hosts)} did not end within {grace}; sent SIGKILL"
        return [PrintLine(text), *self.kill_all(now)]

    def describe_wait(self, now: float) -> str:
        """Write `waiting for ranks 2-3 (h1) to end; SIGKILL in 12 s`."""
        then = self._describe_kill(now)
        given_up_at = self._state.timers.at(Timer.UNANSWERED)
        if given_up_at is not None:
            then = f", which was sent SIGKILL; jaxrun gives it up in {max(0.0, given_up_at - now):.0f} s"
        is_stopping = self._state.phase is JobPhase.STOPPING  # rank 0 may only be kept alive for the others
        ranks = (is_stopping and self._workers.live_reported) or self._workers.live
        return f"waiting for {format_ranks_on_hosts(ranks, self._workers.hosts)} to end{then}"

    def _describe_kill(self, now: float) -> str:
        """Write `; SIGKILL in 12 s`. Ranks that Ctrl-C does not reach have less time than those that handle it."""
        killed_at, earlier = self._state.timers.at(Timer.GRACE), self._state.timers.at(Timer.INTERRUPT)
        unreached = self._workers.not_interrupted if earlier is not None else ()
        for_whom = ""
        if unreached and earlier is not None and (killed_at is None or earlier < killed_at):
            killed_at = earlier
            if set(unreached) != set(self._workers.live):
                ranks = format_ranks_on_hosts(unreached, self._workers.hosts)
                for_whom = f" for {ranks}, which Ctrl-C has not reached"
        return f"; SIGKILL in {max(0.0, killed_at - now):.0f} s{for_whom}" if killed_at is not None else ""

    def _fail_if_leaving(self, rank: int, now: float) -> None:
        """Decide that the job has failed if this rank fails as all leave; not if it was lost before."""
        is_leaving = self._state.phase is JobPhase.LEAVING and isinstance(self._state.end, Completed)
        if is_leaving and rank not in self._workers.lost:
            self._state.decide(RankFailed(), now)

    def _release_rank_0_if_last(self) -> list[Action]:
        is_ending = self._state.phase in (JobPhase.LEAVING, JobPhase.STOPPING)
        return self._release_rank_0() if is_ending and self._workers.only_rank_0_left else []

    def _release_rank_0(self) -> list[Action]:
        if 0 not in self._workers.live_reported:
            return self.kill((0,))
        # Its last report may have crossed with the signal that froze it.
        thaw: list[Action] = [SignalRanks((0,), signal.SIGCONT)] if self._rank_0_is_frozen else []
        return [*thaw, Send((0,), Exit())]
