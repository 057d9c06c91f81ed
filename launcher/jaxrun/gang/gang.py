"""Gang: a job whose ranks stay warm and run what they are sent; and launch, which is a gang for one call.

A gang that has lost a rank, or whose ranks are out of step, is sick: it is started anew when it is used next.
"""

from __future__ import annotations

import atexit
import json
import os
import selectors
import shutil
import sys
import tempfile
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from jaxrun.contract.flight import RECORD
from jaxrun.contract.parcel import Inbox, Kind, Parcel, Reference, pack
from jaxrun.errors import JaxrunError, UsageError
from jaxrun.gang.conversation import Conversation, Gone, Printed, Returned
from jaxrun.gang.launcher import Launcher
from jaxrun.gang.meeting import Meeting
from jaxrun.gang.nursery import nursery
from jaxrun.gang.remote import CallTimeout, GangError, GangStartError, WorkerDied, raised
from jaxrun.gang.shape import Shape
from jaxrun.gang.switchboard import Switchboard
from jaxrun.ranks import spell

FAILURE_GRACE = 1.5  # seconds that the others have to return after a rank has raised
_HEAVY = 2**24  # bytes of a function with all that it closes over, from which a warning says so
_LEAVING = 5.0  # seconds for the ranks to leave
_FAULTS = ("kill", "pause", "cut")


class Results(tuple[Any, ...]):
    """What each rank has returned, by rank; `main` is rank 0's."""

    __slots__ = ()

    @property
    def main(self) -> Any:
        return self[0]


@dataclass(frozen=True, slots=True)
class Worker:
    """One rank of a gang: `devices` is how many it has."""

    rank: int
    host: str
    pid: int
    local_rank: int
    devices: int
    platform: str


