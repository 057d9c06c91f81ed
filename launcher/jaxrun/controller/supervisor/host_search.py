"""Looks whether hosts are there: has the engine run a command on each of them, all at the same time."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable
from functools import partial

from jaxrun.controller.supervisor.launch_process import LaunchProcess
from jaxrun.node.agent.agent import OUTPUT
from jaxrun.node.channel.event_loop import EventLoop

_KILL_AFTER_S = 2.0  # after SIGTERM


class HostSearch:
    """One search at a time, in `loop`; `clock` returns seconds since the epoch. `found` is what the last has found."""

    def __init__(
        self, loop: EventLoop, clock: Callable[[], float], on_found: Callable[[tuple[str, ...]], None]
    ) -> None:
        """`on_found` is called with the hosts on which the command has ended with 0, once it has ended on all."""
        self._loop = loop
        self._clock = clock
        self._on_found = on_found
        self._running: dict[str, LaunchProcess] = {}
        self.found: tuple[str, ...] = ()
        self._deadline: float | None = None
        self._signals: list[signal.Signals] = []  # for those that are late
        loop.add_timer(lambda: self._deadline, self._end_late)

    def begin(self, hosts: Iterable[str], start: Callable[[str], LaunchProcess | None], limit: float) -> None:
        """Run what `start` returns for each host, for `limit` seconds at most; None where that cannot be started."""
        started = {host: process for host in hosts if (process := start(host)) is not None}
        self._running, self.found = started, ()
        self._deadline, self._signals = self._clock() + limit, [signal.SIGTERM, signal.SIGKILL]
        for process in started.values():
            self._loop.add_reader(process.fileno(), OUTPUT, partial(self._read, process))
        self._conclude_if_over()

    def on_child_exit(self) -> None:
        """A process has ended, maybe one of these."""
        ended = [host for host, process in self._running.items() if process.reap()]
        for host in ended:
            process = self._running.pop(host)
            self.found += (host,) if process.status == 0 else ()
            self._loop.remove_reader(process.fileno())
            process.close()
        if ended:
            self._conclude_if_over()

    def close(self) -> list[LaunchProcess]:
        """Give up; returns what still runs, and has been told to end."""
        for process in self._running.values():
            process.ask_to_end()
        return list(self._running.values())

    def _read(self, process: LaunchProcess) -> None:
        if process.read() is None:
            self._loop.remove_reader(process.fileno())

    def _end_late(self) -> None:
        signum = self._signals.pop(0)
        self._deadline = self._clock() + _KILL_AFTER_S if self._signals else None
        for process in self._running.values():
            process.signal(signum)

    def _conclude_if_over(self) -> None:
        if not self._running:
            self._deadline = None
            self._on_found(self.found)
