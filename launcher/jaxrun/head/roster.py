"""What the head knows of each rank: whether it lives, what it said, how it ended."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from jaxrun.contract import Failed, ThreadFailed
from jaxrun.head.events import Exited, Lost
from jaxrun.verdict.ends import Dealt, End


@dataclass(slots=True)
class _Known:
    spawned: bool = False
    done: bool = False
    stopped: bool = False
    sign: float | None = None  # when it first showed that it ends
    words: Failed | None = None
    threads: list[ThreadFailed] = field(default_factory=list)
    exited: Exited | None = None
    lost: str = ""
    dealt: list[Dealt] = field(default_factory=list)


class Roster:
    """All ranks of one job; `hosts` maps each to its host. Times are seconds since the epoch."""

    def __init__(self, hosts: Mapping[int, str]) -> None:
        self.hosts = dict(hosts)
        self._known = {rank: _Known() for rank in sorted(hosts)}
        # Kept besides, so that an event need not look at every rank.
        self._live: set[int] = set()
        self._working: set[int] = set()

    @property
    def live(self) -> tuple[int, ...]:
        """Those that have a process."""
        return tuple(sorted(self._live))

    @property
    def working(self) -> tuple[int, ...]:
        """Those of them whose program has not ended well."""
        return tuple(sorted(self._working))

    @property
    def working_count(self) -> int:
        return len(self._working)

    @property
    def any_live(self) -> bool:
        return bool(self._live)

    @property
    def any_working(self) -> bool:
        return bool(self._working)

    @property
    def only_rank_0_left(self) -> bool:
        """Whether rank 0 alone lives, and was not killed."""
        return self._live == {0} and not self._known[0].stopped

    @property
    def silent(self) -> tuple[int, ...]:
        """Those of them that have not said their last words."""
        return tuple(rank for rank in self.live if self._known[rank].words is None)

    @property
    def waiting(self) -> tuple[int, ...]:
        """Those of them that have said how their program ended."""
        return tuple(rank for rank in self.live if self._known[rank].done or self._known[rank].words)

    def spawned(self, rank: int) -> None:
        known = self._known[rank]
        known.spawned = True
        if not (known.exited or known.lost):
            self._live.add(rank)
            self._working.add(rank)

    def done(self, rank: int, now: float) -> None:
        self._known[rank].done = True
        self._working.discard(rank)
        self._sign(rank, now)

    def spoke(self, words: Failed, now: float) -> None:
        self._known[words.rank].words = words
        self._sign(words.rank, now)

    def thread_failed(self, words: ThreadFailed) -> None:
        self._known[words.rank].threads.append(words)

    def exited(self, exited: Exited, now: float) -> None:
        known = self._known[exited.rank]
        known.exited = exited
        self._gone(exited.rank)
        if exited.status != 0 and known.words is None and not known.stopped:
            known.sign = None  # that it had finished well is no sign of this end
        self._sign(exited.rank, now)

    def lost(self, lost: Lost, now: float) -> None:
        known = self._known[lost.rank]
        known.lost = lost.text
        known.stopped |= lost.by_engine and known.words is None
        self._gone(lost.rank)
        if known.words is None:
            known.sign = None
        self._sign(lost.rank, now)

    def has_ended(self, rank: int) -> bool:
        """Whether it is known how it ended, or known that nobody will know."""
        known = self._known[rank]
        return known.exited is not None or known.lost != ""

    def has_worker(self, rank: int) -> bool:
        """Whether it was started, be it alive or not."""
        return self._known[rank].spawned

    def stopped(self, ranks: Iterable[int]) -> None:
        """The launcher kills them. Who has said its last words keeps them as the reason of its end."""
        for rank in ranks:
            self._known[rank].stopped |= self._known[rank].words is None

    def dealt(self, rank: int, fault: Dealt) -> None:
        """This is being done to it on order."""
        self._known[rank].dealt.append(fault)

    def spared(self, rank: int, kind: str) -> None:
        """It could not be done."""
        self._known[rank].dealt = [fault for fault in self._known[rank].dealt if fault.kind != kind]

    def ends(self, now: float) -> tuple[End, ...]:
        return tuple(self.end(rank, now) for rank in self._known)

    def _gone(self, rank: int) -> None:
        self._live.discard(rank)
        self._working.discard(rank)

    def _sign(self, rank: int, now: float) -> None:
        if self._known[rank].sign is None:
            self._known[rank].sign = now

    def end(self, rank: int, now: float) -> End:
        """How it ended, as far as that is known."""
        known = self._known[rank]
        exited = known.exited
        return End(
            rank=rank,
            host=self.hosts[rank],
            time=now if known.sign is None else known.sign,
            status=exited.status if exited else None,
            words=known.words,
            threads=tuple(known.threads),
            fatal=exited.fatal if exited else "",
            tail=exited.tail if exited else "",
            stopped=known.stopped,
            done=known.done,
            out_of_memory=exited.out_of_memory if exited else "",
            lost=known.lost,
            dealt=tuple(known.dealt),
        )
