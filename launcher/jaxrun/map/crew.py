"""The plain processes of a pool: one conversation that lasts, which a thread holds that is given tasks."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from jaxrun.gang.exceptions import GangError
from jaxrun.map.errands import SERVE, Errands
from jaxrun.map.tasks import Task

if TYPE_CHECKING:
    from jaxrun.gang.gang import BaseGang

# Seconds until a task that is given meanwhile is seen: while a rank is idle, and while none is.
_GLANCE = 0.005
_LOOK = 0.05


class Crew:
    """`start` makes the gang, when the first task is there. Threads may use it."""

    def __init__(self, start: Callable[[], BaseGang]) -> None:
        self._start = start
        self._inbox: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._given: list[Task] = []
        self._stopping = self._closed = False
        self.gang: BaseGang | None = None

    def give(self, task: Task) -> Task:
        """Have it done."""
        with self._lock:
            if self._closed:
                raise GangError("this pool is closed; make another")
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="jaxrun-pool", daemon=True)
                self._thread.start()
            self._given = [given for given in self._given if not given.over]
            self._given.append(task)
            self._inbox.put(task)
        return task

    def close(self) -> None:
        """Take no more tasks; those given are done."""
        with self._lock:
            self._closed = True
        self._inbox.put(None)

    def join(self) -> None:
        """Wait until all is done and the gang is closed."""
        if self._thread is not None:
            self._thread.join()

    def terminate(self) -> None:
        """Stop what is being done; its tasks fail."""
        self._stopping = True
        self.close()
        self.join()

    def _serve(self) -> None:
        task = self._inbox.get()
        while task is not None:
            try:
                task = self._converse(task)
            except BaseException as error:  # a dead rank, a gang that does not start: who waits must know
                self._fail(error)
                task = self._inbox.get()
        self._fail(GangError("the pool was terminated"))
        if self.gang is not None:
            self.gang.close()

    def _converse(self, first: Task) -> Task | None:
        """Do tasks until no more are given: None. Or the next one, if a rank has died since the one before."""
        self.gang = self.gang or self._start()
        with self.gang.start_call(SERVE) as talk:
            errands = Errands(self.gang, talk)
            task: Task | None = first
            while not self._stopping:
                if task is not None:
                    errands.add(task)
                errands.deal()
                if not errands.idle:
                    errands.receive(_LOOK if errands.full else _GLANCE)
                    task = self._next()
                elif (task := self._inbox.get()) is None:
                    errands.finish()
                    return None
                elif not errands.all_there():
                    return task
        return None

    def _next(self) -> Task | None:
        try:
            task = self._inbox.get_nowait()
        except queue.Empty:
            return None
        if task is None:
            self._inbox.put(None)  # seen again when all is done
        return task

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            given, self._given = self._given, []
        for task in given:
            task.fail(error)