@dataclass(slots=True)
class _Job:
    """One start of a gang; a sick gang gets another."""

    launcher: Launcher
    meeting: Meeting
    switchboard: Switchboard
    workers: tuple[Worker, ...]
    sick: str = ""
    interrupts: int = 0


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
        self._job: _Job | None = None
        self._closed = False
        self._owner = os.getpid()
        self.on_printed: Callable[[Printed], None] = _Lines().show
        self._start()
        _gangs.add(self)

    # ---- what it is

    @property
    def workers(self) -> tuple[Worker, ...]:
        return self._known.workers

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
    def _known(self) -> _Job:
        if self._job is None:
            raise GangError(f"this {self.shape} is closed; make another")
        return self._job

    # ---- calls

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float | None = None, **kwargs: Any) -> Results:
        """Call `fn(*args, **kwargs)` on every rank; what each returned, JAX's arrays as numpy's.

        Raises what the ranks raise: itself, with `.rank`, `.host` and the remote traceback; a group where they raise
        different errors. WorkerDied if a rank's process ends. CallTimeout after `timeout` seconds, with where
        each rank was. KeyboardInterrupt at a Ctrl-C: the ranks are interrupted, a second one stops the gang.
        """
        with self.converse(fn, *args, **kwargs) as talk:
            return self._collect(talk, timeout)

    def converse(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Conversation:
        """Start `fn(*args, **kwargs)` on every rank, and talk with it; to be used in a `with`."""
        self._lock.acquire()
        try:
            if self._talking:
                raise GangError("this gang is in a conversation already; end that first")
            self._ready()
            job = self._known
            self._number += 1
            order = {"print": True, "interrupts": job.interrupts}
            note = json.dumps(order).encode()
            task = pack(Kind.TASK, self._number, (fn, args, kwargs), share=self.shares_memory, note=note)
            if len(task.body) > _HEAVY:
                warnings.warn(
                    f"{getattr(fn, '__name__', fn)} and what it closes over weigh {len(task.body) / 2**20:.0f} MiB, "
                    "which go to every rank with each call; pass large arrays as arguments, or load them on the ranks",
                    stacklevel=3,
                )
            talk = Conversation(self, self._number, task)
            self._talking = True
            return talk
        except BaseException:
            self._lock.release()
            raise

    def conversation_over(self) -> None:
        """For Conversation."""
        self._talking = False
        self._lock.release()

    def _collect(self, talk: Conversation, timeout: float | None) -> Results:
        deadline = None if timeout is None else time.monotonic() + timeout
        failed_at: float | None = None
        while talk.missing:
            limits = [at for at in (deadline, failed_at and failed_at + FAILURE_GRACE) if at is not None]
            left = min(limits) - time.monotonic() if limits else None
            match talk.receive(left):
                case Printed() as printed:
                    self.on_printed(printed)
                case Returned(error=error) if error is not None:
                    failed_at = failed_at or time.monotonic()
                case Gone():
                    died = talk.died()
                    assert died is not None
                    raise died from (raised(talk.failures) if talk.failures else None)
                case None if talk.missing:
                    self._give_up(talk, timeout)
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
        if kind not in _FAULTS:
            raise UsageError(f"a fault is one of {', '.join(_FAULTS)}, not {kind!r}")
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
        self._known.interrupts += 1
        self._known.launcher.order(signal=2)

    # ---- its life

    def sicken(self, reason: str) -> None:
        """It cannot be used as it is; the next call starts it anew."""
        if self._job is not None:
            self._job.sick = self._job.sick or reason

    def post_mortem(self, patience: float) -> WorkerDied:
        """Why the job has ended."""
        launcher = self._known.launcher
        verdict = launcher.verdict(patience)
        if verdict is None:
            return WorkerDied(f"a rank's connection has ended, and its launcher does not say why\n{launcher.said}", (), {}, 1)
        launcher.wait(patience)
        text = "\n".join(filter(None, (verdict.headline, verdict.means, *verdict.details, verdict.traceback)))
        return WorkerDied.by(verdict, text)

    def restart(self) -> None:
        """Start it anew: fresh processes that know nothing of earlier calls."""
        with self._lock:
            self.stop()
            self._start()

    def stop(self) -> None:
        """Stop the job at once, as it is; the next call starts another."""
        if self._job is not None:
            self._job.switchboard.close()
            self._job.launcher.end()
            self._forget()

    def close(self) -> None:
        """Let the ranks leave, and end what does not. May be called again."""
        with self._lock:
            self._closed = True
            job = self._job
            if job is None or self._owner != os.getpid():
                return
            if not job.sick:
                job.switchboard.send(Parcel(Kind.LEAVE, 0), job.switchboard.ranks)
                deadline = time.monotonic() + _LEAVING
                while job.switchboard.ranks and time.monotonic() < deadline:
                    job.switchboard.poll(deadline - time.monotonic())
                job.launcher.wait(max(0.0, deadline - time.monotonic()))
            self.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _ready(self) -> None:
        if self._closed:
            raise GangError(f"this {self.shape} is closed; make another")
        job = self._job
        if job is not None and not job.sick:
            for rank, parcel in job.switchboard.poll(0):
                if parcel is None:
                    self.sicken(f"rank {rank} ended between two calls")
        if job is None or job.sick:
            if job is not None:
                _say(f"the {self.shape} is started anew, what its ranks knew is lost: {job.sick}")
            self.restart()

    def _forget(self) -> None:
        job, self._job = self._job, None
        if job is not None:
            job.meeting.close()

    def _start(self) -> None:
        self._starts += 1
        shape = self.shape
        environ = dict(os.environ)
        bare = not shape.forks
        ready = nursery({**environ, **shape.env}, bare=bare)
        meeting = Meeting(far=shape.backend != "local", interface=_interface(shape.options))
        launcher = None
        try:
            words = shape.words(self._next_run_dir(meeting.directory))
            argv = [sys.executable, "-P", "-m", "jaxrun", *words]
            launcher = Launcher(ready, argv, {**environ, **meeting.environ}, Path(words[words.index("--run-dir") + 1]))
            self._job = _gather(launcher, meeting)
        except BaseException:
            if launcher is not None:
                launcher.end()
            meeting.close()
            raise

    def _next_run_dir(self, directory: Path) -> Path:
        if self._run_dir is None:
            return directory / "run"
        return self._run_dir if self._starts == 1 else self._run_dir.with_name(f"{self._run_dir.name}-{self._starts}")


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


def _gather(launcher: Launcher, meeting: Meeting) -> _Job:
    """Wait until all ranks have come. GangStartError with the launcher's words if it ends before."""
    switchboard = Switchboard(launcher)
    found: dict[int, dict[str, Any]] = {}
    guests: dict[int, tuple[Any, Inbox]] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(meeting.arrived, selectors.EVENT_READ)
        selector.register(launcher.process, selectors.EVENT_READ)
        while not found or len(found) < next(iter(found.values()))["size"]:
            for key, _ in selector.select():
                if key.fd == launcher.process:
                    verdict = launcher.verdict(0)
                    code = verdict.exit_code if verdict is not None else 2
                    raise GangStartError(f"the gang did not start:\n{launcher.said}", code)
                if key.fd == meeting.arrived:
                    guest = meeting.welcome()
                    if guest is not None:
                        guest.setblocking(False)
                        guests[guest.fileno()] = guest, Inbox(guest)
                        selector.register(guest, selectors.EVENT_READ)
                    continue
                guest, inbox = guests[key.fd]
                try:
                    about = inbox.receive().open()
                except BlockingIOError:
                    continue
                except (EOFError, OSError):
                    selector.unregister(guest)  # the launcher will say why
                    continue
                selector.unregister(guest)
                found[about["rank"]] = about
                switchboard.add(about["rank"], guest, inbox)
    names = ("rank", "host", "pid", "local_rank", "devices", "platform")
    workers = tuple(Worker(**{name: found[rank][name] for name in names}) for rank in sorted(found))
    return _Job(launcher, meeting, switchboard, workers)


class _Lines:
    """Shows what ranks print, line by line, each with its rank, on this process's own streams."""

    def __init__(self) -> None:
        self._rests: dict[tuple[int, str], str] = {}

    def show(self, printed: Printed) -> None:
        stream = sys.stdout if printed.stream == "out" else sys.stderr
        key = printed.rank, printed.stream
        text = self._rests.pop(key, "") + printed.data.decode(errors="replace")
        *lines, rest = text.split("\n")
        for line in lines:
            print(f"[{printed.rank}] {line}", file=stream)
        if rest:
            self._rests[key] = rest
        stream.flush()


def _interface(options: Sequence[str]) -> str:
    for option, value in zip(options, options[1:], strict=False):
        if option == "--interface":
            return value
    return next((word.partition("=")[2] for word in options if word.startswith("--interface=")), "")


def _say(text: str) -> None:
    print(f"jaxrun: {text}", file=sys.stderr)


_gangs: weakref.WeakSet[Gang] = weakref.WeakSet()


def _close_all() -> None:
    for gang in tuple(_gangs):
        gang.close()


atexit.register(_close_all)  # before the nurseries', which were registered first
