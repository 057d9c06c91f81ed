"""Reads processes from /proc, and ends processes by id, after checking again that they belong to the testbed."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from state import Refusal

PATIENCE = 10.0


@dataclass(frozen=True)
class Process:
    """A living process. `network`: the identity of its network namespace."""

    pid: int
    network: int
    argv: tuple[str, ...]

    @property
    def command(self) -> str:
        """The name of the program; "ssh" for its stand-in."""
        if self.argv[3:4] == ("ssh",) and os.path.basename(self.argv[2]) == "cli.py":
            return "ssh"
        return os.path.basename(self.argv[0]) if self.argv else ""


def inspect(pid: int) -> Process | None:
    """Return the process with this id; None if there is none, or if it has ended and was not reaped yet."""
    try:
        network = os.stat(f"/proc/{pid}/ns/net").st_ino
        argv = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return None
    return Process(pid, network, tuple(os.fsdecode(argv).rstrip("\0").split("\0")))


def scan() -> list[Process]:
    """Return all living processes of the machine."""
    found = (inspect(int(entry)) for entry in os.listdir("/proc") if entry.isdecimal())
    return [process for process in found if process]


def started_with(pid: int, variable: str, value: str) -> bool:
    """Whether the process was started with this environment variable."""
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
    return os.fsencode(f"{variable}={value}") in environment.split(b"\0")


def end(belongs: Callable[[Process], bool], whose: str) -> None:
    """Kill all processes for which `belongs` is true, and processes that they start meanwhile, until none is left."""
    deadline = time.monotonic() + PATIENCE
    while left := [process.pid for process in scan() if belongs(process)]:
        if time.monotonic() > deadline:
            raise Refusal(f"processes of {whose} do not end although they were killed: {', '.join(map(str, left))}")
        for pid in left:
            _kill(pid, belongs)
        time.sleep(0.01)


def _kill(pid: int, belongs: Callable[[Process], bool]) -> None:
    # Once the descriptor is open, the id cannot pass to another process unnoticed.
    with contextlib.suppress(ProcessLookupError):
        handle = os.pidfd_open(pid)
        try:
            process = inspect(pid)
            if process is not None and belongs(process):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        finally:
            os.close(handle)
