"""A Python function, one item after the other, over the processes of a gang: as multiprocessing.Pool.map does it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from jaxrun import RUNTIME
from jaxrun.gang.call import Disconnected, GangCall, LauncherOutput, Printed, RankMessage, Returned
from jaxrun.gang.exceptions import WorkerDied, combined_exception
from jaxrun.map.stats import MapStats, record_stats
from jaxrun.map.tasks import Task
from jaxrun.protocol.map_messages import BatchResult, CallBatch, EndOfChunks
from jaxrun.protocol.payload import FunctionReference

if TYPE_CHECKING:
    from jaxrun.gang.gang import BaseGang

PLAIN = "plain Python"
SERVE = FunctionReference(f"{RUNTIME}.map.errands", "serve")


def pickled(f: Callable[..., Any], static: Mapping[str, Any] | None) -> bytes:
    """A function and keyword arguments for it, as the ranks take them."""
    import cloudpickle

    return bytes(cloudpickle.dumps((f, dict(static or {}))))


class Errands:
    """Deals the errands of tasks to the ranks of one conversation, the tasks in their order."""

    def __init__(self, gang: BaseGang, talk: GangCall) -> None:
        self._gang, self._talk = gang, talk
        self._hosts = {worker.rank: worker.host for worker in gang.workers}
        self._tasks: dict[int, Task] = {}
        self._hands = dict.fromkeys(self._hosts, 0)
        self._last: dict[int, int] = {}

    def add(self, task: Task) -> None:
        self._tasks[task.number] = task

    @property
    def idle(self) -> bool:
        """Whether nothing is to be done, or being done."""
        return not any(self._hands.values()) and all(task.over for task in self._tasks.values())

    @property
    def full(self) -> bool:
        """Whether every rank has something to do."""
        return all(self._hands.values())

    def deal(self) -> None:
        """Send the ranks what they have room for."""
        for task in list(self._tasks.values()):
            while not task.exhausted:
                rank = min(self._hands, key=lambda rank: (self._hands[rank], rank))
                if self._hands[rank] >= task.errands_at_once(len(self._hands)):
                    return
                start, items = task.take(len(self._hands))
                if not items:
                    break
                self._send(rank, task, start, items)
            if task.over:
                del self._tasks[task.number]

    def _send(self, rank: int, task: Task, start: int, items: list[Any]) -> None:
        code = None if self._last.get(rank) == task.number else task.code
        try:
            self._talk.send(CallBatch(task.number, code, task.star, start, items, task.through), [rank])
        except Exception as error:  # an item that cannot be pickled
            error.add_note(f"an item of {start} to {start + len(items) - 1} cannot be sent to another process")
            task.fail(error)
            return
        self._last[rank] = task.number
        self._hands[rank] += 1

    def receive(self, timeout: float | None) -> bool:
        """Take in what comes next; whether something came. Raises what ends the conversation."""
        match self._talk.receive(timeout):
            case RankMessage(rank=rank, value=BatchResult() as back):
                self._hands[rank] -= 1
                if task := self._tasks.get(back.task):
                    if not task.over:
                        task.took(back, rank, self._hosts[rank])
                    if task.over:
                        del self._tasks[task.number]
            case Printed() as printed:
                self._gang.show_printed(printed)
            case LauncherOutput() as told:
                self._gang.show_launcher_output(told)
            case Disconnected():
                died = self._talk.explain_death()
                assert died is not None
                raise died
            case Returned(error=error):
                raise combined_exception([error] if error is not None else [])
            case None:
                return False
        return True

    def all_there(self) -> bool:
        """Whether no rank has died meanwhile."""
        try:
            while self.receive(0):
                pass
        except WorkerDied:
            return False
        return True

    def finish(self) -> None:
        """Let the ranks go, and wait until they have."""
        self._talk.send(EndOfChunks())
        while self._talk.running:
            match self._talk.receive():
                case Printed() as printed:
                    self._gang.show_printed(printed)
                case LauncherOutput() as told:
                    self._gang.show_launcher_output(told)


def map(
    gang: BaseGang,
    f: Callable[..., Any],
    xs: Iterable[Any],
    *,
    size: int | None,
    static: Mapping[str, Any] | None,
    star: bool,
) -> list[Any]:
    """A list of `f` of each item. Raises what the first item raises of which it is known, and WorkerDied."""
    task = Task.over_all(pickled(f, static), xs, star=star, size=size)
    began = time.perf_counter()
    with gang.start_call(SERVE) as talk:
        errands = Errands(gang, talk)
        errands.add(task)
        errands.deal()
        while not task.over:
            errands.receive(None)
            errands.deal()
        results = task.results()
        errands.finish()
    record_stats(gang, MapStats.of(gang, PLAIN, task.largest, task.dealt, time.perf_counter() - began))
    return results


def imap(
    gang: BaseGang,
    f: Callable[..., Any],
    xs: Iterable[Any],
    *,
    size: int | None,
    static: Mapping[str, Any] | None,
    star: bool,
    ordered: bool,
) -> Iterator[Any]:
    """`f` of one item after the other; with `ordered` in their order. An item that raises ends it."""
    task = Task.over_all(pickled(f, static), xs, star=star, size=size, through=True)
    with gang.start_call(SERVE) as talk:
        errands = Errands(gang, talk)
        errands.add(task)
        errands.deal()
        while not task.consumed:
            while (came := task.next_results(ordered=ordered)) is not None:
                for result, error in came:
                    if error is not None:
                        raise error
                    yield result
                errands.deal()
            if not task.over:
                errands.receive(None)
                errands.deal()
        if task.failure is not None:
            raise task.failure
        errands.finish()
