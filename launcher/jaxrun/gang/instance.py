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

from jaxrun.forkserver.launcher_pool import pool_for
from jaxrun.gang.exceptions import GangStartError, WorkerDied
from jaxrun.gang.launcher_process import LauncherProcess
from jaxrun.gang.rank_connections import RankConnections
from jaxrun.gang.rank_listener import RankListener
from jaxrun.gang.spec import GangSpec
from jaxrun.protocol.payload import GangMessage, GangMessageKind, GangMessageReader
from jaxrun.text import format_ranks, has_several_hosts, plural

_SHUTDOWN_TIMEOUT_S = 5.0  # seconds for the ranks to leave
_NO_VERDICT = 2  # the launcher's status where it has left none: it did not like its command line


@dataclass(frozen=True, slots=True)
class GangWorker:
    """One rank of a gang: `devices` is how many it has."""

    rank: int
    host: str
    pid: int
    local_rank: int
    devices: int
    platform: str


def describe_gang(shape: GangSpec, workers: Sequence[GangWorker]) -> str:
    """`4 processes x 2 devices (cpu) on this machine`."""
    hosts = {worker.rank: worker.host for worker in workers}
    where = f"on {len(set(hosts.values()))} hosts" if has_several_hosts(hosts) else f"on {hosts[0]}"
    if shape.backend == "local":
        where = f"on {plural(shape.hosts, 'simulated host')}" if shape.hosts else "on this machine"
    count = f"{len(workers)} process{'es' if len(workers) > 1 else ''}"
    return f"{count} x {plural(workers[0].devices, 'device')} ({workers[0].platform}) {where}"


class GangInstance:
    """Started when it is made; `run_dir` None: its files go with it. UsageError, UnavailableError, GangStartError."""

    def __init__(self, shape: GangSpec, run_dir: Path | None) -> None:
        environ = dict(os.environ)
        self.broken = ""  # why it cannot be used as it is
        self.interrupts = 0
        self._meeting = RankListener(far=shape.backend != "local", interface=_interface(shape.options))
        try:
            ready = pool_for({**environ, **shape.env}, with_jax=shape.may_fork)
            run_dir = run_dir or self._meeting.directory / "run"
            self.launcher = LauncherProcess(
                ready, shape.command_line(run_dir), {**environ, **self._meeting.environ}, run_dir
            )
        except BaseException:
            self._meeting.close()
            raise
        self.switchboard = RankConnections(self.launcher)
        try:
            self.workers = self._wait_for_ranks()
        except BaseException:
            self.stop()
            raise

    def mark_broken(self, reason: str) -> None:
        self.broken = self.broken or reason

    def check_connections(self) -> None:
        """Notice, between two conversations, ranks that have ended."""
        for rank, parcel in self.switchboard.poll(0):
            if parcel is None:
                self.mark_broken(
                    f"between two calls, {self.explain_death(_SHUTDOWN_TIMEOUT_S, (rank,))}".partition("\n")[0]
                )

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt in what the ranks run."""
        self.interrupts += 1
        self.launcher.send_command(signal=2)

    def explain_death(self, patience: float, gone: Collection[int]) -> WorkerDied:
        """Why it has ended, which the launcher may take `patience` seconds to say; these ranks are `gone`."""
        verdict = self.launcher.wait_for_verdict(patience)
        if verdict is None:
            text = f"{format_ranks(gone)} of this gang ended, and its launcher does not say why"
            text += f"\n{self.launcher.all_output}"
            return WorkerDied(text, sorted(gone), {worker.rank: worker.host for worker in self.workers}, 1)
        self.launcher.wait(patience)
        parts = (verdict.headline, verdict.means, *verdict.details, verdict.traceback, verdict.divergence)
        return WorkerDied.from_verdict(verdict, "\n".join(filter(None, parts)))

    def shut_down(self) -> None:
        """Let the ranks end by themselves, and with them the job."""
        self.switchboard.send(GangMessage(GangMessageKind.SHUTDOWN, 0), self.switchboard.ranks)
        deadline = time.monotonic() + _SHUTDOWN_TIMEOUT_S
        while self.switchboard.ranks and time.monotonic() < deadline:
            self.switchboard.poll(deadline - time.monotonic())
        self.launcher.wait(deadline - time.monotonic())

    def stop(self) -> None:
        """Stop what is left of it, at once."""
        self.switchboard.close()
        self.launcher.stop()
        self._meeting.close()

    def _wait_for_ranks(self) -> tuple[GangWorker, ...]:
        """Wait until all ranks have come. GangStartError with the launcher's words if it ends before."""
        found: dict[int, dict[str, Any]] = {}
        guests: dict[int, tuple[socket.socket, GangMessageReader]] = {}
        size = None
        with selectors.DefaultSelector() as selector:
            selector.register(self._meeting.arrival_fd, selectors.EVENT_READ)
            selector.register(self.launcher.pidfd, selectors.EVENT_READ)
            while len(found) != size:
                for key, _ in selector.select():
                    if key.fd == self.launcher.pidfd:
                        raise self._start_error()
                    if key.fd == self._meeting.arrival_fd:
                        if (guest := self._meeting.accept()) is not None:
                            guest.setblocking(False)
                            guests[guest.fileno()] = guest, GangMessageReader(guest)
                            selector.register(guest, selectors.EVENT_READ)
                        continue
                    guest, inbox = guests[key.fd]
                    try:
                        about = inbox.receive().load()
                    except BlockingIOError:
                        continue
                    except (EOFError, OSError):
                        selector.unregister(guest)  # the launcher will say why
                        continue
                    selector.unregister(guest)
                    size = about.pop("size")
                    found[about["rank"]] = about
                    self.switchboard.add(about["rank"], guest, inbox)
        self.launcher.read_output()  # the job's first line
        return tuple(GangWorker(**found[rank]) for rank in sorted(found))

    def _start_error(self) -> GangStartError:
        verdict = self.launcher.wait_for_verdict(0)
        code = verdict.exit_code if verdict is not None else _NO_VERDICT
        return GangStartError(f"the gang did not start:\n{self.launcher.all_output}", code)


def _interface(options: Sequence[str]) -> str:
    """What --interface says, which holds for the ranks' way to us, too."""
    words = [part for option in options for part in option.split("=", 1)]
    return words[words.index("--interface") + 1] if "--interface" in words[:-1] else ""
