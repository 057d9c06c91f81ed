"""One process of OpenSSH's client, with a pipe to each of its standard streams."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Sequence

from jaxrun.node.channel.send_buffer import SendBuffer

_READ_BYTES = 65536


class SshSession:
    """A running ssh. Input waits here until ssh takes it.

    stdin, stdout, stderr:  this process's ends of the pipes; stdin is -1 once it is closed
    """

    def __init__(self, argv: Sequence[str]) -> None:
        """Raises OSError if ssh cannot be started."""
        child_in, self.stdin = os.pipe()
        self.stdout, child_out = os.pipe()
        self.stderr, child_err = os.pipe()
        ends = (child_in, child_out, child_err)
        try:
            actions = [(os.POSIX_SPAWN_DUP2, end, number) for number, end in enumerate(ends)]
            self.pid = os.posix_spawn(argv[0], list(argv), os.environ, file_actions=actions)
        finally:
            for end in ends:
                os.close(end)
        for end in (self.stdin, self.stdout, self.stderr):
            os.set_blocking(end, False)
        self._open = {self.stdout, self.stderr}
        self._unsent = SendBuffer(lambda data: os.write(self.stdin, data))
        self._ends = False  # no more input comes

    @property
    def takes_input(self) -> bool:
        return self.stdin >= 0 and not self._ends

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def send(self, data: bytes) -> None:
        """Add to the input."""
        if self.takes_input:
            self._unsent.add(data)
            self.flush()

    def end_input(self) -> None:
        """Close the input once all of it was taken."""
        self._ends = True
        self.close_input_if_done()

    def flush(self) -> bool:
        """Pass on what ssh takes now; returns whether some is left."""
        try:
            return not self._unsent.flush()
        except OSError:  # ssh has ended
            self._give_up_input()
        return False

    def _give_up_input(self) -> None:
        self._unsent.clear()
        self._ends = True

    def close_input_if_done(self) -> None:
        if self._ends and not self._unsent and self.stdin >= 0:
            os.close(self.stdin)
            self.stdin = -1

    def read(self, descriptor: int) -> bytes | None:
        """Read an output; empty at its end, None if there is nothing now."""
        with contextlib.suppress(BlockingIOError):
            return os.read(descriptor, _READ_BYTES)
        return None

    def close(self, descriptor: int) -> bool:
        """Close an output that has ended; returns whether both have."""
        os.close(descriptor)
        self._open.discard(descriptor)
        return not self._open

    def wait(self) -> int:
        """Wait for the end of ssh; returns its exit status as a shell has it."""
        self._give_up_input()
        status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return status if status >= 0 else 128 - status

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)
