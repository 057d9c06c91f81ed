"""What a pool hands out for work that goes on: AsyncResult, and the iterator of imap."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from typing import Any, Self

from jaxrun.map.tasks import Task


class AsyncResult:
    """As multiprocessing's: a result that may not be there yet."""

    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    def get(self, timeout: float | None = None) -> Any:
        """The result, or what was raised, when it is there; multiprocessing.TimeoutError after `timeout` seconds."""
        from multiprocessing import TimeoutError

        try:
            return self._future.result(timeout)
        except futures.TimeoutError:
            if self._future.done():
                raise
            raise TimeoutError(f"no result within {timeout:g} s") from None

    def wait(self, timeout: float | None = None) -> None:
        """Until it is there, or `timeout` seconds are over."""
        futures.wait([self._future], timeout)

    def ready(self) -> bool:
        return self._future.done()

    def successful(self) -> bool:
        """Whether there is a result, no error. ValueError if it is not there yet."""
        if not self.ready():
            raise ValueError(f"{self!r} is not ready; wait() for it first")
        return self._future.exception() is None

    def then(
        self, callback: Callable[[Any], Any] | None, error_callback: Callable[[BaseException], Any] | None
    ) -> Self:
        """Call one of them when it is there."""

        def tell(future: Future[Any]) -> None:
            error = future.exception()
            if error is not None and error_callback is not None:
                error_callback(error)
            if error is None and callback is not None:
                callback(future.result())

        self._future.add_done_callback(tell)
        return self


def of_task(task: Task, make: Callable[[list[Any]], Any]) -> AsyncResult:
    """What `make` makes of the results of a task."""
    future: Future[Any] = Future()

    def tell() -> None:
        try:
            future.set_result(make(task.results()))
        except BaseException as error:
            future.set_exception(error)

    task.when_over(tell)
    return AsyncResult(future)


def of_thread(work: Callable[[], Any], *, apart: bool) -> AsyncResult:
    """What `work` returns; it runs here and now, or in a thread of its own."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            if not apart:
                raise
            future.set_exception(error)

    if apart:
        threading.Thread(target=run, name="jaxrun-map", daemon=True).start()
    else:
        run()
    return AsyncResult(future)


class ItemIterator:
    """The results of a task, one by one. An item that raised raises here, and the next ones follow."""

    def __init__(self, task: Task, *, ordered: bool) -> None:
        self._task = task
        self._ordered = ordered
        self._here: deque[tuple[Any, BaseException | None]] = deque()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        return self.next()

    def next(self, timeout: float | None = None) -> Any:
        """The next result; multiprocessing.TimeoutError if it does not come within `timeout` seconds."""
        from multiprocessing import TimeoutError

        task = self._task
        while not self._here:
            with task.changed:
                if not task.changed.wait_for(lambda: task.has_next(ordered=self._ordered) or task.over, timeout):
                    raise TimeoutError(f"no result within {timeout:g} s")
                if not task.has_next(ordered=self._ordered):
                    if task.failure is not None:
                        raise task.failure
                    raise StopIteration
                self._here += task.next_results(ordered=self._ordered) or []
        result, error = self._here.popleft()
        if error is not None:
            raise error
        return result
