"""One job of ours, seen from outside: what its launcher says, when it ends, its verdict, and orders to it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrun.forkserver.launcher_pool import LauncherPool
from jaxrun.rundir.rundir import VERDICT_FILE
from jaxrun.verdict.verdict import Verdict, from_json

_PIECE = 65536
_KEPT = 100_000  # characters of its words
_OF_A_RANK = "["  # how a line begins that a rank has written


class LauncherProcess:
    """Started by a `pool`; `output_fd` and `pidfd` are descriptors to wait for."""

    def __init__(self, pool: LauncherPool, words: Sequence[str], environ: Mapping[str, str], run_dir: Path) -> None:
        self.run_dir = run_dir
        self.output_fd, theirs = os.pipe()
        os.set_blocking(self.output_fd, False)
        self._control, control = socket.socketpair()
        try:
            started = pool.start(words, environ, theirs, control.fileno())
        except BaseException:
            os.close(self.output_fd)
            self._control.close()
            raise
        finally:
            os.close(theirs)
            control.close()
        self.pid, self.pidfd = started.pid, started.pidfd
        self._said = ""
        self._over = False

    @property
    def has_ended(self) -> bool:
        """Whether it has ended."""
        return self._over or self.wait(0)

    def wait(self, timeout: float) -> bool:
        """Wait for its end; whether it has come."""
        if not self._over:
            # Not select.select, which cannot take descriptors from 1024.
            poll = select.poll()
            poll.register(self.pidfd, select.POLLIN)
            self._over = bool(poll.poll(max(0.0, timeout) * 1000))
        return self._over

    def read_output(self) -> str:
        """What it has said itself since the last time: whole lines, without those of its ranks."""
        data = b""
        with contextlib.suppress(BlockingIOError):
            while piece := os.read(self.output_fd, _PIECE):
                data += piece
        text = "".join(
            line for line in data.decode(errors="replace").splitlines(keepends=True) if not line.startswith(_OF_A_RANK)
        )
        self._said = (self._said + text)[-_KEPT:]
        return text

    @property
    def all_output(self) -> str:
        """All that it has said so far."""
        self.read_output()
        return self._said.strip()

    def send_command(self, **order: Any) -> None:
        """Tell it something on its control line; one that has ended is told nothing."""
        with contextlib.suppress(OSError):
            self._control.sendall(json.dumps(order).encode() + b"\n")

    def wait_for_verdict(self, patience: float) -> Verdict | None:
        """How its job ended; None if it does not say so within `patience` seconds."""
        deadline = time.monotonic() + patience
        while True:
            ended = self.wait(min(0.02, max(0.0, deadline - time.monotonic())))
            with contextlib.suppress(OSError, ValueError):
                return from_json((self.run_dir / VERDICT_FILE).read_text())
            if ended or time.monotonic() >= deadline:
                return None

    def stop(self, patience: float = 3.0) -> None:
        """Stop the job, and wait until nothing of it is left. May be called again."""
        if self.output_fd < 0:
            return
        self.send_command(end=True)
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_WR)
        if not self.wait(patience):
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)  # its guard ends the rest
            self.wait(patience)
        self.close()

    def close(self) -> None:
        """Let go of it."""
        if self.output_fd < 0:
            return
        self.read_output()
        os.close(self.output_fd)
        os.close(self.pidfd)
        self._control.close()
        self.output_fd = -1
        self._over = True
