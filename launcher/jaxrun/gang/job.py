"""One start of a gang: its launcher, where its ranks came to, the connections to them, and what they are."""

from __future__ import annotations

import os
import selectors
import socket
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxrun.contract.parcel import Inbox, Kind, Parcel
from jaxrun.gang.launcher import Launcher
from jaxrun.gang.meeting import Meeting
from jaxrun.gang.nursery import nursery
from jaxrun.gang.remote import GangStartError, WorkerDied
from jaxrun.gang.shape import Shape
from jaxrun.gang.switchboard import Switchboard
from jaxrun.ranks import spell
from jaxrun.wording import plural, several_hosts

_LEAVING = 5.0  # seconds for the ranks to leave
_NO_VERDICT = 2  # the launcher's status where it has left none: it did not like its command line


@dataclass(frozen=True, slots=True)
class Worker:
    """One rank of a gang: `devices` is how many it has."""

    rank: int
    host: str
    pid: int
    local_rank: int
    devices: int
    platform: str


def describe(shape: Shape, workers: Sequence[Worker]) -> str:
    """`4 processes x 2 devices (cpu) on this machine`."""
    hosts = {worker.rank: worker.host for worker in workers}
    where = f"on {len(set(hosts.values()))} hosts" if several_hosts(hosts) else f"on {hosts[0]}"
    if shape.backend == "local":
        where = f"on {plural(shape.hosts, 'simulated host')}" if shape.hosts else "on this machine"
    count = f"{len(workers)} process{'es' if len(workers) > 1 else ''}"
    return f"{count} x {plural(workers[0].devices, 'device')} ({workers[0].platform}) {where}"


class Job:
    """Started when it is made; `run_dir` None: its files go with it. UsageError, UnavailableError, GangStartError."""

    def __init__(self, shape: Shape, run_dir: Path | None) -> None:
        environ = dict(os.environ)
        self.sick = ""  # why it cannot be used as it is
        self.interrupts = 0
        self._meeting = Meeting(far=shape.backend != "local", interface=_interface(shape.options))
        try:
            ready = nursery({**environ, **shape.env}, bare=not shape.forks)
            run_dir = run_dir or self._meeting.directory / "run"
            self.launcher = Launcher(ready, shape.words(run_dir), {**environ, **self._meeting.environ}, run_dir)
        except BaseException:
            self._meeting.close()
            raise
        self.switchboard = Switchboard(self.launcher)
        try:
            self.workers = self._gather()
        except BaseException:
            self.end()
            raise

    def sicken(self, reason: str) -> None:
        self.sick = self.sick or reason

    def look(self) -> None:
        """Notice, between two conversations, ranks that have ended."""
        for rank, parcel in self.switchboard.poll(0):
            if parcel is None:
                self.sicken(f"between two calls, {self.post_mortem(_LEAVING, (rank,))}".partition("\n")[0])

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt in what the ranks run."""
        self.interrupts += 1
        self.launcher.order(signal=2)

    def post_mortem(self, patience: float, gone: Collection[int]) -> WorkerDied:
        """Why it has ended, which the launcher may take `patience` seconds to say; these ranks are `gone`."""
        verdict = self.launcher.verdict(patience)
        if verdict is None:
            text = f"{spell(gone)} of this gang ended, and its launcher does not say why\n{self.launcher.said}"
            return WorkerDied(text, sorted(gone), {worker.rank: worker.host for worker in self.workers}, 1)
        self.launcher.wait(patience)
        parts = (verdict.headline, verdict.means, *verdict.details, verdict.traceback, verdict.divergence)
        return WorkerDied.by(verdict, "\n".join(filter(None, parts)))

    def leave(self) -> None:
        """Let the ranks end by themselves, and with them the job."""
        self.switchboard.send(Parcel(Kind.LEAVE, 0), self.switchboard.ranks)
        deadline = time.monotonic() + _LEAVING
        while self.switchboard.ranks and time.monotonic() < deadline:
            self.switchboard.poll(deadline - time.monotonic())
        self.launcher.wait(deadline - time.monotonic())

    def end(self) -> None:
        """Stop what is left of it, at once."""
        self.switchboard.close()
        self.launcher.end()
        self._meeting.close()

    def _gather(self) -> tuple[Worker, ...]:
        """Wait until all ranks have come. GangStartError with the launcher's words if it ends before."""
        found: dict[int, dict[str, Any]] = {}
        guests: dict[int, tuple[socket.socket, Inbox]] = {}
        size = None
        with selectors.DefaultSelector() as selector:
            selector.register(self._meeting.arrived, selectors.EVENT_READ)
            selector.register(self.launcher.process, selectors.EVENT_READ)
            while len(found) != size:
                for key, _ in selector.select():
                    if key.fd == self.launcher.process:
                        raise self._no_start()
                    if key.fd == self._meeting.arrived:
                        if (guest := self._meeting.welcome()) is not None:
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
                    size = about.pop("size")
                    found[about["rank"]] = about
                    self.switchboard.add(about["rank"], guest, inbox)
        self.launcher.listen()  # the job's first line
        return tuple(Worker(**found[rank]) for rank in sorted(found))

    def _no_start(self) -> GangStartError:
        verdict = self.launcher.verdict(0)
        code = verdict.exit_code if verdict is not None else _NO_VERDICT
        return GangStartError(f"the gang did not start:\n{self.launcher.said}", code)


def _interface(options: Sequence[str]) -> str:
    """What --interface says, which holds for the ranks' way to us, too."""
    words = [part for option in options for part in option.split("=", 1)]
    return words[words.index("--interface") + 1] if "--interface" in words[:-1] else ""
