"""The agents of all ranks of one host, as forks of this process; used where no mpirun or srun starts them one by one.

 this process ── guard: kills the agents' process groups if this process is killed
   ├── agent of rank 4, in a session of its own ── its worker
   └── agent of rank 5 …

What the agents have to say comes here over a pipe, and is said once for all of them.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NoReturn

from jaxrun.errors import EXIT_SIGNAL_BASE, EXIT_UNAVAILABLE, JaxrunError, describe_shortage
from jaxrun.node.agent import remote
from jaxrun.node.agent.guard import Guard
from jaxrun.node.agent.signals import SignalPipe
from jaxrun.protocol.connect import HeadAddress
from jaxrun.text import format_ranks

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_READ_BYTES = 65536
_LAST_AGENTS_S = 10.0  # from the end of the first agent to the last's; some may still look for a head that is gone
_SEPARATOR = b"\0"


def run(
    find_head: Callable[[], HeadAddress | None],
    ranks: Sequence[int],
    size: int,
    timeout: float,
    environ: Mapping[str, str],
    not_found: str = "",
    command: Sequence[str] = (),
) -> tuple[int, list[str]]:
    """Be the agents of `ranks` until all have ended; returns the status of the job, and what they say of its end.

    Arguments are those of remote.run. The agents say something only where the head is not there, or not any more.
    """
    guard = Guard()
    reading, writing = os.pipe()
    agents: dict[int, int] = {}  # rank by process id
    try:
        for rank in ranks:
            pid = os.fork()
            if pid == 0:
                os.close(reading)
                os.setsid()  # a terminal's Ctrl-C is for the first process, which passes it on
                guard.add(os.getpid())
                guard.leave_to_parent()
                _be_agent(find_head, rank, size, timeout, environ, not_found, command, writing)
            agents[pid] = rank
    except OSError:
        _signal(agents, signal.SIGKILL)
        guard.disarm()
        raise
    os.close(writing)
    statuses, said = _wait(agents, reading)
    guard.disarm()
    return joint_status(statuses), join_texts(said, ranks)


def _be_agent(
    find_head: Callable[[], HeadAddress | None],
    rank: int,
    size: int,
    timeout: float,
    environ: Mapping[str, str],
    not_found: str,
    command: Sequence[str],
    report: int,
) -> NoReturn:
    """Be the agent of one rank, in a process of its own."""

    def send(text: str) -> None:
        with contextlib.suppress(OSError):
            os.write(report, text.encode(errors="replace") + _SEPARATOR)

    status = EXIT_UNAVAILABLE
    try:
        status = remote.run(find_head, rank, size, timeout, environ, not_found, command=command, on_lost=send)
    except JaxrunError as error:
        send(str(error))
        status = error.exit_code
    except (OSError, RuntimeError) as error:
        send(describe_shortage(error) or f"an agent failed: {error!r}")
    finally:
        os._exit(status)


def _wait(agents: Mapping[int, int], reading: int) -> tuple[dict[int, int], list[str]]:
    """Wait until all agents have ended, passing signals on; returns their statuses by rank, and what they said.

    The statuses are in the order in which the agents ended. A second signal that asks for the end kills them all.
    """
    statuses: dict[int, int] = {}
    said = b""
    asked = 0
    deadline: float | None = None
    with SignalPipe((signal.SIGCHLD, *_FORWARDED)) as signals:
        while _reap(agents, statuses) < len(agents):
            live = [pid for pid, rank in agents.items() if rank not in statuses]
            if statuses and deadline is None:
                deadline = time.monotonic() + _LAST_AGENTS_S
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                _signal(live, signal.SIGKILL)
                left = None
            ready, _, _ = select.select([signals.fileno(), reading], [], [], left)
            if reading in ready:
                said += os.read(reading, _READ_BYTES)
            for signum in signals.receive():
                asked += signum in _ENDING
                if signum != signal.SIGCHLD:
                    _signal(live, signal.SIGKILL if asked > 1 else signum)
    os.set_blocking(reading, False)
    with contextlib.suppress(BlockingIOError):
        while data := os.read(reading, _READ_BYTES):
            said += data
    os.close(reading)
    return statuses, [text.decode(errors="replace") for text in said.split(_SEPARATOR) if text]


def _reap(agents: Mapping[int, int], statuses: dict[int, int]) -> int:
    """Add the statuses of agents that have ended; returns how many have."""
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            if pid in agents:
                statuses[agents[pid]] = os.waitstatus_to_exitcode(status)
    return len(statuses)


def _signal(pids: Iterable[int], signum: int) -> None:
    """Signal agents; where one is killed, its own guard kills its worker."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)


def joint_status(statuses: Mapping[int, int]) -> int:
    """The job's status: that of the first agent to end, but for those that were killed."""
    values = list(statuses.values())
    first = next((value for value in values if value > 0), min(values, default=0))
    return EXIT_SIGNAL_BASE - first if first < 0 else first


def join_texts(said: Sequence[str], ranks: Sequence[int]) -> list[str]:
    """The texts, those that differ in the agent's rank alone as one.

    Where only some agents have found no head, the others have met it, and it was gone before those came: no word of it.
    """
    merged: dict[str, list[str]] = {}
    for text in said:
        merged.setdefault(re.sub(r"\brank \d+\b", "rank #", text), []).append(text)
    return [
        text.replace("rank #", format_ranks(ranks))
        for text, texts in merged.items()
        if len(texts) == len(ranks) or "rank #" not in text
    ]
