"""One map of a plain Python function: cuts the items into batches, hands them to an executor and orders the results.

The first batches hold one item each. Once an item's time is known, a batch takes about 20 ms; towards the end batches
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

_BATCH_S = 0.02  # time that a batch should take; sending one and its results costs loky about 0.5 ms
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
    """A map in progress: whenever a batch is done, more are submitted, by the thread that the executor does that in.

    Either call `results`, for all results at once, or iterate; `look_ahead` is the number of batches for each process
    that an iteration runs ahead of the results asked for. With `continue_on_error` an item that raises does not
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
        look_ahead: float = _AHEAD_BATCHES,
    ) -> None:
        self._executor = executor
        self._code = code
        self._left = len(items) if isinstance(items, Sized) else None
        self._items = iter(items)
        self._batch_size = batch_size
        self._unpack_items = unpack_items
        self._continue_on_error = continue_on_error
        self._ordered = ordered
        self._look_ahead = look_ahead
        self._item_s: float | None = None
        self._exhausted = False
        self._failure: BaseException | None = None
        self._running: dict[Future[BatchOutcome], int] = {}  # with the number of the batch's first item
        self._outcomes: dict[int, BatchOutcome] = {}  # collected and not delivered, by the number of the first item
        self._delivered = 0
        self._lock = threading.RLock()
        self._current: deque[tuple[Any, BaseException | None]] = deque()
        self.item_count = 0
        self.largest_batch = 0

    def results(self) -> list[Any]:
        """Return all results, in order. Raises the first error that becomes known."""
        self._look_ahead = math.inf
        while self._failure is None and self._wait(None):
            pass
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
            if not self._wait(left) and not self._deliver():
                failure, self._failure = self._failure, None
                raise failure or StopIteration
        result, error = self._current.popleft()
        if error is not None:
            raise error
        return result

    def start(self) -> None:
        """Submit the first batches, for a caller that may ask for results later."""
        self._submit()

    def submit_all(self) -> None:
        """Submit all that is left, however far ahead of the results asked for: the executor is about to be closed."""
        self._look_ahead = math.inf
        self._submit(max_running=math.inf)

    def _deliver(self) -> bool:
        """Make the next batch's results current; False if that batch is not done."""
        start = self._delivered if self._ordered else next(iter(self._outcomes), -1)
        if start not in self._outcomes:
            return False
        outcome = self._outcomes.pop(start)
        self._delivered += len(outcome.results)
        self._current.extend((result, outcome.errors.get(place)) for place, result in enumerate(outcome.results))
        return True

    def _wait(self, timeout: float | None) -> bool:
        """Wait for a batch, at most `timeout` seconds; False if none is running."""
        self._submit()
        running = list(self._running)
        if running:
            self._executor.wait(running, timeout)
        return bool(running)

    def _submit(self, max_running: float | None = None) -> None:
        """Submit batches as long as there is room, and items are left."""
        with self._lock:
            while not self._exhausted and len(self._running) < (max_running or self._max_running()):
                size = self._next_size()
                if self.item_count - self._delivered >= self._look_ahead * self._executor.processes * size:
                    return
                try:
                    items = list(itertools.islice(self._items, size))
                except Exception as error:  # raised by the caller's iterator
                    self._fail(error)
                    return
                self._exhausted = not items
                if items:
                    self._submit_batch(items)

    def _submit_batch(self, items: list[Any]) -> None:
        start = self.item_count
        self.item_count += len(items)
        self.largest_batch = max(self.largest_batch, len(items))
        self._left = None if self._left is None else self._left - len(items)
        try:
            future = self._executor.submit(CallBatch(self._code, self._unpack_items, items, self._continue_on_error))
        except Exception as error:
            error.add_note(f"an item of {start} to {start + len(items) - 1} cannot be sent to another process")
            self._fail(error)
            return
        self._running[future] = start
        future.add_done_callback(self._collect)

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

    def _collect(self, future: Future[BatchOutcome]) -> None:
        """Keep the results of a batch that is done, and submit more."""
        with self._lock:
            start = self._running[future]
            failure = future.exception()
            if failure is not None:
                self._fail(failure)
            else:
                outcome = future.result()
                self._item_s = outcome.seconds / max(1, len(outcome.results))
                for place, error in outcome.errors.items():
                    error.add_note(f"raised for item {start + place}")
                if outcome.errors and not self._continue_on_error:
                    self._fail(outcome.errors[min(outcome.errors)])
                else:
                    self._outcomes[start] = outcome
            del self._running[future]
            self._submit()

    def _fail(self, error: BaseException) -> None:
        """End the map with `error`, unless another one has ended it."""
        self._failure = self._failure or error
        self._exhausted = True
