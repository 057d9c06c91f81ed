"""Batches of a plain Python function on the ranks of a gang, one at a time on each.

RankExecutor   during one call of a gang, driven by the thread that waits
GangExecutor   the same in a thread of its own: for a pool over several hosts
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from concurrent import futures
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING

from jaxrun import RUNTIME
from jaxrun.frontends.gang.call import GangCall
from jaxrun.frontends.gang.call_events import RankMessage, Returned
from jaxrun.frontends.gang.exceptions import GangError, RemoteFailure, combined_exception
from jaxrun.frontends.map import gang_calls
from jaxrun.frontends.map.python_map import BatchOutcome
from jaxrun.protocol.map_messages import BatchResult, CallBatch
from jaxrun.protocol.payload import FunctionReference

if TYPE_CHECKING:
    from jaxrun.frontends.gang.gang import Gang

SERVE_BATCHES = FunctionReference(f"{RUNTIME}.map.python_calls", "serve")
_POLL_FREE_S = 0.005  # until GangExecutor sees a new batch, while a rank is free to run it
_POLL_FULL_S = 0.05  # the same while none is


class RankExecutor:
    """The ranks of a gang, during one call of it: one batch at a time on each. For the thread that holds the call."""

    def __init__(self, gang: Gang, call: GangCall) -> None:
        self._gang, self._call = gang, call
        self._idle = deque(worker.rank for worker in gang.workers)
        self._waiting: deque[tuple[CallBatch, Future[BatchOutcome]]] = deque()
        self._running: dict[int, Future[BatchOutcome]] = {}
        self._code: dict[int, bytes | None] = {}  # the function that each rank has loaded
        self.processes = len(self._idle)

    def submit(self, batch: CallBatch) -> Future[BatchOutcome]:
        future: Future[BatchOutcome] = Future()
        self.add(batch, future)
        return future

    def add(self, batch: CallBatch, future: Future[BatchOutcome]) -> None:
        self._waiting.append((batch, future))
        self._send_waiting()

    def wait(self, batches: Collection[Future[BatchOutcome]], timeout: float | None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while not any(batch.done() for batch in batches):
            if not self.poll(None if deadline is None else max(0.0, deadline - time.monotonic())):
                return

    def poll(self, timeout: float | None) -> bool:
        """Handle the next message of a rank; False if none came within `timeout` seconds. Raises WorkerDied."""
        match gang_calls.receive(self._call, timeout):
            case RankMessage(rank=rank, value=BatchResult() as result):
                future = self._running.pop(rank)
                self._idle.append(rank)
                self._send_waiting()  # before anybody works on the results
                host = self._gang.workers[rank].host
                errors = {
                    place: RemoteFailure.from_rank(rank, host, details).to_exception()
                    for place, details in result.errors.items()
                }
                future.set_result(BatchOutcome(result.results, errors, result.seconds))
            case Returned(error=error):  # before it was told to
                raise combined_exception([error] if error is not None else [])
            case None:
                return False
        return True

    @property
    def busy(self) -> bool:
        return bool(self._running or self._waiting)

    @property
    def full(self) -> bool:
        return not self._idle

    def fail(self, error: BaseException) -> None:
        """Make all batches fail that are not done."""
        for future in [*self._running.values(), *(future for _, future in self._waiting)]:
            future.set_exception(error)

    def _send_waiting(self) -> None:
        while self._waiting and self._idle:
            batch, future = self._waiting.popleft()
            rank = self._idle.popleft()
            known = self._code.get(rank) is batch.code
            try:
                self._call.send(replace(batch, code=None) if known else batch, [rank])
            except Exception as error:  # an item that cannot be pickled
                self._idle.appendleft(rank)
                future.set_exception(error)
            else:
                self._code[rank] = batch.code
                self._running[rank] = future


class GangExecutor:
    """A gang that is started with the first batch, held by a thread. Threads may use it."""

    def __init__(self, processes: int, start: Callable[[], Gang]) -> None:
        self.processes = processes
        self._start = start
        self._gang: Gang | None = None
        self._submitted: queue.SimpleQueue[tuple[CallBatch, Future[BatchOutcome]] | None] = queue.SimpleQueue()
        self._terminated = False
        self._thread = threading.Thread(target=self._serve, name="jaxrun-pool", daemon=True)
        self._lock = threading.Lock()

    def submit(self, batch: CallBatch, future: Future[BatchOutcome] | None = None) -> Future[BatchOutcome]:
        future = Future() if future is None else future
        with self._lock:
            if self._thread.ident is None:
                self._thread.start()
        self._submitted.put((batch, future))
        return future

    def wait(self, batches: Collection[Future[BatchOutcome]], timeout: float | None) -> None:
        futures.wait(batches, timeout, futures.FIRST_COMPLETED)

    def close(self) -> None:
        """Wait for all batches, and close the gang."""
        self._submitted.put(None)
        if self._thread.ident is not None:
            self._thread.join()

    def terminate(self) -> None:
        """Interrupt the ranks, and close the gang; the batches that are not done fail."""
        self._terminated = True
        self.close()

    def _serve(self) -> None:
        while not self._terminated and (first := self._submitted.get()) is not None:
            self._run(*first)
        terminated = GangError("the pool was terminated")
        with contextlib.suppress(queue.Empty):
            while (left := self._submitted.get_nowait()) is not None:
                left[1].set_exception(terminated)
        if self._gang is not None:
            self._gang.close()

    def _run(self, batch: CallBatch, future: Future[BatchOutcome]) -> None:
        """Run this batch and all that come meanwhile, in one call of the gang."""
        ranks: RankExecutor | None = None
        try:
            self._gang = self._gang or self._start()
            with self._gang.start_call(SERVE_BATCHES) as call:
                ranks = RankExecutor(self._gang, call)
                ranks.add(batch, future)
                while ranks.busy and not self._terminated:
                    ranks.poll(_POLL_FULL_S if ranks.full else _POLL_FREE_S)
                    self._add_submitted(ranks)
                if not self._terminated:
                    gang_calls.finish(call)
            ranks.fail(GangError("the pool was terminated"))
        except BaseException as error:  # a gang that does not start, a rank that has died: those who wait must know
            if ranks is not None:
                ranks.fail(error)
            else:
                future.set_exception(error)

    def _add_submitted(self, ranks: RankExecutor) -> None:
        with contextlib.suppress(queue.Empty):
            while (more := self._submitted.get_nowait()) is not None:
                ranks.add(*more)
            self._submitted.put(None)  # for _serve
