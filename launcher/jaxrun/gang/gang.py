"""Calls on a gang: a function on all ranks, its results, and what is raised there."""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from jaxrun.contract.parcel import Kind, Reference, pack
from jaxrun.errors import JaxrunError, UsageError
from jaxrun.gang.conversation import Conversation, Gone, Printed, Returned, Screen, Sources, Told
from jaxrun.gang.life import Life
from jaxrun.gang.lines import Lines
from jaxrun.gang.remote import CallTimeout, GangError, raised
from jaxrun.planning.chaos import KINDS
from jaxrun.ranks import spell

FAILURE_GRACE = 1.5  # seconds that the others have to return after a rank has raised
_HEAVY = 2**24  # bytes of a function with all that it closes over, from which a warning says so


class Results(tuple[Any, ...]):
    """What each rank has returned, by rank; `main` is rank 0's."""

    __slots__ = ()

    @property
    def main(self) -> Any:
        return self[0]


class WarmGang(Life):
    """A gang that can be called: what jaxrun.Gang, and all that is made with one, builds on."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._talking = False
        self._number = 0
        self.screen = self._screen()
        self.on_printed: Callable[[Printed], None] = self.screen.show
        super().__init__(*args, **kwargs)

    def _screen(self) -> Screen:
        """Where to show what ranks print."""
        return Lines()

    def _sources(self) -> Sources | None:
        """Where the lines of functions are that stand in no file."""
        return None

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float | None = None, **kwargs: Any) -> Results:
        """Call `fn(*args, **kwargs)` on every rank; what each returned, JAX's arrays as numpy's.

        Raises what the ranks raise: itself, with `.rank`, `.host` and the remote traceback; a group where they raise
        different errors. WorkerDied if a rank's process ends. CallTimeout after `timeout` seconds, with where
        each rank was. KeyboardInterrupt at a Ctrl-C: the ranks are interrupted, a second one stops the gang.
        """
        __tracebackhide__ = True
        with self.converse(fn, *args, **kwargs) as talk:
            return self.collect(talk, timeout)

    def converse(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Conversation:
        """Start `fn(*args, **kwargs)` on every rank, and talk with it; to be used in a `with`."""
        self._lock.acquire()
        try:
            if self._talking:
                raise GangError("this gang is in a conversation already; end that first")
            self._must_be_open()
            self._ready()
            job = self._known
            self._number += 1
            cells = self._sources()
            reduce = cells.reduce if cells is not None else None
            task = pack(Kind.TASK, self._number, (fn, args, kwargs), share=self.shares_memory, reduce=reduce)
            order = {
                "print": True,
                "interrupts": job.interrupts,
                "cells": cells.lines if cells is not None else {},
                "path": [os.path.abspath(entry) for entry in sys.path],
            }
            task = replace(task, note=json.dumps(order).encode())
            if task.weight > _HEAVY:
                _warn_of_closure(fn)
            talk = Conversation(self, self._number, task)
            self._talking = True
            return talk
        except BaseException:
            self._lock.release()
            raise

    def conversation_over(self, talk: Conversation, error: BaseException | None) -> None:
        """For Conversation."""
        try:
            self.screen.over(talk, error, healthy=self.healthy)
        finally:
            self._talking = False
            self._lock.release()

    def on_told(self, told: Told) -> None:
        """Show what the launcher has said."""
        sys.stderr.write(told.text)

    def collect(self, talk: Conversation, timeout: float | None) -> Results:
        """What `run` does with a conversation, whose results or errors are all that is wanted of it."""
        __tracebackhide__ = True
        deadline = None if timeout is None else time.monotonic() + timeout
        failed_at: float | None = None
        while True:
            limits = [at for at in (deadline, failed_at and failed_at + FAILURE_GRACE) if at is not None]
            left = min(limits) - time.monotonic() if limits else None
            match talk.receive(left):
                case Printed() as printed:
                    self.on_printed(printed)
                case Told() as told:
                    self.on_told(told)
                case Returned(error=error) if error is not None:
                    failed_at = failed_at or time.monotonic()
                case Gone():
                    died = talk.died()
                    assert died is not None
                    raise died from (raised(talk.failures) if talk.failures else None)
                case None if talk.missing:
                    self._give_up(talk, timeout)
                case None:
                    break
        if talk.failures:
            raise raised(talk.failures)
        return Results(talk.outcomes[rank].value() for rank in sorted(talk.outcomes))

    def _give_up(self, talk: Conversation, timeout: float | None) -> None:
        where = self.stacks()
        missing = talk.missing
        if talk.failures:
            raise raised(talk.failures, f"{spell(missing)} did not return: {where}")
        raise CallTimeout(f"{spell(missing)} did not return within {timeout:g} s · {where}", missing)

    # ---- looking and meddling

    def stacks(self, *, full: bool = False) -> str:
        """Where all ranks are now, in groups; with `full`, all frames of each."""
        from jaxrun.records import asking

        try:
            return asking.ask(asking.Running(self.run_dir, self._known.launcher.pid), full=full)
        except JaxrunError as error:
            return f"where they are cannot be told: {error}"

    def fault(self, kind: str, rank: int) -> None:
        """Do this to a rank: "kill" it (SIGKILL), "pause" it (SIGSTOP) or "cut" its network connections."""
        if kind not in KINDS:
            raise UsageError(f"a fault is one of {', '.join(KINDS)}, not {kind!r}")
        if rank not in range(self.processes):
            raise UsageError(f"the ranks of this gang are 0 to {self.processes - 1}, so {rank!r} is none")
        self._known.launcher.order(fault=kind, ranks=[rank])

    def kill(self, rank: int) -> None:
        """Kill a rank with SIGKILL, as the kernel does when memory is short."""
        self.fault("kill", rank)

    def pause(self, rank: int) -> None:
        """Stop a rank with SIGSTOP: it lives, and does nothing."""
        self.fault("pause", rank)

    def cut(self, rank: int) -> None:
        """Break all network connections of a rank, as a lost network does."""
        self.fault("cut", rank)


def remote_function(module: str, name: str) -> Callable[..., Any]:
    """A function that is imported on the ranks only."""
    return Reference(module, name)


def _warn_of_closure(fn: Callable[..., Any]) -> None:
    """Say so if a function is heavy, whatever its arguments are."""
    weight = pack(Kind.TASK, 0, fn, share=False).weight
    if weight > _HEAVY:
        warnings.warn(
            f"{getattr(fn, '__name__', fn)} and what it closes over weigh {weight / 2**20:.0f} MiB, which go to every "
            "rank with each call; pass large arrays as arguments, or load them on the ranks",
            stacklevel=4,
        )
