"""Gang: a job whose ranks stay warm and run what they are sent; and launch, which is a gang for one call.

A gang that has lost a rank, or whose ranks are out of step, is sick: it is started anew when it is used next.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self

from jaxrun import RUNTIME
from jaxrun.contract.flight import RECORD
from jaxrun.contract.parcel import Kind, Reference, pack
from jaxrun.errors import JaxrunError, UsageError
from jaxrun.gang.conversation import Conversation, Gone, Printed, Returned, Told
from jaxrun.gang.job import Job, Worker, describe
from jaxrun.gang.lines import Lines
from jaxrun.gang.remote import CallTimeout, GangError, WorkerDied, raised
from jaxrun.gang.shape import Shape
from jaxrun.gang.switchboard import Switchboard
from jaxrun.planning.chaos import KINDS
from jaxrun.ranks import spell

if TYPE_CHECKING:
    from jaxrun.notebook.screen import Screen
    from jaxrun.notebook.sources import Sources

FAILURE_GRACE = 1.5  # seconds that the others have to return after a rank has raised
_HEAVY = 2**24  # bytes of a function with all that it closes over, from which a warning says so


class Results(tuple[Any, ...]):
    """What each rank has returned, by rank; `main` is rank 0's."""

    __slots__ = ()

    @property
    def main(self) -> Any:
        return self[0]


class Gang:
    """A warm job of `processes` ranks with `devices` devices each; started at once, closed by `close` or a `with`.

    hosts:     simulated hosts of this machine, or with backend="mpirun" or "slurm" real ones
    env:       variables for all ranks
    run_dir:   where logs, events and the verdict go; a second start gets run_dir-2; None for none that are kept
    options:   more words for jaxrun's command line, such as "--partition", "debug"

    Raises UsageError for what cannot be, GangStartError with the launcher's own words where it did not start. Threads
    may use it: calls follow each other.
    """

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
        self._talking = False
        self._number = 0
        self._starts = 0
        self._job: Job | None = None
        self._closed = False
        self._lost = ""  # why the job was stopped before this one
        self._owner = os.getpid()
        self.screen = _screen()
        self.on_printed: Callable[[Printed], None] = self.screen.show
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

    # ---- calls

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float | None = None, **kwargs: Any) -> Results:
        """Call `fn(*args, **kwargs)` on every rank; what each returned, JAX's arrays as numpy's.

        Raises what the ranks raise: itself, with `.rank`, `.host` and the remote traceback; a group where they raise
        different errors. WorkerDied if a rank's process ends. CallTimeout after `timeout` seconds, with where
        each rank was. KeyboardInterrupt at a Ctrl-C: the ranks are interrupted, a second one stops the gang.
        """
        __tracebackhide__ = True
        with self.converse(fn, *args, **kwargs) as talk:
            return self.collect(talk, timeout)

    def map(
        self,
        f: Callable[..., Any],
        xs: Any,
        *,
        chunk: int | str = "auto",
        in_axes: Any = 0,
        static: Mapping[str, Any] | None = None,
        jax: bool = True,
    ) -> Any:
        """`f` of each item of `xs`, over all devices of all ranks; results in order.

        xs:       arrays that are mapped along `in_axes` (as of jax.vmap: an axis, None, or containers of these), or
                  lists of numbers; in dicts, tuples and lists
        chunk:    items that a device gets at once; "auto": by the time that they take
        static:   further arguments of `f`, by name, which are not mapped
        jax:      False for a Python function: it is called item by item on all ranks, and the results are a list

        The function is vmapped and compiled; what it returns for n items has n rows, as numpy arrays in the containers
        that it returns. NotTraceable, a TypeError, where JAX cannot compile it.
        """
        from jaxrun.mapping import mapping

        return mapping.map(self, f, xs, chunk=chunk, in_axes=in_axes, static=static, jax=jax)

    def imap(
        self,
        f: Callable[..., Any],
        xs: Iterable[Any],
        *,
        chunk: int | str = "auto",
        static: Mapping[str, Any] | None = None,
        jax: bool = True,
    ) -> Iterator[Any]:
        """The same for any iterable of items, which are taken as they are needed: an iterator over the results."""
        from jaxrun.mapping import mapping

        return mapping.imap(self, f, xs, chunk=chunk, static=static, jax=jax)

    def explain(self) -> str:
        """What the last map on this gang has chosen: chunks, devices, and how fast it was."""
        from jaxrun.mapping.account import account

        return str(account(self) or "this gang has mapped nothing yet")

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
            cells = _cells()
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

    # ---- the variables of a notebook's cells

    def __getitem__(self, name: str) -> Results:
        """What a variable of the %%gang cells is on each rank."""
        return self.run(remote_function(f"{RUNTIME}.cells", "get"), name)

    def __setitem__(self, name: str, value: Any) -> None:
        """Give all ranks a variable of this value, for the %%gang cells."""
        self.run(remote_function(f"{RUNTIME}.cells", "put"), name, value)

    __iter__ = None  # it is no sequence

    def __reduce__(self) -> NoReturn:
        raise TypeError("a gang stays in the process that has started it; a function that it runs cannot refer to it")

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

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt in what the ranks run."""
        self._known.interrupt()

    # ---- its life

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


def launch(
    fn: Callable[..., Any],
    *args: Any,
    processes: int | None = None,
    devices: int | None = None,
    timeout: float | None = None,
    **more: Any,
) -> Results:
    """Call `fn(*args)` on every rank of a job that is started for it, and ends with it.

    `more`: what Gang takes besides, and keyword arguments for `fn`.
    """
    own = {name: more.pop(name) for name in _OF_A_GANG if name in more}
    with Gang(processes, devices, **own) as gang:
        return gang.run(fn, *args, timeout=timeout, **more)


_OF_A_GANG = ("hosts", "backend", "platform", "env", "lockstep", "run_dir", "options")


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


def _screen() -> Lines | Screen:
    """Where to show what ranks print."""
    if "IPython" in sys.modules:
        from jaxrun.notebook import screen

        if (shell := screen.shell()) is not None:
            return screen.Screen(shell)
    return Lines()


def _cells() -> Sources | None:
    if "IPython" in sys.modules:
        from jaxrun.notebook import sources

        return sources.sources()
    return None


_gangs: weakref.WeakSet[Gang] = weakref.WeakSet()


def _close_all() -> None:
    for gang in tuple(_gangs):
        gang.close()


atexit.register(_close_all)  # before the nurseries', which were registered first
