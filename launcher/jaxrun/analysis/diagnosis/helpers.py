"""A rank's helper threads and processes, which may bring its data, and whether they are alive."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct

from jaxrun.protocol.error_chain import ErrorChain
from jaxrun.protocol.query_messages import ChildProcess, RankReply
from jaxrun.protocol.worker_messages import ThreadFailed


class LostThread(Struct, frozen=True):
    """A thread of the program that ended with an exception, of the type `error`; `chain` is empty if it is unknown."""

    name: str
    error: str
    chain: ErrorChain = ()


class FailedSave(Struct, frozen=True):
    """A save in the background that failed in a thread; `step` is None if it is unknown."""

    thread: str
    step: int | None
    chain: ErrorChain


class LostPoolWorker(Struct, frozen=True):
    """A worker of a process pool that died while the pool was running.

    A multiprocessing.Pool has replaced it; an executor of concurrent.futures is broken since.

    time:    when the head heard of it, in seconds since the epoch
    status:  as in `subprocess`, negative for a signal
    pid:     0 if it is unknown
    """

    time: float
    status: int
    pid: int = 0


class Helpers(Struct, frozen=True):
    """The threads and processes that a rank has started.

    children:      processes that are alive, and those that have ended and that the rank has not waited for
    lost_threads:  threads that ended with an exception, in the order in which they ended
    failed_saves:  background saves that have failed, likewise
    lost_workers:  of process pools, in the order in which they ended
    """

    children: tuple[ChildProcess, ...] = ()
    lost_threads: tuple[LostThread, ...] = ()
    failed_saves: tuple[FailedSave, ...] = ()
    lost_workers: tuple[LostPoolWorker, ...] = ()

    @property
    def dead_children(self) -> tuple[ChildProcess, ...]:
        return tuple(child for child in self.children if child.status is not None)

    @property
    def live_children(self) -> tuple[ChildProcess, ...]:
        return tuple(child for child in self.children if child.status is None)

    @property
    def any_dead(self) -> bool:
        return bool(self.dead_children or self.lost_threads or self.lost_workers)


NO_HELPERS = Helpers()


def helpers_of(
    replies: Mapping[int, RankReply],
    thread_failures: Mapping[int, Sequence[ThreadFailed]],
    lost_workers: Mapping[int, tuple[LostPoolWorker, ...]],
) -> dict[int, Helpers]:
    """Return the helpers of each rank that has any, from the replies and from what the ranks reported as lost."""
    failed = {rank: tuple(thread_failures.get(rank, ())) for rank in replies}
    found = {
        rank: Helpers(
            reply.children,
            tuple(LostThread(one.thread, one.error, one.chain) for one in failed[rank] if one.save is None),
            failed_saves_of(failed[rank]),
            lost_workers.get(rank, ()),
        )
        for rank, reply in replies.items()
    }
    return {rank: helpers for rank, helpers in found.items() if helpers != NO_HELPERS}


def failed_saves_of(failures: Sequence[ThreadFailed]) -> tuple[FailedSave, ...]:
    return tuple(FailedSave(one.thread, one.save.step, one.chain) for one in failures if one.save is not None)
