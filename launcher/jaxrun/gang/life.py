"""The life of a gang: its job is started, found to be sick, started anew, stopped and closed.

A gang that has lost a rank, or whose ranks are out of step, is sick: it is started anew when it is used next.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import weakref
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self

from jaxrun.contract.flight import RECORD
from jaxrun.gang.job import Job, Worker, describe
from jaxrun.gang.remote import GangError, WorkerDied
from jaxrun.gang.shape import Shape
from jaxrun.gang.switchboard import Switchboard


class Life:
    """Started when it is made. Threads may use it. See jaxrun.functions.Gang for what it is given, and raises."""

    def __init__(
        self,
        processes: int | None = None,
        devices: int | None = None,
        *,
        hosts: int | None = None,
        backend: str = "local",
        platform: str = "auto",
        env: Mapping[str, str] | None = None,
        lockstep: str = RECORD,
        run_dir: str | os.PathLike[str] | None = None,
        options: Sequence[str] = (),
    ) -> None:
        self.shape = Shape(
            processes=processes,
            devices=devices,
            hosts=hosts,
            backend=backend,
            platform=platform,
            lockstep=lockstep,
            env=dict(env or {}),
            options=tuple(options),
        )
        self._run_dir = None if run_dir is None else Path(run_dir).absolute()
        self._lock = threading.RLock()
        self._starts = 0
        self._job: Job | None = None
        self._closed = False
        self._lost = ""  # why the job was stopped before this one
        self._owner = os.getpid()
        self._start()
        _gangs.add(self)

    # ---- what it is

    @property
    def workers(self) -> tuple[Worker, ...]:
        return self._known.workers

    def __repr__(self) -> str:
        if self._job is None:
            return f"<{self.shape}: {'closed' if self._closed else 'started anew at its next use'}>"
        return f"<{describe(self.shape, self.workers)}{'' if self.healthy else ', sick'}>"

    @property
    def processes(self) -> int:
        return len(self.workers)

    @property
    def devices(self) -> int:
        """Devices of each rank."""
        return self.workers[0].devices

    @property
    def healthy(self) -> bool:
        """Whether the next call finds the same ranks."""
        return self._job is not None and not self._job.sick and not self._closed

    @property
    def run_dir(self) -> Path:
        """Where the current start leaves its files."""
        return self._known.launcher.run_dir

    @property
    def shares_memory(self) -> bool:
        return self.shape.backend == "local"

    @property
    def switchboard(self) -> Switchboard:
        return self._known.switchboard

    def host(self, rank: int) -> str:
        return self.workers[rank].host

    @property
    def _known(self) -> Job:
        if self._job is None:
            end = "closed; make another" if self._closed else "stopped; its next call starts it anew"
            raise GangError(f"this {self.shape} is {end}")
        return self._job

    def __reduce__(self) -> NoReturn:
        raise TypeError("a gang stays in the process that has started it; a function that it runs cannot refer to it")

    # ---- its course

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt in what the ranks run."""
        self._known.interrupt()

    def sicken(self, reason: str) -> None:
        """It cannot be used as it is; the next call starts it anew."""
        if self._job is not None:
            self._job.sicken(reason)

    def post_mortem(self, patience: float, gone: Collection[int]) -> WorkerDied:
        """Why the job has ended."""
        return self._known.post_mortem(patience, gone)

    def restart(self) -> None:
        """Start it anew: fresh processes that know nothing of earlier calls."""
        with self._lock:
            self._must_be_open()
            self.stop()
            self._start()

    def stop(self) -> None:
        """Stop the job at once, as it is; the next call starts another."""
        job, self._job = self._job, None
        if job is not None:
            self._lost = job.sick
            job.end()

    def close(self) -> None:
        """Let the ranks leave, and end what does not. May be called again."""
        with self._lock:
            self._closed = True
            if self._owner != os.getpid():  # a fork of the process whose it is
                return
            if self._job is not None and not self._job.sick:
                self._job.leave()
            self.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        if self.__dict__.get("_job") is not None and self._owner == os.getpid():
            with contextlib.suppress(Exception):  # the interpreter may be half gone
                self.stop()

    def _ready(self) -> None:
        """Have a job that can be used."""
        if self._job is not None:
            self._job.look()
        if self._job is None or self._job.sick:
            reason = self._job.sick if self._job is not None else self._lost
            if reason:
                text = f"jaxrun: {self.shape}: started anew, what its ranks knew is lost: {reason}"
                print(text, file=sys.stderr)
            self.restart()

    def _must_be_open(self) -> None:
        if self._closed:
            raise GangError(f"this {self.shape} is closed; make another")
        if self._owner != os.getpid():
            raise GangError(f"this {self.shape} is one of process {self._owner}, of which this is a fork; make another")

    def _start(self) -> None:
        self._starts += 1
        run_dir = self._run_dir
        if run_dir is not None and self._starts > 1:
            run_dir = run_dir.with_name(f"{run_dir.name}-{self._starts}")
        self._job = Job(self.shape, run_dir)


_gangs: weakref.WeakSet[Life] = weakref.WeakSet()


def _close_all() -> None:
    for gang in tuple(_gangs):
        gang.close()


atexit.register(_close_all)  # before the nurseries', which were registered first
