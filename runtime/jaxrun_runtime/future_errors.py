"""Finds exceptions that only a future holds: a task of the program has failed, and nobody has asked for its result.

Whoever waits for something else, such as data that the task was to bring, waits forever, and the exception is on no
screen. A future of concurrent.futures does not know who has asked, so this file notes futures as they get an exception.
`result()` raises the exception and so changes its traceback; a call of `exception()` is noted. Tasks and futures of
asyncio know it themselves.

What is not found: an error of a future that nobody holds any more (asyncio logs it by itself), futures of asyncio that
are no tasks, its tasks where Python keeps no set of them (3.14), and errors of a multiprocessing.Pool's results.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from jaxrun_runtime.import_watch import call_after_import

_MODULE = "concurrent.futures._base"
_MAX_FUTURES = 100  # the latest ones that have failed


class _Noted:
    """A future that has got an exception, and the exception's traceback at that time, by its address."""

    def __init__(self, future: Any, error: BaseException) -> None:
        self.future = weakref.ref(future)
        self.traceback = id(error.__traceback__)
        self.is_asked = False


_noted: deque[_Noted] = deque(maxlen=_MAX_FUTURES)


def watch() -> None:
    """Note the futures of this process that fail from now on."""
    call_after_import(_MODULE, _watch_futures)


def oldest_error() -> BaseException | None:
    """Return the exception for which nobody has asked for the longest time; None if there is none."""
    return next(_unasked(), None)


def _unasked() -> Iterator[BaseException]:
    for noted in list(_noted):
        future = noted.future()
        error = getattr(future, "_exception", None)
        if error is not None and not noted.is_asked and id(error.__traceback__) == noted.traceback:
            yield error
    tasks = getattr(sys.modules.get("asyncio.tasks"), "_scheduled_tasks", ())
    for task in list(tasks):
        if task.done() and task._log_traceback and task._exception is not None:
            yield task._exception


def _watch_futures(module: ModuleType) -> None:
    future = getattr(module, "Future", None)
    for name, make in (("set_exception", _noting), ("exception", _noting_question)):
        original = getattr(future, name, None)
        if original is not None:
            setattr(future, name, make(original))


def _noting(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def set_exception(self: Any, exception: Any) -> Any:
        with contextlib.suppress(Exception):  # a future of another class may be anything
            if isinstance(exception, BaseException):
                _noted.append(_Noted(self, exception))
        return original(self, exception)

    return set_exception


def _noting_question(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def exception(self: Any, timeout: Any = None) -> Any:
        error = original(self, timeout)
        if error is not None:
            for noted in list(_noted):
                noted.is_asked |= noted.future() is self
        return error

    return exception
