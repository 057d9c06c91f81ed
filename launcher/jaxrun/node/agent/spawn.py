"""Starts workers: each in a fresh interpreter, or all by forking one process that has imported jax.

A worker gets a session of its own, so that all of its children can be killed with it and a terminal's Ctrl-C
reaches jaxrun alone; rank 0 keeps jaxrun's stdin, unless --stdin says otherwise.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from jaxrun.files.own_files import open_own_directory
from jaxrun.node.early_signals import given_mask
from jaxrun.node.forkserver.client import start_process
from jaxrun.protocol.agent_messages import StartWorker
from jaxrun.protocol.codec import encode
from jaxrun.protocol.env import WorkerEnv
from jaxrun.protocol.flight_file import LOCKSTEP_OFF, TEXT_OFFSET, flight_file_name
from jaxrun.protocol.forkserver_messages import FORK_DESCRIPTORS, ForkWorker
from jaxrun.protocol.hidden_fields import HidesFields
from jaxrun.protocol.names import GANG_ADDRESS, GANG_TUNNEL, JOB_ID
from jaxrun.protocol.placeholders import fill_in
from jaxrun.protocol.settings import STDIN_RANK_0
from jaxrun.protocol.worker_command import worker_argv
from jaxrun.protocol.worker_messages import RankSecret
from jaxrun.spec.job.environment import PLATFORMS_VARIABLE, inherited_job_variables
from jaxrun.spec.job.option_checks import PRELOAD_NONE

_PIPE_BYTES = 2**20
_F_SETPIPE_SZ = 1031
_NEW_FLIGHT = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC


class WorkerPipes(Struct, frozen=True):
    """The agent's ends of a worker's channel and pipes, all non-blocking, and its files `stacks` and `flight`."""

    channel: socket.socket
    out: int
    err: int
    stacks: int
    flight: int

    def close(self) -> None:
        for stream in (self.out, self.err, self.stacks, self.flight):
            os.close(stream)
        self.channel.close()


class WorkerEnds(Struct, frozen=True):
    """The worker's ends, as descriptors that the agent closes once the worker has them."""

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
            os.close(descriptor)  # not stacks and flight: the agent continues to read those files


class WorkerSetup(HidesFields, frozen=True):
    """How to start the workers of one agent in one attempt.

    argv:        the command of each
    environ:     the environment that they share
    workers:     what each one is told besides; its descriptors are known when it is spawned
    flight_dir:  where this host can write their flight recorders; None for nowhere
    wrap:        the words of the command inside which each is started, with %r, %l and %h; none without --wrap
    preload:     the value of --preload
    """

    hidden = frozenset({"environ"})

    argv: tuple[str, ...]
    environ: Mapping[str, str]
    workers: tuple[WorkerEnv, ...]
    flight_dir: Path | None = None
    wrap: tuple[str, ...] = ()
    preload: str = PRELOAD_NONE

    @property
    def reader(self) -> int | None:
        """The rank here that has jaxrun's standard input; None if there is none."""
        return next((worker.rank for worker in self.workers if _has_stdin(worker.stdin, worker.rank)), None)

    def command_of(self, worker: WorkerEnv) -> tuple[str, ...]:
        """Return the whole command that starts this worker; its first word is a path, if it can be found."""
        if not self.wrap:
            return self.argv
        import shutil

        first, *words = fill_in(self.wrap, worker)
        return (shutil.which(first, path=self.environ.get("PATH")) or first, *words, *self.argv)


def setup_of_orders(starts: Sequence[StartWorker], environ: Mapping[str, str], rank_token: str) -> WorkerSetup:
    """Return how to start the workers of this agent, which have the same host; their logs have a directory then."""
    unset, first = inherited_job_variables(environ), starts[0]
    kept = {name: value for name, value in environ.items() if name not in unset}
    return WorkerSetup(
        argv=worker_argv(sys.executable, first.program),
        environ=with_own_variables(_reach_gang({**kept, **first.environment, JOB_ID: first.worker.job_id}, environ)),
        workers=tuple(replace(start.worker, rank_token=rank_token) for start in starts),
        flight_dir=_make_log_dir(first.log_dir),
        wrap=first.wrap,
        preload=first.preload,
    )


def _reach_gang(environ: Mapping[str, str], own: Mapping[str, str]) -> Mapping[str, str]:
    """Add the way through ssh to the process that owns the gang, if this agent, whose environment is `own`, has one."""
    if GANG_ADDRESS not in environ or GANG_TUNNEL not in own:
        return environ
    return {**environ, GANG_ADDRESS: f"{environ[GANG_ADDRESS]},{own[GANG_TUNNEL]}"}


def with_own_variables(environ: Mapping[str, str]) -> Mapping[str, str]:
    """Add what an agent chooses for its own ranks: on NVIDIA's GPUs, where NCCL's own service listens."""
    if environ.get(PLATFORMS_VARIABLE, "").split(",")[0].strip() != "cuda":
        return environ
    from jaxrun.node.agent.nccl_service import own_address

    return {**environ, **own_address(environ)}


