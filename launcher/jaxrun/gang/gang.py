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

from jaxrun.errors import JaxrunError, UsageError
from jaxrun.gang.call import CellSources, Disconnected, Display, GangCall, LauncherOutput, Printed, Returned
from jaxrun.gang.display import TerminalDisplay
from jaxrun.gang.exceptions import CallTimeout, GangError, combined_exception
from jaxrun.gang.lifecycle import GangLifecycle
from jaxrun.job.fault_spec import FAULT_KINDS
from jaxrun.protocol.payload import FunctionReference, GangMessageKind, pack
from jaxrun.text import format_ranks

FAILURE_GRACE_S = 1.5  # seconds that the others have to return after a rank has raised
_LARGE_CLOSURE_BYTES = 2**24  # bytes of a function with all that it closes over, from which a warning says so


class Results(tuple[Any, ...]):
    """What each rank has returned, by rank; `main` is rank 0's."""

    __slots__ = ()

    @property
    def main(self) -> Any:
        return self[0]


class BaseGang(GangLifecycle):
    """A gang that can be called: what jaxrun.Gang, and all that is made with one, builds on."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._in_call = False
        self._call_number = 0
        self.display = self._make_display()
        self.show_printed: Callable[[Printed], None] = self.display.show
        super().__init__(*args, **kwargs)

    def _make_display(self) -> Display:
        """Where to show what ranks print."""
        return TerminalDisplay()

    def _make_sources(self) -> CellSources | None:
        """Where the lines of functions are that stand in no file."""
        return None

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float | None = None, **kwargs: Any) -> Results:
        """Call `fn(*args, **kwargs)` on every rank; what each returned, JAX's arrays as numpy's.

        Raises what the ranks raise: itself, with `.rank`, `.host` and the remote traceback; a group where they raise
        different errors. WorkerDied if a rank's process ends. CallTimeout after `timeout` seconds, with where
        each rank was. KeyboardInterrupt at a Ctrl-C: the ranks are interrupted, a second one stops the gang.
        """
        __tracebackhide__ = True
        with self.start_call(fn, *args, **kwargs) as talk:
            return self.collect_results(talk, timeout)

    def start_call(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> GangCall:
        """Start `fn(*args, **kwargs)` on every rank, and talk with it; to be used in a `with`."""
        self._lock.acquire()
        try:
            if self._in_call:
                raise GangError("this gang is in a conversation already; end that first")
            self._check_open()
            self._ensure_started()
            job = self._current
            self._call_number += 1
            cells = self._make_sources()
            reduce = cells.reduce if cells is not None else None
            task = pack(
                GangMessageKind.CALL, self._call_number, (fn, args, kwargs), share=self.shares_memory, reduce=reduce
            )
            order = {
                "print": True,
                "interrupts": job.interrupts,
                "cells": cells.lines if cells is not None else {},
                "path": [os.path.abspath(entry) for entry in sys.path],
            }
            task = replace(task, note=json.dumps(order).encode())
            if task.nbytes > _LARGE_CLOSURE_BYTES:
                _warn_of_closure(fn)
            talk = GangCall(self, self._call_number, task)
            self._in_call = True
            return talk
        except BaseException:
            self._lock.release()
            raise

    def end_call(self, talk: GangCall, error: BaseException | None) -> None:
        """For Conversation."""
        try:
            self.display.end_call(talk, error, healthy=self.healthy)
        finally:
            self._in_call = False
            self._lock.release()

    def show_launcher_output(self, told: LauncherOutput) -> None:
        """Show what the launcher has said."""
        sys.stderr.write(told.text)

    def collect_results(self, talk: GangCall, timeout: float | None) -> Results:
        """What `run` does with a conversation, whose results or errors are all that is wanted of it."""
        __tracebackhide__ = True
        deadline = None if timeout is None else time.monotonic() + timeout
        failed_at: float | None = None
        while True:
            limits = [at for at in (deadline, failed_at and failed_at + FAILURE_GRACE_S) if at is not None]
            left = min(limits) - time.monotonic() if limits else None
            match talk.receive(left):
                case Printed() as printed:
                    self.show_printed(printed)
                case LauncherOutput() as told:
                    self.show_launcher_output(told)
                case Returned(error=error) if error is not None:
                    failed_at = failed_at or time.monotonic()
                case Disconnected():
                    died = talk.explain_death()
                    assert died is not None
                    raise died from (combined_exception(talk.failures) if talk.failures else None)
                case None if talk.running:
                    self._give_up(talk, timeout)
                case None:
                    break
        if talk.failures:
            raise combined_exception(talk.failures)
        return Results(talk.outcomes[rank].value() for rank in sorted(talk.outcomes))

    def _give_up(self, talk: GangCall, timeout: float | None) -> None:
        where = self.stacks()
        missing = talk.running
        if talk.failures:
            raise combined_exception(talk.failures, f"{format_ranks(missing)} did not return: {where}")
        raise CallTimeout(f"{format_ranks(missing)} did not return within {timeout:g} s · {where}", missing)

    # ---- looking and meddling

    def stacks(self, *, full: bool = False) -> str:
        """Where all ranks are now, in groups; with `full`, all frames of each."""
        from jaxrun.rundir import stacks_request

        try:
            return stacks_request.request_stacks(
                stacks_request.RunningJob(self.run_dir, self._current.launcher.pid), full=full
            )
        except JaxrunError as error:
            return f"where they are cannot be told: {error}"

    def fault(self, kind: str, rank: int) -> None:
        """Do this to a rank: "kill" it (SIGKILL), "pause" it (SIGSTOP) or "cut" its network connections."""
        if kind not in FAULT_KINDS:
            raise UsageError(f"a fault is one of {', '.join(FAULT_KINDS)}, not {kind!r}")
        if rank not in range(self.processes):
            raise UsageError(f"the ranks of this gang are 0 to {self.processes - 1}, so {rank!r} is none")
        self._current.launcher.send_command(fault=kind, ranks=[rank])

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
    return FunctionReference(module, name)


def _warn_of_closure(fn: Callable[..., Any]) -> None:
    """Say so if a function is heavy, whatever its arguments are."""
    weight = pack(GangMessageKind.CALL, 0, fn, share=False).nbytes
    if weight > _LARGE_CLOSURE_BYTES:
        warnings.warn(
            f"{getattr(fn, '__name__', fn)} and what it closes over weigh {weight / 2**20:.0f} MiB, which go to every "
            "rank with each call; pass large arrays as arguments, or load them on the ranks",
            stacklevel=4,
        )
