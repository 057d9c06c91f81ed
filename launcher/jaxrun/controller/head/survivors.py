"""--keep-survivors: the death of a rank other than 0 does not end the job; the others are told, and go on.

Rank 0 has JAX's coordinator, without which no rank lives on. live_devices is a barrier of the ranks that live: they
all get the same answer once the last of them has come, or the last that has not come has died. A rank that was started
again (rank_returns.py) lives again if it has come by then.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from jaxrun.controller.head.device_orders import DeviceOrders
from jaxrun.controller.head.divergence_detector import DivergenceDetector
from jaxrun.controller.head.head_state import HeadState, JobPhase
from jaxrun.controller.head.rank_returns import RankReturns
from jaxrun.controller.head.replacement_hosts import ReplacementHosts
from jaxrun.controller.head.timers import Timer
from jaxrun.controller.roster import Roster
from jaxrun.job_events.actions import Action, PrintLoss, RankLoss, Send
from jaxrun.protocol.flight import is_in_group
from jaxrun.protocol.survivor_messages import LiveRanks, LiveRanksAsked, RanksLost
from jaxrun.protocol.worker_messages import Exit

_LEFT_S = 1.0  # the others may still receive what a rank that has ended well has sent to them


class Survivors:
    def __init__(
        self,
        state: HeadState,
        divergence: DivergenceDetector,
        returns: RankReturns,
        orders: DeviceOrders,
        hosts: ReplacementHosts,
        roster: Roster,
        *,
        are_kept: bool,
    ) -> None:
        self._state = state
        self._hosts = hosts
        self._roster = roster
        self._orders = orders
        self._returns = returns
        self._divergence = divergence
        self._are_kept = are_kept
        # The ranks that wait with what they have asked, by the ranks about which they ask.
        self._waiting: dict[tuple[int, ...], dict[int, LiveRanksAsked]] = {}
        self._unprinted: dict[int, RankLoss] = {}  # by rank; the losses of one host are printed together

    @property
    def are_kept(self) -> bool:
        return self._are_kept

    def go_on_without(self, rank: int) -> bool:
        """Whether the job goes on if this rank fails: its program runs, or it was started again."""
        if rank in self._state.workers.lost and not self._returns.is_under_way(rank):
            return True  # its end says nothing new
        is_running = self._are_kept and self._state.phase is JobPhase.RUNNING
        return is_running and self._state.workers.has_coordinator and not self.why_all_end(rank)

    def why_all_end(self, rank: int, *, leaves: bool = False) -> str:
        """Explain why the others cannot go on without this rank, which fails; empty if they can.

        leaves:  it does not fail yet, but its pod goes away
        """
        if not self._are_kept or self._state.run_at is None:
            return ""
        if rank == 0:
            return "rank 0 has JAX's coordinator, without which no rank goes on"
        return self._returns.why_not(rank, leaves=leaves) if self._takes_back(rank) else ""

    def _takes_back(self, rank: int) -> bool:
        """Whether to start this failing rank again: no longer once its program, or rank 0's, has ended well."""
        workers = self._state.workers
        return self._returns.most > 0 and bool(workers.working_of((0,))) and not workers.has_finished(rank)

    def on_loss(self, rank: int, now: float) -> list[Action]:
        """Tell the others that a rank has failed; only once, also if its process ends later. Start it again."""
        workers = self._state.workers
        if rank in workers.lost and not self._returns.is_under_way(rank):
            return []
        workers.add_lost(rank, now)
        self._divergence.remove_rank(rank, now)
        failed, incarnation = workers.outcome(rank, now), workers.incarnation(rank)
        starts, restart = list[Action](), None
        if self._takes_back(rank):
            starts = self._returns.on_loss(rank, now)
            restart = self._returns.used if self._returns.counts(rank) else 0
        else:
            self._returns.give_up(rank)
        self._unprinted[rank] = RankLoss(failed, incarnation, restart)
        told = [Send(workers.working, RanksLost((rank,), {rank: incarnation}))] if workers.working else []
        lines = [] if workers.is_agent_lost(rank) else self._print_losses((rank,), now)
        return [*lines, *told, *self._answer_all_but(rank, now), *starts]

    def on_agent_lost(self, ranks: Sequence[int], now: float) -> list[Action]:
        """Print the losses of all ranks of a host together, once the last one is known; start these ranks again.

        ranks:  of an agent that is lost; there may be others on its host
        """
        if not ranks or not self._are_kept or self._state.phase is not JobPhase.RUNNING:
            return []
        on_host = self._roster.ranks_beside(ranks[0])
        if not self._roster.is_host_there(ranks[0]) and not all(map(self._state.workers.has_ended, on_host)):
            return []
        return [*self._print_losses(on_host, now), *self._returns.on_agent_lost(ranks, on_host, now)]

    def _print_losses(self, ranks: Sequence[int], now: float) -> list[Action]:
        losses = tuple(self._unprinted.pop(rank) for rank in ranks if rank in self._unprinted)
        if not losses:
            return []
        first, run_at, others = losses[0].worker.rank, self._state.run_at or now, self._state.workers.working
        spare, waits = self._hosts.spare_for(first), self._hosts.is_awaited(first)
        return [PrintLoss(losses, others, run_at, self._returns.most, spare, waits)]

    def on_done(self, rank: int) -> list[Action]:
        """Let a rank whose program has ended well leave at once: those that need it then see that it is gone."""
        self._returns.give_up(rank)
        return [Send((rank,), Exit())] if self._are_kept and rank and self._state.workers.working else []

    def on_ended(self, rank: int, now: float) -> list[Action]:
        """Answer those that have waited in live_devices for this rank, whose program has ended."""
        if self._are_kept and rank not in self._state.workers.lost and self._state.phase is JobPhase.RUNNING:
            self._state.timers.set(Timer.LEFT, now + _LEFT_S, partial(self._on_left, rank), of=rank)
        return self._answer_all_but(rank, now)

    def _on_left(self, rank: int, now: float) -> list[Action]:
        """Tell those that still work, and may wait for it, that a rank has ended well."""
        others = self._state.workers.working
        lost = RanksLost((rank,), {rank: self._state.workers.incarnation(rank)})
        return [Send(others, lost)] if others and self._state.phase is JobPhase.RUNNING else []

    def _answer_all_but(self, gone: int, now: float) -> list[Action]:
        """Answer those that have waited for this rank only, which waits no longer itself."""
        self._forget(gone)
        return self.answer_waiting(now)

    def answer_waiting(self, now: float) -> list[Action]:
        """Answer those that wait in live_devices, if they wait for no rank any more."""
        return [action for ranks in tuple(self._waiting) for action in self._answer(ranks, now)]

    def handle(self, event: LiveRanksAsked, now: float) -> list[Action]:
        self._forget(event.rank)  # whatever has ended an earlier wait
        self._waiting.setdefault(event.ranks, {})[event.rank] = event
        return self._answer(event.ranks, now)

    def _forget(self, rank: int) -> None:
        for waiting in self._waiting.values():
            waiting.pop(rank, None)

    def _answer(self, ranks: tuple[int, ...], now: float) -> list[Action]:
        """Answer all that ask about these ranks, if those of them that live all do."""
        workers, waiting = self._state.workers, self._waiting[ranks]
        if not waiting or not workers.working_of(ranks) <= waiting.keys():
            return []
        is_running = self._state.phase is JobPhase.RUNNING and workers.working_count > 0
        is_open = is_running and not self._state.stop.is_asked
        ready = self._returns.ready(waiting) if is_open else ()
        order = self._choose_order(ranks, ready, may_wait=is_open)
        if order is None:
            return []
        admitted = [rank for rank in ready if rank in order]
        back = self._returns.admit(admitted, now)
        for rank in admitted:
            self._divergence.restore_rank(rank)
        workers.add_agreement(ranks)
        asked = [waiting.pop(rank) for rank in sorted(order)]
        incarnations = {rank: workers.incarnation(rank) for rank in sorted(order)}
        polls = max((one.polls for one in asked), default=0)
        questions = {one.rank: one.number for one in asked}
        answer = LiveRanks(incarnations, order, questions, _differing_calls(asked), polls)
        return [*back, *([Send(tuple(sorted(order)), answer)] if order else [])]

    def _choose_order(self, ranks: tuple[int, ...], ready: Sequence[int], *, may_wait: bool) -> tuple[int, ...] | None:
        """Return which of these ranks live, with those that are ready to come back, in the order of their devices.

        None if they cannot be connected in any order, but another rank that is on its way back may make that possible.
        """
        working = self._state.workers.working_of(ranks)
        for live in (working.union(ready), working):
            incarnations = {rank: self._state.workers.incarnation(rank) for rank in live}
            if (order := self._orders.choose(incarnations, self._state.platform)) is not None:
                return order
        if may_wait and self._returns.is_any_on_its_way(but=ready):
            return None
        return tuple(sorted(working.union(ready)))  # a rank that is connected in this order raises SpentOrderError


def _differing_calls(asked: Sequence[LiveRanksAsked]) -> dict[str, int]:
    """Return the largest number of calls in each group in which these ranks, those that are in it, have made others."""
    groups = {group for one in asked for group in one.calls}
    made = {group: {one.calls.get(group, 0) for one in asked if is_in_group(one.rank, group)} for group in groups}
    return {group: max(numbers) for group, numbers in sorted(made.items()) if len(numbers) > 1}
