"""AsyncResult: what a pool returns for work that is not done yet."""

from __future__ import annotations

from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from typing import Any


class AsyncResult:
    """As multiprocessing's: the result of work that may not be done yet, which is the result of `future`.

    When the work is done, `callback` is called with the result or `error_callback` with the error.
    """

    def __init__(
        self, callback: Callable[[Any], Any] | None, error_callback: Callable[[BaseException], Any] | None
    ) -> None:
        self.future: Future[Any] = Future()
        self._callback = callback
        self._error_callback = error_callback
        self.future.add_done_callback(self._call_back)

    def get(self, timeout: float | None = None) -> Any:
        """Wait for the result. Raises what the work raised, multiprocessing.TimeoutError after `timeout` seconds."""
        from multiprocessing import TimeoutError

        try:
            return self.future.result(timeout)
        except futures.TimeoutError:
            if self.future.done():
                raise
            raise TimeoutError(f"no result within {timeout:g} s") from None

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the work is done, at most `timeout` seconds."""
        futures.wait([self.future], timeout)

    def ready(self) -> bool:
        return self.future.done()

    def successful(self) -> bool:
        """Whether the work is done without an error. Raises ValueError if it is not done."""
        if not self.ready():
            raise ValueError(f"{self!r} is not ready; wait() for it first")
        return self.future.exception() is None

    def _call_back(self, future: Future[Any]) -> None:
        error = future.exception()
        if error is None and self._callback is not None:
            self._callback(future.result())
        if error is not None and self._error_callback is not None:
            self._error_callback(error)


def settle(future: Future[Any], make: Callable[[], Any]) -> None:
    """Make what `make` returns or raises the outcome of `future`."""
    try:
        future.set_result(make())
    except BaseException as error:
        future.set_exception(error)
