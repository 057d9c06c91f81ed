"""ssh without sshd: reads ssh's command line, and runs the command as sshd would.

As with ssh, nothing of the caller's environment or directory goes along, and the words of the command are joined by
spaces for the shell of the other side. There it has a session of its own: signals to the client do not reach it, and of
a client that is killed it sees that its streams are closed. Both links must be up at the start; unlike with ssh, one
that is cut later does not end the command.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from state import USAGE, Refusal

# ssh's options that are followed by a value; all others stand alone.
_WITH_VALUE = frozenset("bcDEeFIiJLlmOoPpQRSWw")
SSH_FAILED = 255
CONNECT_TIMEOUT = 5.0


@dataclass(frozen=True)
class Remote:
    """What to run where; without words, a login shell."""

    host: str
    words: tuple[str, ...]

    @property
    def command(self) -> list[str]:
        return ["/bin/sh", "-c", " ".join(self.words)] if self.words else ["/bin/sh", "-l"]


def parse(arguments: Sequence[str]) -> Remote:
    """ssh's arguments: options, [user@]host, more options, the command."""
    host, rest = "", list(arguments)
    while rest:
        if rest[0] == "--":
            rest.pop(0)
            if host:
                break
        elif rest[0].startswith("-") and len(rest[0]) > 1:
            _drop_option(rest)
            continue
        elif host:
            break
        if rest:
            host = rest.pop(0).rpartition("@")[2]
    if not host:
        raise Refusal("ssh: no host was given; usage: scripts/testbed ssh HOST COMMAND...", USAGE)
    return Remote(host, tuple(rest))


def reach(address: str) -> None:
    """OSError if this host's network does not lead to the address. That nobody listens there is an answer too."""
    with contextlib.suppress(ConnectionRefusedError):
        socket.create_connection((address, 22), timeout=CONNECT_TIMEOUT).close()


def run(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the command, and copy its streams until it has closed them; its exit status, 255 if a signal killed it."""
    ways = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command = subprocess.Popen(argv, env=environ, start_new_session=True, bufsize=0, **ways)  # type: ignore[call-overload]
    to, out, err = command.stdin, command.stdout, command.stderr
    copies = {0: (to.fileno(), to), out.fileno(): (1, out), err.fileno(): (2, err)}
    poll = select.poll()
    for source in copies:
        poll.register(source, select.POLLIN)
    while copies.keys() - {0}:
        for source, _ in poll.poll():
            target, pipe = copies[source]
            if not _copy(source, target):
                poll.unregister(source)
                pipe.close()
                del copies[source]
    status = command.wait()
    return int(status) if status >= 0 else SSH_FAILED


def _copy(source: int, target: int) -> bool:
    """Copy what is there; False if there will be no more, or nobody takes it."""
    try:
        data = os.read(source, 65536)
        left = memoryview(data)
        while left:
            left = left[os.write(target, left) :]
    except OSError:
        return False
    return bool(data)


def _drop_option(rest: list[str]) -> None:
    letters = rest.pop(0)[1:]
    for position, letter in enumerate(letters):
        if letter in _WITH_VALUE:
            if position == len(letters) - 1 and rest:
                rest.pop(0)
            return
