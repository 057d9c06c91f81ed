"""Runs a blocking task, such as a copy of a directory, in a thread, while the event loop of its process continues."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

M = TypeVar("M")
Task = Callable[[Callable[[], bool]], Iterator[M]]  # yields messages until `is_stopped()`, its argument, or its end


class TaskThread(Generic[M]):
    """A task in a thread of its own, which begins at once.

    The descriptor of `fileno` is readable once `receive` has something new to return, or to raise.
    """

    def __init__(self, task: Task[M]) -> None:
        self._task = task
        self._messages: deque[M] = deque()
        self._error: BaseException | None = None
        self._is_stopped = threading.Event()
        self._news = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="jaxrun-task", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        return self._news

    def receive(self) -> list[M]:
        """Return the messages that the task has yielded since the last call. Raises the task's exception."""
        with contextlib.suppress(BlockingIOError):  # nothing is new
            os.eventfd_read(self._news)
        arrived = [self._messages.popleft() for _ in range(len(self._messages))]
        if self._error is not None:
            raise self._error
        return arrived

    def post(self, message: M) -> None:
        """Let `receive` return this message, from within the task."""
        self._messages.append(message)
        os.eventfd_write(self._news, 1)

    def stop(self) -> None:
        """Ask the task to end; it may still yield a nearly finished result."""
        self._is_stopped.set()

    def close(self) -> None:
        """Stop the task and wait for it: a process with threads must not fork."""
        self.stop()
        self._thread.join()
        os.close(self._news)

    def _run(self) -> None:
        try:
            for message in self._task(self._is_stopped.is_set):
                self.post(message)
        except BaseException as error:  # for the thread that receives
            self._error = error
            os.eventfd_write(self._news, 1)
