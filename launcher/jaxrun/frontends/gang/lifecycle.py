"""Starts the job of a gang, starts it anew where its ranks are broken, and stops it.

The ranks are broken once one has ended, or once they are out of step with each other.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import weakref
from pathlib import Path

from jaxrun.frontends.gang.exceptions import GangError
from jaxrun.frontends.gang.instance import GangInstance, describe_gang
from jaxrun.frontends.gang.spec import GangSpec


class GangLifecycle:
    """The job of one gang, started at once. Threads may use it; a call holds `lock` until its end."""

    def __init__(self, spec: GangSpec, run_dir: str | os.PathLike[str] | None) -> None:
        self.spec = spec
        self.lock = threading.RLock()
        self._run_dir = None if run_dir is None else Path(run_dir).absolute()
        self._starts = 0
        self._instance: GangInstance | None = None
        self._closed = False
        self._lost_reason = ""  # why the instance before this one was broken
        self._owner = os.getpid()
        self._start()
        _all.add(self)

    def __str__(self) -> str:
        if self._instance is None or self._instance.stopped:
            return f"{self.spec}: {'closed' if self._closed else 'started anew at its next use'}"
        return f"{describe_gang(self.spec, self._instance.workers)}{'' if self.healthy else ', broken'}"

    @property
    def instance(self) -> GangInstance:
        """The running job. Raises GangError if there is none."""
        if self._instance is None or self._instance.stopped:
            end = "closed; make another" if self._closed else "stopped; its next call starts it anew"
            raise GangError(f"this {self.spec} is {end}")
        return self._instance

    @property
    def healthy(self) -> bool:
        """Whether the next call finds the same ranks."""
        return self._instance is not None and self._instance.usable

    @property
    def broken(self) -> str:
        """Why the ranks of the running job cannot be used; empty if they can, or if none runs."""
        return self._instance.broken if self._instance is not None and not self._instance.stopped else ""

    def mark_broken(self, reason: str) -> None:
        if self._instance is not None:
            self._instance.mark_broken(reason)

    def usable_instance(self) -> GangInstance:
        """The running job, started anew if it is broken or stopped. Raises GangError if the gang is closed."""
        self._check_open()
        if self._instance is not None and not self._instance.stopped:
            self._instance.check_connections()
        if not self.healthy:
            reason = self._instance.broken if self._instance is not None else self._lost_reason
            if reason:
                text = f"jaxrun: {self.spec}: started anew, what its ranks knew is lost: {reason}"
                print(text, file=sys.stderr)
            self.restart()
        return self.instance

    def restart(self) -> None:
        """Start fresh processes that know nothing of earlier calls."""
        with self.lock:
            self._check_open()
            self.stop()
            self.spec = self.spec.for_restart()
            self._start()

    def stop(self) -> None:
        """Stop the job at once; the next call starts another."""
        instance, self._instance = self._instance, None
        if instance is not None:
            self._lost_reason = instance.broken
            instance.stop()

    def close(self) -> None:
        """Let the ranks end, and stop what does not. May be called again."""
        with self.lock:
            self._closed = True
            if self._owner != os.getpid():  # a fork of the process that has started the gang
                return
            if self._instance is not None and self._instance.usable:
                self._instance.shut_down()
            self.stop()

    def __del__(self) -> None:
        if self.__dict__.get("_instance") is not None and self._owner == os.getpid():
            with contextlib.suppress(Exception):  # the interpreter may be half gone
                self.stop()

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


_all: weakref.WeakSet[GangLifecycle] = weakref.WeakSet()


def _close_all() -> None:
    for lifecycle in tuple(_all):
        lifecycle.close()


atexit.register(_close_all)  # runs before the launcher pools', which was registered earlier
