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

from jaxrun.gang.exceptions import GangError, WorkerDied
from jaxrun.gang.instance import GangInstance, GangWorker, describe_gang
from jaxrun.gang.rank_connections import RankConnections
from jaxrun.gang.spec import GangSpec
from jaxrun.protocol.flight_file import LOCKSTEP_RECORD


class GangLifecycle:
    """Started when it is made. Threads may use it. See jaxrun.api.Gang for what it is given, and raises."""

    def __init__(
        self,
        processes: int | None = None,
        devices: int | None = None,
        *,
        hosts: int | None = None,
        backend: str = "local",
        platform: str = "auto",
        env: Mapping[str, str] | None = None,
        lockstep: str = LOCKSTEP_RECORD,
        run_dir: str | os.PathLike[str] | None = None,
        options: Sequence[str] = (),
    ) -> None:
        self.spec = GangSpec(
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
        self._instance: GangInstance | None = None
        self._closed = False
        self._lost_reason = ""  # why the job was stopped before this one
        self._owner = os.getpid()
        self._start()
        _gangs.add(self)

    # ---- what it is

    @property
    def workers(self) -> tuple[GangWorker, ...]:
        return self._current.workers

    def __repr__(self) -> str:
        if self._instance is None:
            return f"<{self.spec}: {'closed' if self._closed else 'started anew at its next use'}>"
        return f"<{describe_gang(self.spec, self.workers)}{'' if self.healthy else ', sick'}>"

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
        return self._instance is not None and not self._instance.broken and not self._closed

    @property
    def run_dir(self) -> Path:
        """Where the current start leaves its files."""
        return self._current.launcher.run_dir

    @property
    def shares_memory(self) -> bool:
        return self.spec.backend == "local"

    @property
    def switchboard(self) -> RankConnections:
        return self._current.switchboard

    def host(self, rank: int) -> str:
        return self.workers[rank].host

    @property
    def _current(self) -> GangInstance:
        if self._instance is None:
            end = "closed; make another" if self._closed else "stopped; its next call starts it anew"
            raise GangError(f"this {self.spec} is {end}")
        return self._instance

    def __reduce__(self) -> NoReturn:
        raise TypeError("a gang stays in the process that has started it; a function that it runs cannot refer to it")

    # ---- its course

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt in what the ranks run."""
        self._current.interrupt()

    def mark_broken(self, reason: str) -> None:
        """It cannot be used as it is; the next call starts it anew."""
        if self._instance is not None:
            self._instance.mark_broken(reason)

    def explain_death(self, patience: float, gone: Collection[int]) -> WorkerDied:
        """Why the job has ended."""
        return self._current.explain_death(patience, gone)

    def restart(self) -> None:
        """Start it anew: fresh processes that know nothing of earlier calls."""
        with self._lock:
            self._check_open()
            self.stop()
            self._start()

    def stop(self) -> None:
        """Stop the job at once, as it is; the next call starts another."""
        job, self._instance = self._instance, None
        if job is not None:
            self._lost_reason = job.broken
            job.stop()

    def close(self) -> None:
        """Let the ranks leave, and end what does not. May be called again."""
        with self._lock:
            self._closed = True
            if self._owner != os.getpid():  # a fork of the process whose it is
                return
            if self._instance is not None and not self._instance.broken:
                self._instance.shut_down()
            self.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        if self.__dict__.get("_job") is not None and self._owner == os.getpid():
            with contextlib.suppress(Exception):  # the interpreter may be half gone
                self.stop()

    def _ensure_started(self) -> None:
        """Have a job that can be used."""
        if self._instance is not None:
            self._instance.check_connections()
        if self._instance is None or self._instance.broken:
            reason = self._instance.broken if self._instance is not None else self._lost_reason
            if reason:
                text = f"jaxrun: {self.spec}: started anew, what its ranks knew is lost: {reason}"
                print(text, file=sys.stderr)
            self.restart()

    def _check_open(self) -> None:
        if self._closed:
            raise GangError(f"this {self.spec} is closed; make another")
        if self._owner != os.getpid():
            raise GangError(f"this {self.spec} is one of process {self._owner}, of which this is a fork; make another")

    def _start(self) -> None:
        self._starts += 1
        run_dir = self._run_dir
        if run_dir is not None and self._starts > 1:
            run_dir = run_dir.with_name(f"{run_dir.name}-{self._starts}")
        self._instance = GangInstance(self.spec, run_dir)


_gangs: weakref.WeakSet[GangLifecycle] = weakref.WeakSet()


def _close_all() -> None:
    for gang in tuple(_gangs):
        gang.close()


atexit.register(_close_all)  # before the nurseries', which were registered first