def _make_log_dir(name: str) -> Path | None:
    """The directory of the logs, which the head may have made on a file system that shows it here later."""
    if not name:
        return None
    with contextlib.suppress(OSError):
        os.mkdir(name)
    return Path(name)


def spawn(setup: WorkerSetup, worker: WorkerEnv) -> tuple[int, WorkerPipes]:
    """Start one worker in an interpreter of its own; returns its process id. Raises OSError."""
    pipes, ends = _connect(setup, worker)
    env = {**setup.environ, **_variables(worker, ends)}
    files = (ends.stacks, ends.flight)
    for descriptor in (ends.channel, *files):
        os.set_inheritable(descriptor, True)
    try:
        streams = (ends.stdin, ends.stdout, ends.stderr)
        pid = start_process(setup.command_of(worker), env, streams, holds_interrupts=not setup.wrap)
    except OSError:
        pipes.close()
        raise
    finally:
        ends.close()
    for descriptor in files:
        os.set_inheritable(descriptor, False)
    return pid, pipes


def fork_request(setup: WorkerSetup, worker: WorkerEnv) -> tuple[WorkerPipes, bytes, WorkerEnds]:
    """Make the pipes of one worker, and the message and descriptors by which a fork server forks it. Raises OSError."""
    pipes, ends = _connect(setup, worker)
    return pipes, encode(ForkWorker(worker.rank, _variables(worker, ends))), ends


def _connect(setup: WorkerSetup, worker: WorkerEnv) -> tuple[WorkerPipes, WorkerEnds]:
    """Open both ends of a worker's channel and pipes, and its files. Raises OSError, with nothing left open."""
    rank, recorded = worker.rank, worker.lockstep != LOCKSTEP_OFF
    with contextlib.ExitStack() as opened:
        ours, theirs = map(opened.enter_context, socket.socketpair())
        out, stdout = _close_with(opened, *_pipe())
        err, stderr = _close_with(opened, *_pipe())
        (stacks,) = _close_with(opened, os.memfd_create(f"stacks-{rank}"))
        (flight,) = _close_with(opened, _open_flight_recorder(rank, setup.flight_dir if recorded else None))
        (stdin,) = _close_with(opened, open_stdin(worker.stdin, rank))
        ours.setblocking(False)
        if worker.rank_token:
            ours.send(encode(RankSecret(worker.rank_token)))  # waits in the channel until the worker reads it
        if setup.wrap:  # each message then says which process has sent it
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, True)
        opened.pop_all()
    ends = WorkerEnds(stdin, stdout, stderr, theirs.detach(), stacks, flight)
    return WorkerPipes(ours, out, err, stacks, flight), ends


def _close_with(opened: contextlib.ExitStack, *descriptors: int) -> tuple[int, ...]:
    """Let `opened` close these descriptors; returns them."""
    for descriptor in descriptors:
        opened.callback(os.close, descriptor)
    return descriptors


def _variables(worker: WorkerEnv, ends: WorkerEnds) -> dict[str, str]:
    there = replace(worker, channel_fd=ends.channel, stacks_fd=ends.stacks, flight_fd=ends.flight)
    return replace(there, interrupts_blocked=signal.SIGINT in given_mask()).to_env()


def _has_stdin(stdin: str, rank: int) -> bool:
    return (stdin or STDIN_RANK_0) == str(rank)


def open_stdin(stdin: str, rank: int) -> int:
    """Open what a rank reads, where jaxrun's standard input belongs to `stdin`; returns a descriptor."""
    if _has_stdin(stdin, rank):
        with contextlib.suppress(OSError):  # it is closed
            return os.dup(0)
    return os.open(os.devnull, os.O_RDONLY)


def _open_flight_recorder(rank: int, directory: Path | None) -> int:
    """Open a file in `directory`, which outlives all processes; where that fails, one in memory, even an empty one."""
    if directory is not None:
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            folder, name = open_own_directory(directory), flight_file_name(rank)
            stack.callback(os.close, folder)
            file = os.open(name, _NEW_FLIGHT, 0o644, dir_fd=folder)
            try:
                # Or a full disk would kill the worker that maps it, by a signal.
                os.posix_fallocate(file, 0, TEXT_OFFSET)
                mmap.mmap(file, TEXT_OFFSET).close()  # some file systems cannot
                return file
            except (OSError, ValueError):
                os.close(file)
                os.unlink(name, dir_fd=folder)
    file = os.memfd_create(f"flight-{rank}")
    with contextlib.suppress(OSError):  # a limit on the size of files holds for it, too
        os.ftruncate(file, TEXT_OFFSET)
    return file


def _pipe() -> tuple[int, int]:
    read, write = os.pipe()
    os.set_blocking(read, False)
    with contextlib.suppress(OSError):  # the user may have reached a limit of the kernel; 64 KiB do as well
        fcntl.fcntl(read, _F_SETPIPE_SZ, _PIPE_BYTES)
    return read, write
