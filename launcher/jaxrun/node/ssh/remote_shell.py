"""What runs a line of a shell on another host: OpenSSH's client, or `qrsh -inherit` within a job of Grid Engine.

Both pass standard input on, and end with the exit status of the line.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from jaxrun.node.ssh.host_failures import HostFailure, qrsh_failed, ssh_failed

_SSH_FAILED = 255
_SHELL = "/bin/sh"


class RemoteShell(Struct, frozen=True, kw_only=True):
    """One of them.

    title:   what people call it
    argv:    its words, up to the name of the host
    trial:   what to type to try it
    here:    the host on which a line needs no other shell than sh; empty if there is none
    failure: why it could not begin, by the host, its exit status and what it has written; None if it did begin
    """

    title: str
    argv: tuple[str, ...]
    trial: str
    here: str = ""
    failure: Callable[[str, int, str], HostFailure | None]

    def command(self, host: str, line: str) -> tuple[str, ...]:
        """Return the command that runs a line on a host."""
        return (_SHELL, "-c", line) if host == self.here else (*self.argv, host, line)


def openssh(argv: tuple[str, ...]) -> RemoteShell:
    def failure(host: str, status: int, said: str) -> HostFailure | None:
        return ssh_failed(host, said) if status == _SSH_FAILED else None

    return RemoteShell(title="ssh", argv=argv, trial="ssh", failure=failure)


def qrsh(path: str, here: str) -> RemoteShell:
    """`here` is the host of the job's script: qrsh may refuse it, as a process of the job runs there already."""

    def failure(host: str, status: int, said: str) -> HostFailure | None:
        return qrsh_failed(said)

    return RemoteShell(title="qrsh", argv=(path, "-inherit"), trial="qrsh -inherit", here=here, failure=failure)
