"""A `python -m jaxrun` that works for this process: its output, its end, and the signals that it gets.

An inherited socket connects the two. The launcher says on it where the job's run directory is, why there is no job, or
what the verdict is. When this process ends, however it does, the socket closes and the launcher ends the job.
"""

from __future__ import annotations

import atexit
import codecs
import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType

from jaxrun.job_client.running_job import RunningJob
from jaxrun.protocol.job_messages import EndOrder
from jaxrun.protocol.names import CONTROL_FD, GANG_ADDRESS, GANG_TOKEN

_READ_BYTES = 2**16
_END_TIMEOUT_S = 5.0  # for a job to end after it was told to
_LAST_FRAMES_S = 1.0  # for the frames of a launcher that has ended
_FORWARDED = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,
}
_running: weakref.WeakSet[Launcher] = weakref.WeakSet()

Show = Callable[[str], object]


class Launcher:
    """A running launcher. `link` is the connection to its job; `process_fd` becomes readable when the launcher ends."""

    def __init__(self, words: Sequence[str], show: Sequence[Show], *, own_session: bool) -> None:
        """Start `jaxrun WORDS`.

        show:         gets the text of stdout and of stderr, or, if it is one function, of both; empty: the launcher
                      prints where this process does
        own_session:  no terminal sends it signals
        """
        ours, theirs = socket.socketpair()
        environ = {name: value for name, value in os.environ.items() if name not in (GANG_ADDRESS, GANG_TOKEN)}
        out = subprocess.PIPE if show else None
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "jaxrun", *words],
                    stdin=None if any(word.startswith("--stdin=") for word in words) else subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT if len(show) == 1 else out,
                    env={**environ, CONTROL_FD: str(theirs.fileno())},
                    pass_fds=[theirs.fileno()],
                    start_new_session=own_session,
                )
            except BaseException:
                ours.close()
                raise
        self.link = RunningJob(Path(), ours, self._process.pid)
        self.process_fd = os.pidfd_open(self._process.pid)
        streams = filter(None, (self._process.stdout, self._process.stderr))
        self._texts = {stream.fileno(): _Text(stream.fileno(), to) for stream, to in zip(streams, show, strict=False)}
        _running.add(self)

    def wait(self) -> int:
        """Show the output until the launcher has ended; returns its exit status as a shell shows it."""
        poll = select.poll()
        for descriptor in (self.process_fd, self.link.fileno(), *self._texts):
            poll.register(descriptor, select.POLLIN)
        has_ended = False
        while not has_ended:
            for descriptor, _ in poll.poll():
                if descriptor == self.process_fd:
                    has_ended = True
                elif descriptor == self.link.fileno():
                    if not self.link.is_running:
                        poll.unregister(descriptor)
                elif not self._texts[descriptor].read():
                    poll.unregister(descriptor)
        self._read_rest()
        status = self._process.wait()
        return 128 - status if status < 0 else status

    def _read_rest(self) -> None:
        """Read what the launcher has written last; a process that it has left behind is not waited for."""
        self.link.wait_until_over(_LAST_FRAMES_S)
        for descriptor, text in self._texts.items():
            os.set_blocking(descriptor, False)
            with contextlib.suppress(BlockingIOError):
                while text.read():
                    pass
            text.end()

    def send_signal(self, signum: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.process_fd, signum)

    def end(self) -> None:
        """End the job, if it still runs, and wait for its launcher."""
        self.link.send(EndOrder())
        self.link.shut_down()
        try:
            self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()  # its guard ends the rest
            self._process.wait()

    def close(self) -> None:
        """End the job, if it still runs, and close all descriptors."""
        self.end()
        self.link.close()
        for stream in filter(None, (self._process.stdout, self._process.stderr)):
            stream.close()
        os.close(self.process_fd)
        _running.discard(self)

    def leave(self) -> None:
        """In a fork of the launcher's parent: let the job end when the parent does, although this process goes on."""
        self.link.close()


class _Text:
    """Decodes what comes through a pipe, and shows it."""

    def __init__(self, descriptor: int, show: Show) -> None:
        self._descriptor = descriptor
        self._show = show
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def read(self) -> bool:
        """Read once; returns False at the end of the pipe. Raises BlockingIOError."""
        data = os.read(self._descriptor, _READ_BYTES)
        if text := self._decoder.decode(data):
            self._show(text)
        return bool(data)

    def end(self) -> None:
        if text := self._decoder.decode(b"", final=True):
            self._show(text)


class LineSplitter:
    """Calls a function with each whole line, without its end; `flush` passes on a last line without one."""

    def __init__(self, on_line: Show) -> None:
        self._on_line = on_line
        self._partial = ""

    def __call__(self, text: str) -> None:
        *lines, self._partial = (self._partial + text).split("\n")
        for line in lines:
            self._on_line(line.removesuffix("\r"))

    def flush(self) -> None:
        if self._partial:
            self._on_line(self._partial)
        self._partial = ""


@contextlib.contextmanager
def forwarded_signals(forward: Callable[[int], None]) -> Iterator[list[int]]:
    """Forward SIGINT, SIGTERM and SIGHUP instead of handling them; yields the list of those that have come.

    Nothing is changed in a thread, which has no signal handlers, and for a signal that has a handler already.
    """
    received: list[int] = []

    def handle(signum: int, frame: FrameType | None) -> None:
        received.append(signum)
        forward(signum)

    before = {}
    if threading.current_thread() is threading.main_thread():
        for signum, default in _FORWARDED.items():
            if signal.getsignal(signum) == default:
                before[signum] = signal.signal(signum, handle)
    try:
        yield received
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def can_forward_interrupts() -> bool:
    """Whether forwarded_signals would forward Ctrl-C."""
    is_main = threading.current_thread() is threading.main_thread()
    return is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def _end_all() -> None:
    """At the end of this process, end the jobs of its daemon threads, which may still read."""
    for launcher in tuple(_running):
        launcher.end()


def _leave_all() -> None:
    for launcher in tuple(_running):
        launcher.leave()


atexit.register(_end_all)
os.register_at_fork(after_in_child=_leave_all)
