"""One map of a plain Python function: cuts the items into batches, hands them to an executor and orders the results.

The first batches hold one item each. Once an item's time is known, a batch takes about 10 ms; towards the end batches
get smaller, so that all processes finish at about the same time.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sized
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol, Self

from jaxrun.protocol.map_messages import CallBatch

PLAIN_PYTHON = "plain Python"

_BATCH_S = 0.01  # time that a batch should take; sending one costs about 0.1 ms
_CODE_S_PER_BYTE = 1e-7  # added to it for the pickled function, which travels with each batch
_SHORT_BATCH_S = 0.05  # only batches that take less may wait behind another one
_MAX_BATCH_ITEMS = 4096
_AHEAD_BATCHES = 8  # for each process: how far `imap` runs ahead of the results that have been asked for


class BatchOutcome(NamedTuple):
    """A result for each item of a batch, as far as it got; `errors` are the exceptions raised, by position."""

    results: list[Any]
    errors: Mapping[int, BaseException]
    seconds: float


class BatchExecutor(Protocol):
    """Runs batches, each in one of several processes."""

    @property
    def processes(self) -> int: ...

    def submit(self, batch: CallBatch) -> Future[BatchOutcome]:
        """Start a batch. Raises what pickling its items raises."""

    def wait(self, batches: Collection[Future[BatchOutcome]], timeout: float | None) -> None:
        """Wait until one of `batches` is done, at most `timeout` seconds."""


def pickle_function(f: Callable[..., Any], static: Mapping[str, Any] | None) -> bytes:
    """Pickle a function with its keyword arguments, in the form that the ranks load."""
    import cloudpickle

    return bytes(cloudpickle.dumps((f, dict(static or {}))))


class PythonMap:
    """A map in progress. Batches are submitted and collected while the caller waits for results.

    Either call `results`, for all results at once, or iterate. With `continue_on_error` an item that raises does not
    end the iteration: its exception is raised in its place, and the next results follow.
    """

    def __init__(
        self,
        executor: BatchExecutor,
        code: bytes,
        items: Iterable[Any],
        *,
        batch_size: int | None = None,
        unpack_items: bool = False,
        continue_on_error: bool = False,
        ordered: bool = True,
    ) -> None:
        self._executor = executor
        self._code = code
        self._left = len(items) if isinstance(items, Sized) else None
        self._items = iter(items)
        self._batch_size = batch_size
        self._unpack_items = unpack_items
        self._continue_on_error = continue_on_error
        self._ordered = ordered
        self._item_s: float | None = None
        self._exhausted = False
        self._failure: BaseException | None = None
        self._running: dict[Future[BatchOutcome], int] = {}  # with the number of the batch's first item
        self._outcomes: dict[int, BatchOutcome] = {}  # collected and not delivered, by the number of the first item
        self._delivered = 0
        self._lock = threading.Lock()  # `submit_all` is called by another thread
        self._current: deque[tuple[Any, BaseException | None]] = deque()
        self.item_count = 0
        self.largest_batch = 0

    def results(self) -> list[Any]:
        """Return all results, in order. Raises the first error that becomes known."""
        while self._advance(None, look_ahead=math.inf):
            if self._failure is not None:
                break
        if self._failure is not None:
            raise self._failure
        return list(itertools.chain.from_iterable(self._outcomes[start].results for start in sorted(self._outcomes)))

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        return self.next()

    def next(self, timeout: float | None = None) -> Any:
        """Return the next result. Raises multiprocessing.TimeoutError if none comes within `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._current and not self._deliver():
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left < 0:
                from multiprocessing import TimeoutError

                raise TimeoutError(f"no result within {timeout:g} s")
            if not self._advance(left, look_ahead=_AHEAD_BATCHES):
                failure, self._failure = self._failure, None
                raise failure or StopIteration
        result, error = self._current.popleft()
        if error is not None:
            raise error
        return result

    def submit_all(self) -> None:
        """Submit all that is left, however far ahead of the results asked for: the executor is about to be closed."""
        with self._lock:
            self._submit(math.inf, max_running=math.inf)

    def _deliver(self) -> bool:
        """Make the next batch's results current; False if that batch is not done."""
        start = self._delivered if self._ordered else next(iter(self._outcomes), -1)
        if start not in self._outcomes:
            return False
        outcome = self._outcomes.pop(start)
        self._delivered += len(outcome.results)
        self._current.extend((result, outcome.errors.get(place)) for place, result in enumerate(outcome.results))
        return True

    def _advance(self, timeout: float | None, *, look_ahead: float) -> bool:
        """Submit what there is room for, and wait for a batch; False if none is running."""
        with self._lock:
            self._submit(look_ahead)
            running = list(self._running)
        if not running:
            return False
        self._executor.wait(running, timeout)
        with self._lock:
            for future in [future for future in running if future.done()]:
                self._collect(self._running.pop(future), future)
            self._submit(look_ahead)
        return True

    def _submit(self, look_ahead: float, max_running: float | None = None) -> None:
        while not self._exhausted and len(self._running) < (max_running or self._max_running()):
            size = self._next_size()
            if self.item_count - self._delivered >= look_ahead * self._executor.processes * size:
                return
            start = self.item_count
            try:
                items = list(itertools.islice(self._items, size))
            except Exception as error:  # raised by the caller's iterator
                self._fail(error)
                return
            if not items:
                self._exhausted = True
                return
            batch = CallBatch(self._code, self._unpack_items, items, self._continue_on_error)
            try:
                self._running[self._executor.submit(batch)] = start
            except Exception as error:
                error.add_note(f"an item of {start} to {start + len(items) - 1} cannot be sent to another process")
                self._fail(error)
                return
            self.item_count += len(items)
            self.largest_batch = max(self.largest_batch, len(items))
            self._left = None if self._left is None else self._left - len(items)

    def _max_running(self) -> int:
        short = self._item_s is not None and self._item_s * self._next_size() < _SHORT_BATCH_S
        return self._executor.processes * (2 if short else 1)

    def _next_size(self) -> int:
        """Return how many items the next batch should have."""
        if self._batch_size is not None:
            return self._batch_size
        if self._item_s is None:
            return 1
        by_time = int((_BATCH_S + len(self._code) * _CODE_S_PER_BYTE) / max(self._item_s, 1e-9))
        fair = math.ceil(self._left / (2 * self._executor.processes)) if self._left is not None else _MAX_BATCH_ITEMS
        return max(1, min(by_time, fair, _MAX_BATCH_ITEMS))

    def _collect(self, start: int, future: Future[BatchOutcome]) -> None:
        error = future.exception()
        if error is not None:
            self._fail(error)
            return
        outcome = future.result()
        self._item_s = outcome.seconds / max(1, len(outcome.results))
        for place, error in outcome.errors.items():
            error.add_note(f"raised for item {start + place}")
        if outcome.errors and not self._continue_on_error:
            self._fail(outcome.errors[min(outcome.errors)])
        else:
            self._outcomes[start] = outcome

    def _fail(self, error: BaseException) -> None:
        """End the map with `error`, unless another one has ended it."""
        self._failure = self._failure or error
        self._exhausted = True
