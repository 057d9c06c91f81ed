"""Carries out signals to the launcher: most of them end the job, others are passed on or ask for stacks.

    Ctrl-C     SIGINT, which is KeyboardInterrupt in every rank. A rank that it does not reach, as it is stuck in C++,
               has the grace; one whose handlers run has the longer signal grace.
    SIGTERM,   passed on as JAX's notice of preemption, with the signal grace; where nobody listens to it, the job ends
    SIGHUP     at once.

Ranks that are late get SIGTERM, are asked where they are, and are killed. A second signal kills all at once, and those
whose agents then do not answer are not waited for.
"""

from __future__ import annotations

import signal
from dataclasses import replace

from jaxrun.head.actions import Action, EndReason, JobOutcome, PrintLine, SignalRanks
from jaxrun.head.attempt import Attempt, JobPhase
from jaxrun.head.divergence_detector import DivergenceDetector
from jaxrun.head.shutdown import UNANSWERED_S, JobShutdown
from jaxrun.head.snapshots import PURPOSE_OF_SIGNAL, Snapshots
from jaxrun.head.timeouts import FIRST_PROGRESS_S, Timeout
from jaxrun.protocol.snapshot_messages import SnapshotPurpose, SnapshotReply
from jaxrun.text import format_ranks, format_ranks_on_hosts, plural

REPEATED_SIGNAL_S = 0.2  # `timeout` and other wrappers send the same signal twice, to the process and to its group
KILL_DELAY_S = 1.0  # for late ranks to say where they are


