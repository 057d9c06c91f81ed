"""--keep-survivors: the death of a rank other than 0 does not end the job; the others are told, and go on.

Rank 0 has JAX's coordinator, without which no rank lives on. live_devices is a barrier of the ranks that live: they
all get the same answer once the last of them has come, or the last that has not come has died.
"""

from __future__ import annotations

from functools import partial

from jaxrun.controller.head.divergence_detector import DivergenceDetector
from jaxrun.controller.head.head_state import HeadState, JobPhase
from jaxrun.controller.head.timers import Timer
from jaxrun.job_events.actions import Action, PrintLoss, Send
from jaxrun.protocol.survivor_messages import LiveRanks, LiveRanksAsked, RanksLost
from jaxrun.protocol.worker_messages import Exit

_INCARNATION = 1  # no rank is started again beside others
_LEFT_S = 1.0  # the others may still receive what a rank that has ended well has sent to them


class Survivors:
    def __init__(self, state: HeadState, divergence: DivergenceDetector, *, are_kept: bool) -> None:
        self._state = state
        self._divergence = divergence
        self._are_kept = are_kept
        self._waiting: dict[tuple[int, ...], set[int]] = {}  # the ranks that wait, by the ranks about which they ask

    @property
    def are_kept(self) -> bool:
        return self._are_kept

    def go_on_without(self, rank: int) -> bool:
        """Whether the job goes on if this rank, whose program runs, fails."""
        is_running = self._state.phase is JobPhase.RUNNING and bool(self._state.workers.working_of((0,)))
        return self._are_kept and rank != 0 and is_running

    def on_loss(self, rank: int, now: float) -> list[Action]:
        """Tell the others that a rank has failed; only once, also if its process ends later."""
        workers = self._state.workers
        if rank in workers.lost:
            return []
        workers.add_lost(rank)
        self._divergence.remove_rank(rank, now)
        loss = PrintLoss(workers.outcome(rank, now), workers.working, self._state.run_at or now)
        return [loss, Send(workers.working, RanksLost((rank,))), *self._answer_all_but(rank)]

    def on_done(self, rank: int) -> list[Action]:
        """Let a rank whose program has ended well leave at once: those that need it then see that it is gone."""
        return [Send((rank,), Exit())] if self._are_kept and rank and self._state.workers.working else []

    def on_ended(self, rank: int, now: float) -> list[Action]:
        """Answer those that have waited in live_devices for this rank, whose program has ended."""
        if self._are_kept and rank not in self._state.workers.lost and self._state.phase is JobPhase.RUNNING:
            self._state.timers.set(Timer.LEFT, now + _LEFT_S, partial(self._on_left, rank), of=rank)
        return self._answer_all_but(rank)

    def _on_left(self, rank: int, now: float) -> list[Action]:
        """Tell those that still work, and may wait for it, that a rank has ended well."""
        others = self._state.workers.working
        return [Send(others, RanksLost((rank,)))] if others and self._state.phase is JobPhase.RUNNING else []

    def _answer_all_but(self, gone: int) -> list[Action]:
        """Answer those that have waited for this rank only, which waits no longer itself."""
        self._forget(gone)
        return [action for ranks in tuple(self._waiting) for action in self._answer(ranks)]

    def handle(self, event: LiveRanksAsked, now: float) -> list[Action]:
        self._forget(event.rank)  # whatever has ended an earlier wait
        self._waiting.setdefault(event.ranks, set()).add(event.rank)
        return self._answer(event.ranks)

    def _forget(self, rank: int) -> None:
        for waiting in self._waiting.values():
            waiting.discard(rank)

    def _answer(self, ranks: tuple[int, ...]) -> list[Action]:
        """Answer all that ask about these ranks, if those of them that live all do."""
        live, waiting = self._state.workers.working_of(ranks), self._waiting[ranks]
        if not live <= waiting:
            return []
        del self._waiting[ranks]
        answer = LiveRanks(dict.fromkeys(sorted(live), _INCARNATION))
        return [Send(tuple(sorted(waiting)), answer)] if waiting else []
