"""Starts workers: each in a fresh interpreter, or all by forking one process that has imported jax.

A worker gets a session of its own, so that all of its children can be killed with it and a terminal's Ctrl-C
reaches jaxrun alone; rank 0 keeps jaxrun's stdin.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from jaxrun.forkserver.client import start_process
from jaxrun.job.plan import Plan, Worker
from jaxrun.protocol.codec import encode
from jaxrun.protocol.flight_file import LOCKSTEP_OFF, TEXT_OFFSET, flight_file_name
from jaxrun.protocol.worker_messages import FORK_DESCRIPTORS, ForkWorker

_PIPE_SIZE = 2**20
_F_SETPIPE_SZ = 1031


@dataclass(frozen=True, slots=True)
class WorkerPipes:
    """The agent's ends of what connects it to one worker: all non-blocking; `stacks` and `flight` are files."""

    channel: socket.socket
    out: int
    err: int
    stacks: int
    flight: int

    def close(self) -> None:
        for stream in (self.out, self.err, self.stacks, self.flight):
            os.close(stream)
        self.channel.close()


@dataclass(frozen=True, slots=True)
class _WorkerEnds:
    stdin: int
    stdout: int
    stderr: int
    channel: int
    stacks: int
    flight: int

    def in_order(self) -> list[int]:
        return [getattr(self, name) for name in FORK_DESCRIPTORS]

    def close(self) -> None:
        for descriptor in (self.stdin, self.stdout, self.stderr, self.channel):
            os.close(descriptor)  # not the stacks and the flight: those files are the agent's too


@dataclass(frozen=True, slots=True)
class ForkRequest:
    """What the fork server is to be sent for one worker."""

    message: bytes
    ends: _WorkerEnds

    @property
    def descriptors(self) -> list[int]:
        return self.ends.in_order()

    def close(self) -> None:
        self.ends.close()


class Spawner:
    """Starts the workers of one plan; `environ` is the launcher's own environment. All may raise OSError.

    `run_dir` is the job's; `flights` the same where this host sees it, and else None, as without one.
    """

    def __init__(self, plan: Plan, environ: Mapping[str, str], run_dir: str, flights: Path | None = None) -> None:
        self._plan = plan
        self._run_dir = run_dir
        self._flights = flights if plan.job.lockstep != LOCKSTEP_OFF else None
        self._environ = plan.base_env(environ)

    def spawn(self, worker: Worker) -> tuple[int, WorkerPipes]:
        """Start one worker in an interpreter of its own; returns its process id."""
        lines, ends = _connect(worker.rank, self._flights)
        told = self._env_for(worker, ends)
        files = (ends.stacks, ends.flight)
        for descriptor in (ends.channel, *files):
            os.set_inheritable(descriptor, True)
        try:
            pid = start_process(self._plan.argv, {**self._environ, **told}, (ends.stdin, ends.stdout, ends.stderr))
        except OSError:
            lines.close()
            raise
        finally:
            ends.close()
        for descriptor in files:
            os.set_inheritable(descriptor, False)
        return pid, lines

    def fork_request(self, worker: Worker) -> tuple[WorkerPipes, ForkRequest]:
        """Connect one worker, and what to send the fork server for it; its process id comes with a Forked."""
        lines, ends = _connect(worker.rank, self._flights)
        return lines, ForkRequest(encode(ForkWorker(worker.rank, self._env_for(worker, ends))), ends)

    def _env_for(self, worker: Worker, ends: _WorkerEnds) -> dict[str, str]:
        descriptors = {"channel_fd": ends.channel, "stacks_fd": ends.stacks, "flight_fd": ends.flight}
        return self._plan.worker_env(worker, run_dir=self._run_dir, **descriptors).to_env()


def _connect(rank: int, flights: Path | None) -> tuple[WorkerPipes, _WorkerEnds]:
    ours, theirs = socket.socketpair()
    out, stdout = _pipe()
    err, stderr = _pipe()
    stacks = os.memfd_create(f"stacks-{rank}")
    flight = _flight_recorder(rank, flights)
    stdin = os.dup(0) if rank == 0 and _is_open(0) else os.open(os.devnull, os.O_RDONLY)
    ours.setblocking(False)
    return WorkerPipes(ours, out, err, stacks, flight), _WorkerEnds(
        stdin, stdout, stderr, theirs.detach(), stacks, flight
    )


def _flight_recorder(rank: int, directory: Path | None) -> int:
    """A file in `directory` that survives everybody; where it cannot be there, one in memory, even an empty one."""
    if directory is not None:
        with contextlib.suppress(OSError):
            flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
            file = os.open(directory / flight_file_name(rank), flags, 0o644)
            try:
                os.posix_fallocate(file, 0, TEXT_OFFSET)  # or a full disk would be a signal to the worker that maps it
                mmap.mmap(file, TEXT_OFFSET).close()  # some file systems cannot
                return file
            except (OSError, ValueError):
                os.close(file)
                (directory / flight_file_name(rank)).unlink()
    file = os.memfd_create(f"flight-{rank}")
    with contextlib.suppress(OSError):  # a limit on the size of files holds for it, too
        os.ftruncate(file, TEXT_OFFSET)
    return file


def _pipe() -> tuple[int, int]:
    read, write = os.pipe()
    os.set_blocking(read, False)
    with contextlib.suppress(OSError):  # a user may only have so much in pipes; the usual 64 KiB do
        fcntl.fcntl(read, _F_SETPIPE_SZ, _PIPE_SIZE)
    return read, write


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True
