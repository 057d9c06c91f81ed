"""The process that imports jax once for all workers, and forks them: how it is started and spoken to.

It is started before most of the launcher is imported, which then happens in the shadow of its own, longer import:
nothing here may import more than it must.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from jaxrun import RUNTIME

if TYPE_CHECKING:
    from jaxrun.protocol import ForkDeclined, WorkerForked

_RECEIVE_BYTES = 65536


class Request(Protocol):
    """A frame for the server, and the worker's descriptors that go with it; ours are closed once it was sent."""

    @property
    def message(self) -> bytes: ...

    @property
    def descriptors(self) -> list[int]: ...

    def close(self) -> None: ...


class ForkServer:
    """The launcher's handle on it. Where it was `given`, its workers do not carry the mark of the job."""

    def __init__(self, pid: int, channel: socket.socket, *, given: bool = False) -> None:
        self.pid = pid
        self.channel = channel
        self.inherited = given

    def set_up(
        self, program: Sequence[str], values: Mapping[str, str], unset: Sequence[str], directory: str = ""
    ) -> None:
        """Tell a server that was started ahead which program it is for, and what changes for that. OSError.

        `values` and `unset` are about its environment, `directory` is where to go.
        """
        from jaxrun.protocol import ConfigureForkServer, encode

        self.channel.send(encode(ConfigureForkServer(tuple(program), values, tuple(unset), directory)))

    def send(self, request: Request) -> None:
        """Hand over a request, with its descriptors. ConnectionError when the server has gone."""
        try:
            socket.send_fds(self.channel, [request.message], request.descriptors)
        finally:
            request.close()

    def receive(self) -> list[WorkerForked | ForkDeclined | None]:
        """The answers that have arrived; None, as the last, when the server has gone."""
        from jaxrun.protocol import ForkDeclined, WorkerForked, WorkerMessageDecoder

        answers: list[WorkerForked | ForkDeclined | None] = []
        while True:
            try:
                data = self.channel.recv(_RECEIVE_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return answers
            except ConnectionResetError:
                continue  # it left requests unread; said once, before the answers that it sent
            if not data:
                return [*answers, None]
            (answer,) = WorkerMessageDecoder().feed(data)
            assert isinstance(answer, (WorkerForked, ForkDeclined))
            answers.append(answer)


def program_of(worker_argv: Sequence[str]) -> Sequence[str]:
    """`PROGRAM …` of a worker's command, `python … -m jaxrun_runtime PROGRAM …`."""
    return worker_argv[worker_argv.index(RUNTIME) + 1 :]


def from_descriptor(text: str) -> ForkServer:
    """The one that is our child already, as `text` says: "DESCRIPTOR:PID"."""
    descriptor, _, pid = text.partition(":")
    os.set_inheritable(int(descriptor), False)
    return ForkServer(int(pid), socket.socket(fileno=int(descriptor)), given=True)


def start(python: Sequence[str], program: Sequence[str], environ: Mapping[str, str]) -> ForkServer:
    """Start it with the interpreter `python`, for workers that run `program`; if that is empty, ahead, to be set up.

    May raise OSError. It speaks on stderr only.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    os.set_inheritable(theirs.fileno(), True)
    null = os.open(os.devnull, os.O_RDWR)
    try:
        argv = (*python, "-m", f"{RUNTIME}.forkserver", str(theirs.fileno()), *program)
        pid = start_process(argv, environ, (null, null))
    except OSError:
        ours.close()
        raise
    finally:
        os.close(null)
        theirs.close()
    return ForkServer(pid, ours)


def start_process(argv: Sequence[str], environ: Mapping[str, str], streams: tuple[int, ...]) -> int:
    """Start `argv` in its own session, with `streams` as its first descriptors; returns its process id. OSError."""
    actions = [(os.POSIX_SPAWN_DUP2, source, target) for target, source in enumerate(streams)]
    return os.posix_spawn(argv[0], list(argv), environ, file_actions=actions, setsid=True)