class Interruption:
    """Times are seconds since the epoch."""

    def __init__(
        self, attempt: Attempt, shutdown: JobShutdown, snapshots: Snapshots, divergence: DivergenceDetector
    ) -> None:
        self._attempt = attempt
        self._workers = attempt.workers
        self._shutdown = shutdown
        self._snapshots = snapshots
        self._divergence = divergence
        self._late: tuple[int, ...] = ()

    def on_signal(self, signum: int, now: float) -> list[Action]:
        """The launcher, or an agent, was signalled."""
        phase, working = self._attempt.phase, self._workers.working
        if phase is not JobPhase.CONCLUDING:
            if signum in (signal.SIGUSR1, signal.SIGUSR2):
                return [SignalRanks(working, signum)] if working else []
            if signum in PURPOSE_OF_SIGNAL:
                return [self._snapshots.take(PURPOSE_OF_SIGNAL[signum])]
        if self._is_repeated(signum, now):
            return []
        return self._begin(signum, now) if phase is JobPhase.RUNNING else self.end_at_once(signum, now)

    def end_at_once(self, signum: int, now: float, text: str = "") -> list[Action]:
        """End the job without grace; one that is ending keeps its outcome."""
        if self._attempt.phase is JobPhase.CONCLUDING:
            self._divergence.give_up_waiting()
            return []
        hurry = not self._attempt.is_healthy
        if self._attempt.is_healthy:
            self._attempt.outcome = JobOutcome(EndReason.INTERRUPTED, text=text, signum=signum, decided_at=now)
        return self._shutdown.kill_all(now, hurry=hurry)

    def _begin(self, signum: int, now: float) -> list[Action]:
        self._attempt.outcome = JobOutcome(EndReason.INTERRUPTED, signum=signum, decided_at=now)
        limits, ranks = self._attempt.limits, self._workers.working
        grace = {Timeout.GRACE: now + limits.signal_grace, Timeout.PROGRESS: now + FIRST_PROGRESS_S}
        if signum == signal.SIGINT:
            self._attempt.enter(JobPhase.TERMINATING, {**grace, Timeout.INTERRUPT: now + limits.grace})
            text = f"Ctrl-C: KeyboardInterrupt in {format_ranks(ranks)}; another Ctrl-C kills at once"
            return [PrintLine(text), SignalRanks(ranks, signal.SIGINT)]
        name = signal.Signals(signum).name
        if not self._workers.listening:
            self._attempt.outcome = replace(self._attempt.outcome, unheard=True)
            text = f"{name}: nobody in the job listens to SIGTERM; stopping {plural(len(ranks), 'rank')}"
            return [PrintLine(text), *self._shutdown.kill_all(now)]
        self._attempt.enter(JobPhase.TERMINATING, grace)
        text = f"{name}: asked {format_ranks(ranks)} to end (SIGTERM)"
        followed = f"SIGKILL follows in {limits.signal_grace:g} s, or at once with Ctrl-C"
        return [PrintLine(f"{text}; {followed}"), SignalRanks(ranks, signal.SIGTERM)]

    def _is_repeated(self, signum: int, now: float) -> bool:
        """Whether the signal is the one that ends the job already, sent twice."""
        outcome = self._attempt.outcome
        if self._attempt.phase not in (JobPhase.TERMINATING, JobPhase.STOPPING) or signum != outcome.signum:
            return False
        return outcome.decided_at is not None and now - outcome.decided_at < REPEATED_SIGNAL_S

    def on_rank_ended(self, now: float) -> None:
        """A rank has ended, or said that it will, and others have not."""
        timeouts = self._attempt.timeouts
        if self._attempt.outcome.signum != signal.SIGINT and not self._workers.listening:
            timeouts.advance(Timeout.GRACE, now + self._attempt.limits.grace)  # the others do not listen
        if self._workers.live == (0,) and self._late == (0,):
            timeouts.start(Timeout.KILL, now + KILL_DELAY_S)  # it may go on, now that it waits for nobody any more

    def on_timeout(self, timeout: Timeout, now: float) -> list[Action]:
        if timeout is Timeout.KILL:
            return self._kill_late(now)
        if timeout is Timeout.INTERRUPT:  # KeyboardInterrupt should have been raised in all ranks by now
            return self._end_late(self._workers.not_interrupted, now)
        return self._end_late(self._workers.live_not_reported or self._workers.live, now)

    def on_snapshot(self, reply: SnapshotReply, now: float) -> list[Action]:
        """The late ranks have said where they are."""
        show = self._snapshots.show(reply, now, self._describe_late(self._late or tuple(reply.stacks), now))
        if self._attempt.phase is not JobPhase.TERMINATING:
            return []
        outcome = self._attempt.outcome
        stacks, waits = {**outcome.stacks, **reply.stacks}, {**outcome.kernel_waits, **reply.kernel_waits}
        self._attempt.outcome = replace(outcome, stacks=stacks, kernel_waits=waits)
        return [show, *self._kill_late(now)]

    def _kill_late(self, now: float) -> list[Action]:
        """Kill the late ranks; rank 0 with the last of the others, as JAX aborts those that lose its coordinator."""
        live = self._workers.live
        if set(live) <= set(self._late):
            return self._shutdown.kill_all(now)
        self._attempt.timeouts.cancel(Timeout.KILL)
        late, self._late = self._late, tuple(rank for rank in self._late if rank == 0)
        if late != self._late:
            self._attempt.timeouts.start(Timeout.UNANSWERED, now + UNANSWERED_S)
        return self._shutdown.kill(tuple(rank for rank in late if rank in live and rank != 0))

    def _describe_late(self, late: tuple[int, ...], now: float) -> str:
        """`rank 2 (h1) did not end within 5 s; sent SIGTERM and SIGKILL`."""
        decided_at = self._attempt.outcome.decided_at
        seconds = now - decided_at if decided_at is not None else 0.0
        who = format_ranks_on_hosts(late, self._workers.hosts)
        return f"{who} did not end within {seconds:.0f} s; sent SIGTERM and SIGKILL"

    def _end_late(self, ranks: tuple[int, ...], now: float) -> list[Action]:
        if set(ranks) <= set(self._late):
            return []
        self._late = ranks
        self._attempt.timeouts.start(Timeout.KILL, now + KILL_DELAY_S)
        return [self._snapshots.take(SnapshotPurpose.LATE, ranks), SignalRanks(ranks, signal.SIGTERM)]
