"""One worker as its agent sees it: its process, channel, pipes, file of stacks, and flight recorder."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import time

from msgspec import Struct, field
from msgspec.structs import replace

from jaxrun.analysis.lockstep.reader import FlightReader
from jaxrun.errors import EXIT_SIGNAL_BASE
from jaxrun.files import procfs
from jaxrun.lazy_pattern import lazy_pattern
from jaxrun.node.agent.process_memory import ProcessMemory
from jaxrun.node.agent.process_tree import kill_group
from jaxrun.node.agent.spawn import WorkerPipes
from jaxrun.protocol.codec import MessageDecoder, encode, message_types
from jaxrun.protocol.flight import Flight
from jaxrun.protocol.query_messages import ProcessState
from jaxrun.protocol.worker_messages import AgentToWorker, Failed, Hello, WorkerToAgent
from jaxrun.spec.job.fault_spec import KILL

_RECEIVE_BYTES = 65536
_MAX_STACKS_BYTES = 2**20
_CREDENTIALS = struct.Struct("3i")  # process, user and group, as the kernel writes them
_AT_WORK = lazy_pattern(r"futex|nanosleep")  # kernel functions in which a thread waits for no input
_DEAF_STATES = frozenset(map(str, ProcessState))


class WorkerProcess(Struct):
    """A worker, from the request to start it on; `pid` is 0 until it is known, `status` None until it was reaped.

    wrapper:  the command of --wrap, the child of the agent, which may become the rank (exec) or start it; 0 without
              one. `pid` is that of the rank, as this host counts, from its first message on, and the wrapper's before
    """

    rank: int
    pipes: WorkerPipes
    pid: int = 0
    status: int | None = None
    wrapper: int = 0
    killed: bool = False  # by its agent
    _decoder: MessageDecoder[WorkerToAgent] = field(
        default_factory=lambda: MessageDecoder(message_types(WorkerToAgent))
    )
    _stacks_read: int = 0
    _has_failed: bool = False
    _flight: FlightReader | None = None
    _last_progress: object = None
    _memory: ProcessMemory = field(default_factory=ProcessMemory)

    @property
    def flight(self) -> FlightReader:
        if self._flight is None:
            self._flight = FlightReader(self.pipes.flight)
        return self._flight

    @property
    def live(self) -> bool:
        return self.pid != 0 and self.status is None

    @property
    def child(self) -> int:
        return self.wrapper or self.pid

    def send(self, message: AgentToWorker) -> None:
        """Send the message; to a worker that has gone nothing is sent, its exit is noticed elsewhere."""
        with contextlib.suppress(OSError):
            self.pipes.channel.sendall(encode(message))

    def receive(self) -> list[WorkerToAgent] | None:
        """Return what has arrived; None once the worker has closed its end. ProtocolError for what is no message."""
        messages: list[WorkerToAgent] = []
        while True:
            try:
                data = self._read_channel()
            except BlockingIOError:
                return messages
            except OSError:
                return messages or None
            if not data:
                return messages or None
            messages += map(self._complete, self._decoder.feed(data))

    def _read_channel(self) -> bytes:
        """Receive, and learn from the kernel which process has sent it, as a rank inside a wrapper is another one."""
        if not self.wrapper:
            return self.pipes.channel.recv(_RECEIVE_BYTES)
        data, ancillary, *_ = self.pipes.channel.recvmsg(_RECEIVE_BYTES, socket.CMSG_SPACE(_CREDENTIALS.size))
        for _, kind, content in ancillary:
            if kind == socket.SCM_CREDENTIALS and data:
                self.pid = _CREDENTIALS.unpack(content)[0]
        return data

    def _complete(self, message: WorkerToAgent) -> WorkerToAgent:
        """Fill in the process id: a rank in a process namespace of its own does not know its number here."""
        self._has_failed |= isinstance(message, Failed)
        return replace(message, pid=self.pid) if isinstance(message, Hello) and self.wrapper else message

    def set_status_of_rank(self) -> int:
        """Turn the status of a wrapper into the rank's: if a signal has killed the rank, it is 128 and the number."""
        assert self.status is not None
        signum = self.status - EXIT_SIGNAL_BASE
        if self.wrapper and not self._has_failed and signum in signal.valid_signals():
            self.status = -signum
        return self.status

    def signal(self, signum: int) -> None:
        """Send a signal to the worker; SIGKILL also to its session's group except for resource trackers."""
        if not self.live:
            return
        if signum == signal.SIGKILL:
            self.killed = True
            for group in {self.child, self.pid} if self._is_running else {self.child}:
                kill_group(group)
            return
        if self._is_running:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, signum)

    @property
    def _is_running(self) -> bool:
        """Whether the number of the rank's process is its own: inside a wrapper it may be free since its end."""
        return self.pid == self.child or self.pid in procfs.descendants(self.child)

    def inject_fault(self, kind: str) -> str:
        """Inject a fault (job/fault_spec.py), as if it came from outside; returns why that was not possible."""
        if not self.live or not self._is_running:
            return "it has no process"
        self.killed |= kind == KILL
        with contextlib.suppress(ProcessLookupError):  # its exit is noticed elsewhere
            os.kill(self.pid, signal.SIGKILL if kind == KILL else signal.SIGSTOP)
        return ""

    def read_new_stacks(self) -> str:
        size = os.fstat(self.pipes.stacks).st_size
        data = os.pread(self.pipes.stacks, max(0, size - self._stacks_read), self._stacks_read)
        self._stacks_read += len(data)
        if size > _MAX_STACKS_BYTES:  # both processes share the file offset, so the next dump starts anew
            os.ftruncate(self.pipes.stacks, 0)
            self._stacks_read = os.lseek(self.pipes.stacks, 0, os.SEEK_SET)
        return data.decode(errors="replace")

    def read_new_flight(self) -> Flight | None:
        """Return what the flight recorder holds; None if nothing has changed since the last call."""
        progress = self.flight.progress_counters()
        if progress == self._last_progress:
            return None
        self._last_progress = progress
        return self.flight.brief()

    def cpu_seconds(self) -> float:
        """User and system time so far of the process and all that it has started; 0.0 when it has gone."""
        return procfs.cpu_seconds(self.pid)

    def core_wait_seconds(self) -> float:
        """Return how long its threads, all together, have waited for a core; 0.0 if the kernel does not say."""
        scheduled = procfs.scheduled_seconds(self.pid)
        return scheduled[1] if scheduled is not None else 0.0

    def memory_bytes(self) -> int:
        """Return the bytes of the process, with what it shares divided among those that share it; 0 once it is gone."""
        return self._memory.read(self.pid, time.monotonic())

    def file_bytes(self) -> int:
        """Return the bytes that the process has read and written so far, from and to files and pipes; 0 if unknown."""
        return procfs.file_bytes(self.pid)

    def kernel_wait(self) -> str:
        """The kernel's name for what the main thread sleeps in, or, in words, that it is stopped or about to end.

        Empty where the thread runs, or the kernel does not say.
        """
        words = procfs.stat_words(self.pid)
        state = words[procfs.STATE].decode() if words else ""
        return state if state in _DEAF_STATES else procfs.read_of(self.pid, "wchan").decode()

    @property
    def is_at_work(self) -> bool:
        """Whether the main thread runs, or sleeps or waits for another thread: it certainly reads no input."""
        words = procfs.stat_words(self.pid)
        runs = bool(words) and words[procfs.STATE] == b"R"
        return runs or _AT_WORK.search(self.kernel_wait()) is not None

    @property
    def stopped(self) -> bool:
        return self.kernel_wait() == ProcessState.STOPPED
