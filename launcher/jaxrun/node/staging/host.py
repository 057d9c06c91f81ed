"""An agent's part in --stage: gives other hosts what this one has, and takes what it lacks, beside its other work."""

from __future__ import annotations

import socket
import threading
from contextlib import closing

from jaxrun.errors import UnavailableError
from jaxrun.node.agent.host_probe import PeerServer
from jaxrun.node.staging.copies import Copies, Copy
from jaxrun.node.staging.transfer import Supply, Taker
from jaxrun.protocol.auth import peer_token
from jaxrun.protocol.stage_messages import CopyStaged, Stage, StagedCopied


class HostStaging:
    """Serves from `start` until it is closed; `held` are the copies in use, by name, which stay so."""

    def __init__(self, stage: Stage, number: int, token: str, ip: str, held: dict[str, Copy]) -> None:
        """`number` and `token` are the agent's; `ip` is where others reach it, empty where none need.

        Raises UnavailableError if this host has no port left.
        """
        self._stage, self._number, self._token, self._held = stage, number, peer_token(token), held
        self._supply = Supply()
        self._taker = Taker(self._supply, number, self._token)
        self._server = PeerServer(self._token, self._supply.serve, ip) if ip else None
        self._ended, self._end = socket.socketpair()
        self._thread: threading.Thread | None = None
        self._error = ""

    @property
    def port(self) -> int:
        """Where it gives others what it has; 0 for nowhere."""
        return self._server.port if self._server is not None else 0

    def fileno(self) -> int:
        """A descriptor that is readable once `result` is there."""
        return self._ended.fileno()

    def start(self, order: CopyStaged) -> None:
        """Begin to give, and to take, in threads."""
        if self._server is not None:
            self._server.start(0)
        self._thread = threading.Thread(target=self._take_all, args=(order,), name="jaxrun-stage", daemon=True)
        self._thread.start()

    def result(self) -> StagedCopied:
        """How it ended."""
        self._ended.recv(1)
        return StagedCopied(self._number, self._taker.received, self._error)

    def close(self) -> None:
        """End all threads: a process with threads must not fork."""
        self._taker.stop()
        if self._thread is not None:
            self._thread.join()
        if self._server is not None:
            self._server.close()
        self._supply.close()
        self._ended.close()
        self._end.close()

    def _take_all(self, order: CopyStaged) -> None:
        try:
            with closing(Copies(self._stage.base)) as copies:
                for content in self._stage.contents:
                    self._held[content.name] = self._taker.take(copies, content, order.givers)
        except (OSError, UnavailableError) as error:
            self._error = describe(error)
        self._end.send(b".")


def describe(error: OSError | UnavailableError) -> str:
    """What has happened, and to which file."""
    if isinstance(error, OSError):
        return f"{error.strerror}{f' ({error.filename})' if error.filename else ''}"
    return str(error)


def find_copies(stage: Stage, held: dict[str, Copy]) -> dict[str, str]:
    """Where this host's copies are, by source, all of them in use from now on. Raises OSError if one is not there."""
    staged: dict[str, str] = {}
    with closing(Copies(stage.base)) as copies:
        for content in stage.contents:
            copy = held.get(content.name) or copies.find(content.name, check=False)  # its lead has
            if copy is None:
                raise FileNotFoundError(f"the copy of {content.sources[0]} is not in {copies.path}; is TMPDIR alike?")
            held[content.name] = copy
            staged |= dict.fromkeys(content.sources, copy.path)
    return staged
