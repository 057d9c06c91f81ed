"""Asks ranks what they are doing, and turns their replies into values, for people and for verdicts.

`then` is called once all ranks have replied, or with the replies that arrived in time. What a reply shows of a flight
recorder is kept as it arrives: by the time of `then`, the rank may have ended, and its last flight be known.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping

from jaxrun.analysis.diagnosis.helpers import Helpers, helpers_of
from jaxrun.analysis.diagnosis.job_stacks import JobStacks
from jaxrun.analysis.diagnosis.nccl_ras import NCCL_TIMEOUT_S, ProcessIdentity, locate_ranks
from jaxrun.analysis.diagnosis.root_cause import own_thread_failures
from jaxrun.analysis.diagnosis.stacks import NATIVE_STACKS_TIMEOUT_S
from jaxrun.analysis.diagnosis.wait_graph import WaitGraph, find_wait_graph
from jaxrun.analysis.lockstep.straggler import Straggler
from jaxrun.controller.head.head_state import HeadState
from jaxrun.controller.head.round import Round
from jaxrun.controller.head.timers import Timer
from jaxrun.job_events.actions import Action, PrintStacks, Send
from jaxrun.protocol.flight import Flight
from jaxrun.protocol.nccl_report import NcclReport
from jaxrun.protocol.query_messages import RankDetail, RankQuery, RankReply

_HELD_UP_S = 1.0  # that a straggler waits for others; less happens because hosts do not answer at the same moment
_REPLY_TIMEOUT_S = 1.5  # an agent waits at most half a second for stacks
_MORE_S = {
    RankDetail.NATIVE_STACKS: NATIVE_STACKS_TIMEOUT_S,
    RankDetail.NCCL: NCCL_TIMEOUT_S,
    RankDetail.NCCL_AT_END: NCCL_TIMEOUT_S,
}

Replies = Mapping[int, RankReply]  # of all ranks that were asked, in order
Continuation = Callable[[Replies, float], list[Action]]


class RankQueries:
    """The incomplete queries. Times are seconds since the epoch."""

    def __init__(self, state: HeadState, has_fault_handler: Callable[[int], bool]) -> None:
        """`has_fault_handler`: whether a rank has one; without it, the signal for stacks would kill the rank."""
        self._state = state
        self._has_fault_handler = has_fault_handler
        self._numbers = itertools.count(1)
        self._rounds: dict[int, tuple[RankDetail, Round[int, RankReply]]] = {}  # those that are not over, by number

    def ask(self, ranks: Iterable[int], detail: RankDetail, then: Continuation, now: float) -> list[Action]:
        """Ask these ranks, except those that cannot reply; if none can, `then` is called at once."""
        asked = tuple(filter(self._has_fault_handler, ranks) if detail.needs_signal else ranks)
        if not asked:
            return then({}, now)
        number = next(self._numbers)

        def end(replies: Replies, now: float) -> list[Action]:
            del self._rounds[number]
            return then({rank: replies.get(rank) or RankReply(rank) for rank in asked}, now)

        one = Round(asked, end)
        self._rounds[number] = (detail, one)
        limit = now + _REPLY_TIMEOUT_S + _MORE_S.get(detail, 0.0)
        one.limit(self._state.timers, Timer.QUERY, limit, of=number)
        return [Send(asked, RankQuery(number, detail))]

    def ask_stacks(self, ranks: Iterable[int], then: Continuation, now: float, *, native: bool = False) -> list[Action]:
        """Ask where these ranks are; `native`: with C frames."""
        return self.ask(ranks, RankDetail.NATIVE_STACKS if native else RankDetail.STACKS, then, now)

    def ask_nccl(
        self,
        stacks: Replies,
        then: Callable[[NcclReport | None, float], list[Action]],
        now: float,
        *,
        at_end: bool = False,
    ) -> list[Action]:
        """Ask NCCL's own service, unless these `stacks` already show for whom the ranks wait.

        One rank is asked, which knows about all. `at_end`: the job is about to end, so even a crash would do no harm.
        """
        asked = next((rank for rank, reply in stacks.items() if reply.stacks), None)
        if asked is None or not self.wait_graph(stacks, now).all_in_one_call:
            return then(None, now)

        def find_ranks(answers: Replies, now: float) -> list[Action]:
            report = answers[asked].nccl
            if report is None or not report.differing:
                return then(report, now)

            def locate(identities: Replies, now: float) -> list[Action]:
                known = {rank: ProcessIdentity(one.own_pid, one.addresses) for rank, one in identities.items()}
                return then(locate_ranks(report, known), now)

            return self.ask(self._state.workers.live, RankDetail.IDENTITY, locate, now)

        detail = RankDetail.NCCL_AT_END if at_end else RankDetail.NCCL
        return self.ask((asked,), detail, find_ranks, now)

    def wait_graph(self, replies: Replies, now: float) -> WaitGraph:
        """Return who waits for whom among the ranks that have replied to `ask_stacks`."""
        return find_wait_graph(
            flights_of(replies), dumps_of(replies), kernel_waits_of(replies), self.helpers(replies, now)
        )

    def show(self, now: float) -> list[Action]:
        def show(replies: Replies, now: float) -> list[Action]:
            return self.ask_nccl(replies, lambda nccl, now: [PrintStacks(self.stacks(replies, now, nccl=nccl))], now)

        return self.ask_stacks(self._state.workers.working, show, now)

    def stacks(
        self, replies: Replies, now: float, *, native: bool = False, nccl: NcclReport | None = None
    ) -> JobStacks:
        """Return where the ranks are that have replied to `ask_stacks`, and NCCL's report from `ask_nccl`."""
        workers = self._state.workers
        return JobStacks(
            time=now,
            hosts=workers.hosts,
            dumps=dumps_of(replies),
            waits=kernel_waits_of(replies),
            flights=dict(self._state.flights),
            helpers=self.helpers(replies, now),
            finished=workers.live_reported,
            straggler=self.straggler(replies),
            platform=self._state.platform,
            natives={rank: reply.native_stacks for rank, reply in replies.items()} if native else None,
            nccl=nccl,
        )

    def straggler(self, replies: Replies) -> Straggler | None:
        """Return who slows the others down; None while it has to wait for others itself."""
        found, flights = self._state.straggler, flights_of(replies)
        graph = find_wait_graph(flights)
        known = [rank for rank in found.ranks if rank in flights] if found is not None else []
        is_held_up = [graph.waiting_s(rank, flights[rank], replies[rank].time) >= _HELD_UP_S for rank in known]
        return None if is_held_up and all(is_held_up) else found

    def helpers(self, replies: Replies, now: float) -> dict[int, Helpers]:
        """Return the threads and processes that these ranks have started."""
        failures = {rank: own_thread_failures(self._state.workers.outcome(rank, now)) for rank in replies}
        lost = {rank: self._state.workers.lost_pool_workers(rank) for rank in replies}
        return helpers_of(replies, failures, lost)

    def handle(self, reply: RankReply, now: float) -> list[Action]:
        if reply.number not in self._rounds:
            return []
        detail, one = self._rounds[reply.number]
        if detail.has_last_calls and reply.rank in one.missing:
            self._state.flights[reply.rank] = reply.flight
        return one.end(now) if one.add(reply.rank, reply) else []


def flights_of(replies: Replies) -> dict[int, Flight]:
    return {rank: reply.flight for rank, reply in replies.items() if reply.number}


def dumps_of(replies: Replies) -> dict[int, str]:
    """Return the dumps of the fault handlers; empty for a rank that did not answer."""
    return {rank: reply.stacks for rank, reply in replies.items()}


def kernel_waits_of(replies: Replies) -> dict[int, str]:
    return {rank: reply.kernel_wait for rank, reply in replies.items()}
