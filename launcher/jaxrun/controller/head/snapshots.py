"""Asks where ranks are, and makes values of what they reply: for people, and for verdicts."""

from __future__ import annotations

from collections.abc import Iterable

from jaxrun.analysis.diagnosis.outcome import EndReason, JobOutcome
from jaxrun.analysis.diagnosis.snapshot import Snapshot
from jaxrun.controller.head.divergence_detector import DivergenceDetector
from jaxrun.controller.head.head_state import HeadState
from jaxrun.controller.head.queries import (
    Continuation,
    RankQueries,
    Replies,
    flights_of,
    kernel_waits_of,
    stacks_of,
)
from jaxrun.controller.head.straggler_detector import StragglerDetector
from jaxrun.protocol.snapshot_messages import RankDetail
from jaxrun.records.event_log.actions import Action, PrintSnapshot


class Snapshots:
    """Times are seconds since the epoch."""

    def __init__(
        self, state: HeadState, queries: RankQueries, divergence: DivergenceDetector, stragglers: StragglerDetector
    ) -> None:
        self._state = state
        self._queries = queries
        self._divergence = divergence
        self._stragglers = stragglers

    def ask(self, ranks: Iterable[int], then: Continuation, now: float, *, native: bool = False) -> list[Action]:
        """Ask where these ranks are; with `native` for C frames as well."""

        def add_flights(replies: Replies, now: float) -> list[Action]:
            self._divergence.flights.update(flights_of(replies))
            return then(replies, now)

        return self._queries.ask(ranks, RankDetail.NATIVE_STACKS if native else RankDetail.STACKS, add_flights, now)

    def show(self, now: float) -> list[Action]:
        """Print where the ranks that work are."""
        return self.ask(
            self._state.workers.working, lambda replies, now: [PrintSnapshot(self.snapshot(replies, now))], now
        )

    def snapshot(self, replies: Replies, now: float, *, native: bool = False) -> Snapshot:
        return Snapshot(
            time=now,
            hosts=self._state.workers.hosts,
            dumps=stacks_of(replies),
            waits=kernel_waits_of(replies),
            flights=dict(self._divergence.flights),
            finished=self._state.workers.live_reported,
            straggler=self._stragglers.straggler,
            natives={rank: reply.native_stacks for rank, reply in replies.items()} if native else None,
        )

    def outcome(self, reason: EndReason, replies: Replies, now: float) -> JobOutcome:
        """How the job ends because of where the ranks are."""
        return JobOutcome(
            reason,
            stacks=stacks_of(replies),
            kernel_waits=kernel_waits_of(replies),
            flights=dict(self._divergence.flights),
            decided_at=now,
        )
