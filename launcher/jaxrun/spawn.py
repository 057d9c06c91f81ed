"""Starts workers: each in a fresh interpreter, or all by forking one process that has imported jax.

The only module that starts processes of the job. A worker gets a session of its own, so that all of its children can be
killed with it and a terminal's Ctrl-C reaches jaxrun alone; rank 0 keeps jaxrun's standard input.
"""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from .contract import FORK_DESCRIPTORS, Decoder, Fork, ForkDeclined, Forked, encode
from .contract.variables import JOB_ID
from .plan import Plan, Worker

_PIPE_SIZE = 2**20
_F_SETPIPE_SZ = 1031
_PIECE = 65536


@dataclass(frozen=True, slots=True)
class Lines:
    """The agent's ends of what connects it to one worker: all non-blocking, `stacks` a memory file."""

    channel: socket.socket
    out: int
    err: int
    stacks: int


@dataclass(frozen=True, slots=True)
class _WorkerEnds:
    stdin: int
    stdout: int
    stderr: int
    channel: int
    stacks: int

    def in_order(self) -> list[int]:
        return [getattr(self, name) for name in FORK_DESCRIPTORS]

    def close(self) -> None:
        for descriptor in (self.stdin, self.stdout, self.stderr, self.channel):
            os.close(descriptor)


class Spawner:
    """Starts the workers of one plan; `environ` is the launcher's own environment."""

    def __init__(self, plan: Plan, environ: Mapping[str, str], run_dir: str) -> None:
        self._plan = plan
        self._run_dir = run_dir
        self._environ = plan.base_env(environ) | {JOB_ID: plan.job_id}

    def fresh(self, worker: Worker) -> tuple[int, Lines]:
        """Start one worker in an interpreter of its own; returns its process id."""
        lines, ends = _connect(worker.rank)
        told = self._told(worker, ends)
        for descriptor in (ends.channel, ends.stacks):
            os.set_inheritable(descriptor, True)
        actions = [
            (os.POSIX_SPAWN_DUP2, source, target)
            for target, source in enumerate((ends.stdin, ends.stdout, ends.stderr))
        ]
        try:
            pid = os.posix_spawn(
                self._plan.argv[0],
                list(self._plan.argv),
                {**self._environ, **told},
                file_actions=actions,
                setsid=True,
            )
        finally:
            os.set_inheritable(ends.stacks, False)
            ends.close()
        return pid, lines

    def fork_server(self) -> ForkServer:
        """Start the process that imports jax once."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        python, *rest = self._plan.argv
        program = rest[rest.index("jaxrun_runtime") + 1 :]
        argv = [python, "-m", "jaxrun_runtime.forkserver", str(theirs.fileno()), *program]
        os.set_inheritable(theirs.fileno(), True)
        null = os.open(os.devnull, os.O_RDWR)
        actions = [(os.POSIX_SPAWN_DUP2, null, 0), (os.POSIX_SPAWN_DUP2, null, 1)]
        pid = os.posix_spawn(python, argv, self._environ, file_actions=actions, setsid=True)
        os.close(null)
        theirs.close()
        return ForkServer(pid, ours)

    def fork(self, server: ForkServer, worker: Worker) -> Lines:
        """Ask the server for one worker; its process id comes with a Forked."""
        lines, ends = _connect(worker.rank)
        request = encode(Fork(worker.rank, self._told(worker, ends)))
        socket.send_fds(server.channel, [request], ends.in_order())
        ends.close()
        return lines

    def _told(self, worker: Worker, ends: _WorkerEnds) -> dict[str, str]:
        env = self._plan.worker_env(
            worker, run_dir=self._run_dir, channel_fd=ends.channel, stacks_fd=ends.stacks
        )
        return env.to_env()


class ForkServer:
    """The agent's handle on the process that forks."""

    def __init__(self, pid: int, channel: socket.socket) -> None:
        self.pid = pid
        self.channel = channel

    def receive(self) -> Forked | ForkDeclined | None:
        """The next answer; None when the server has gone. To be called when the channel is readable."""
        try:
            data = self.channel.recv(_PIECE)
        except ConnectionError:
            return None
        if not data:
            return None
        (answer,) = Decoder().feed(data)
        assert isinstance(answer, (Forked, ForkDeclined))
        return answer


def _connect(rank: int) -> tuple[Lines, _WorkerEnds]:
    ours, theirs = socket.socketpair()
    out, stdout = _pipe()
    err, stderr = _pipe()
    stacks = os.memfd_create(f"stacks-{rank}")
    stdin = os.dup(0) if rank == 0 and _is_open(0) else os.open(os.devnull, os.O_RDONLY)
    ours.setblocking(False)
    return Lines(ours, out, err, stacks), _WorkerEnds(stdin, stdout, stderr, theirs.detach(), stacks)


def _pipe() -> tuple[int, int]:
    read, write = os.pipe()
    os.set_blocking(read, False)
    try:
        fcntl.fcntl(read, _F_SETPIPE_SZ, _PIPE_SIZE)
    except OSError:
        pass  # a user may only have so much in pipes; the usual 64 KiB do
    return read, write


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True
