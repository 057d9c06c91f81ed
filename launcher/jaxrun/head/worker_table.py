"""What the head knows of each rank: whether it lives, what it said, how it ended."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from jaxrun.diagnosis.worker_outcome import InjectedFault, WorkerOutcome
from jaxrun.head.events import AgentLost
from jaxrun.protocol.agent_messages import WorkerExited
from jaxrun.protocol.worker_messages import Failed, ThreadFailed


@dataclass(slots=True)
class _Worker:
    spawned: bool = False
    done: bool = False
    stopped: bool = False
    sign: float | None = None  # when it first showed that it ends
    words: Failed | None = None
    threads: list[ThreadFailed] = field(default_factory=list)
    exited: WorkerExited | None = None
    lost: str = ""
    dealt: list[InjectedFault] = field(default_factory=list)


class WorkerTable:
    """All ranks of one job; `hosts` maps each to its host. Times are seconds since the epoch."""

    def __init__(self, hosts: Mapping[int, str]) -> None:
        self.hosts = dict(hosts)
        self._workers = {rank: _Worker() for rank in sorted(hosts)}
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
        return self._live == {0} and not self._workers[0].stopped

    @property
    def live_without_failure(self) -> tuple[int, ...]:
        """Those of them that have not said their last words."""
        return tuple(rank for rank in self.live if self._workers[rank].words is None)

    @property
    def live_reported(self) -> tuple[int, ...]:
        """Those of them that have said how their program ended."""
        return tuple(rank for rank in self.live if self._workers[rank].done or self._workers[rank].words)

    def add_process(self, rank: int) -> None:
        known = self._workers[rank]
        known.spawned = True
        if not (known.exited or known.lost):
            self._live.add(rank)
            self._working.add(rank)

    def add_done(self, rank: int, now: float) -> None:
        self._workers[rank].done = True
        self._working.discard(rank)
        self._sign(rank, now)

    def add_failure(self, words: Failed, now: float) -> None:
        self._workers[words.rank].words = words
        self._sign(words.rank, now)

    def add_thread_failure(self, words: ThreadFailed) -> None:
        self._workers[words.rank].threads.append(words)

    def add_exit(self, exited: WorkerExited, now: float) -> None:
        known = self._workers[exited.rank]
        known.exited = exited
        self._gone(exited.rank)
        if exited.status != 0 and known.words is None and not known.stopped:
            known.sign = None  # that it had finished well is no sign of this end
        self._sign(exited.rank, now)

    def add_loss(self, lost: AgentLost, now: float) -> None:
        known = self._workers[lost.rank]
        known.lost = lost.reason
        known.stopped |= lost.ended_by_launch_command and known.words is None
        self._gone(lost.rank)
        if known.words is None:
            known.sign = None
        self._sign(lost.rank, now)

    def has_ended(self, rank: int) -> bool:
        """Whether it is known how it ended, or known that nobody will know."""
        known = self._workers[rank]
        return known.exited is not None or known.lost != ""

    def has_worker(self, rank: int) -> bool:
        """Whether it was started, be it alive or not."""
        return self._workers[rank].spawned

    def mark_killed(self, ranks: Iterable[int]) -> None:
        """The launcher kills them. Who has said its last words keeps them as the reason of its end."""
        for rank in ranks:
            self._workers[rank].stopped |= self._workers[rank].words is None

    def add_injected_fault(self, rank: int, fault: InjectedFault) -> None:
        """This is being done to it on order."""
        self._workers[rank].dealt.append(fault)

    def remove_injected_fault(self, rank: int, kind: str) -> None:
        """It could not be done."""
        self._workers[rank].dealt = [fault for fault in self._workers[rank].dealt if fault.kind != kind]

    def outcomes(self, now: float) -> tuple[WorkerOutcome, ...]:
        return tuple(self.outcome(rank, now) for rank in self._workers)

    def _gone(self, rank: int) -> None:
        self._live.discard(rank)
        self._working.discard(rank)

    def _sign(self, rank: int, now: float) -> None:
        if self._workers[rank].sign is None:
            self._workers[rank].sign = now

    def outcome(self, rank: int, now: float) -> WorkerOutcome:
        """How it ended, as far as that is known."""
        known = self._workers[rank]
        exited = known.exited
        return WorkerOutcome(
            rank=rank,
            host=self.hosts[rank],
            time=now if known.sign is None else known.sign,
            status=exited.status if exited else None,
            failure=known.words,
            thread_failures=tuple(known.threads),
            crash_dump=exited.crash_dump if exited else "",
            stderr_tail=exited.stderr_tail if exited else "",
            killed_by_launcher=known.stopped,
            finished=known.done,
            out_of_memory=exited.out_of_memory if exited else "",
            lost_reason=known.lost,
            injected_faults=tuple(known.dealt),
        )
