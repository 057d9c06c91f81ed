"""What a rank of a gang does: takes functions from the parent, runs them, and sends back what they return or raise.

While its function runs, the rank may talk with the parent: `current().send(value)`, `current().receive()`.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

import jaxrun_runtime
from jaxrun.protocol import exceptions
from jaxrun.protocol.payload import GangMessage, GangMessageKind, GangMessageReader, GangMessageWriter, pack
from jaxrun_runtime import array_pickling, failure_report, notebook_cells
from jaxrun_runtime.lockstep import call_sites

_INTERRUPT_TIMEOUT_S = 2.0  # seconds for an interrupt to arrive that the parent says it has sent


class CallEnded(Exception):
    """The parent has ended the conversation, or is gone: nothing more comes."""


class ParentConnection:
    """This rank's side of the connection to the parent."""

    def __init__(self, connection: socket.socket) -> None:
        self.rank: int = jaxrun_runtime.rank
        self.size: int = jaxrun_runtime.size
        self.shares_memory = connection.family == socket.AF_UNIX
        self._inbox = GangMessageReader(connection)
        self._outbox = GangMessageWriter(connection)
        self._sending = threading.Lock()
        self._number = 0
        self._connection = connection
        self._running = False
        self._undisturbed = False
        self._interrupts = 0
        self._idle_interrupts = 0
        self._interrupted = False
        self._leave = False
        self._taken: GangMessage | None = None

    def send(self, value: Any) -> None:
        """Send the parent a value: anything that can be pickled, a Block too where memory is shared."""
        self._send(self._pack(GangMessageKind.VALUE, value))

    def receive(self) -> Any:
        """The next value that the parent sends in this conversation. Blocks; raises Over if none can come."""
        parcel = self._receive()
        if parcel.kind is GangMessageKind.VALUE and parcel.call == self._number:
            return parcel.load()
        self._leave = parcel.kind is GangMessageKind.SHUTDOWN
        raise CallEnded

    def serve(self) -> None:
        """Run what the parent sends until it says to leave, or is gone."""
        import jax

        devices = len(jax.local_devices())
        about = {"rank": self.rank, "size": self.size, "host": jaxrun_runtime.host, "pid": os.getpid()}
        more = {"local_rank": jaxrun_runtime.local_rank, "devices": devices, "platform": jax.default_backend()}
        # After jax, which may have handlers of its own; before the parent can think of interrupting.
        signal.signal(signal.SIGINT, self._on_interrupt)
        self._send(self._pack(GangMessageKind.READY, {**about, **more}))
        with contextlib.suppress(CallEnded):
            while not self._leave:
                self._handle(self._receive())

    def _handle(self, parcel: GangMessage) -> None:
        if parcel.kind is GangMessageKind.CALL:
            self._run(parcel)
        self._leave = self._leave or parcel.kind is GangMessageKind.SHUTDOWN

    # ---- one task

    def _run(self, task: GangMessage) -> None:
        self._number = task.call
        ordered = json.loads(task.note or b"{}")
        for name, source in ordered.get("cells", {}).items():
            notebook_cells.cache_source(source, name)
        # The modules beside the parent's script are beside no program of ours.
        sys.path[:0] = [entry for entry in ordered.get("path", ()) if entry not in sys.path]
        self._await_interrupts(ordered.get("interrupts", 0))
        try:
            with _PrintForwarding(self, wanted=ordered.get("print", False)):
                self._running = True
                try:
                    self._raise_early(ordered.get("interrupts", 0))
                    function, args, kwargs = task.load()
                    value = function(*args, **kwargs)
                finally:
                    self._running = False
            answer = self._answer(value)
        except BaseException as error:  # also a sys.exit: the rank is the gang's, not the function's
            answer = self._failure(error)
        with contextlib.suppress(CallEnded):
            self._send(answer)

    def _answer(self, value: Any) -> GangMessage:
        try:
            return self._pack(GangMessageKind.RESULT, value)
        except Exception as error:
            error.add_note("this is about what the function has returned, on its way to the parent")
            raise

    def _failure(self, error: BaseException) -> GangMessage:
        if isinstance(error, KeyboardInterrupt):
            call_sites.trim_to_user_frames(error)
        said = failure_report.describe_failure(error, self.rank, "program")
        words = {name: getattr(said, name) for name in ("error", "message", "traceback", "notes", "status", "time")}
        home, exception = type(error).__module__, exceptions.pickle_exception(error)
        return self._pack(GangMessageKind.EXCEPTION, {**words, "home": home, "exception": exception})

    def _await_interrupts(self, count: int) -> None:
        """An interrupt that was meant for an earlier function may still be on its way, and must not hit this one."""
        deadline = time.monotonic() + _INTERRUPT_TIMEOUT_S
        while self._interrupts < count and time.monotonic() < deadline:
            time.sleep(0.001)

    def _raise_early(self, count: int) -> None:
        """One that is meant for this function may have been faster than it."""
        early = min(self._interrupts - count, self._idle_interrupts)
        self._idle_interrupts = 0
        if early > 0:
            self._raise_interrupt()
        self._interrupts = count

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        self._interrupts += 1
        self._idle_interrupts += not self._running
        self._interrupted = self._running
        if self._running and not self._undisturbed:
            self._raise_interrupt()

    def _raise_interrupt(self) -> None:
        self._interrupted = False
        raise KeyboardInterrupt

    @contextlib.contextmanager
    def _between_bytes(self) -> Iterator[None]:
        """An interrupt waits until it is over: what was sent or taken must not be forgotten."""
        if self._undisturbed or threading.current_thread() is not threading.main_thread():
            yield
            return
        self._undisturbed = True
        try:
            yield
        finally:
            self._undisturbed = False
            if self._interrupted:
                self._raise_interrupt()

    # ---- parcels

    def send_printed(self, kind: GangMessageKind, text: str) -> None:
        """What the function has printed."""
        self._send(GangMessage(kind, self._number, text.encode("utf-8", "backslashreplace")))

    def _pack(self, kind: GangMessageKind, value: Any) -> GangMessage:
        note = (
            json.dumps(_call_counts()).encode() if kind in (GangMessageKind.RESULT, GangMessageKind.EXCEPTION) else b""
        )
        return pack(kind, self._number, value, share=self.shares_memory, note=note, reduce=array_pickling.reduce_array)

    def _send(self, parcel: GangMessage) -> None:
        with self._between_bytes(), self._sending:
            try:
                self._outbox.add(parcel)
                self._outbox.flush()
            except OSError as error:
                self._leave = True
                raise CallEnded from error

    def _receive(self) -> GangMessage:
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        if self._taken is None:
            poll.poll()
        with self._between_bytes():
            try:
                self._taken = self._taken or self._inbox.receive()
            except (EOFError, OSError) as error:
                self._leave = True
                raise CallEnded from error
        parcel, self._taken = self._taken, None  # an interrupt before this leaves it for the next time
        return parcel


class _PrintForwarding:
    """While it lasts, what Python code prints goes to the parent, too, if that is `wanted`."""

    def __init__(self, conversation: ParentConnection, *, wanted: bool) -> None:
        self._conversation = conversation
        self._wanted = wanted

    def __enter__(self) -> None:
        self._before = sys.stdout, sys.stderr
        if self._wanted:
            sys.stdout = _Tee(sys.stdout, self._conversation, GangMessageKind.STDOUT)
            sys.stderr = _Tee(sys.stderr, self._conversation, GangMessageKind.STDERR)

    def __exit__(self, *about: object) -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        sys.stdout, sys.stderr = self._before


class _Tee(io.TextIOBase):
    """A text stream that also goes to the parent, line by line."""

    def __init__(self, stream: Any, conversation: ParentConnection, kind: GangMessageKind) -> None:
        self._stream = stream
        self._conversation = conversation
        self._kind = kind
        self._line = ""
        self._owner = os.getpid()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return str(self._stream.encoding)

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return False

    def fileno(self) -> int:
        return int(self._stream.fileno())

    def write(self, text: str) -> int:
        self._stream.write(text)
        self._line += text
        if "\n" in text or "\r" in text:
            self._forward()
        return len(text)

    def flush(self) -> None:
        self._stream.flush()
        if self._line:
            self._forward()

    def _forward(self) -> None:
        text, self._line = self._line, ""
        if os.getpid() == self._owner:  # a process that the function has forked speaks for itself
            with contextlib.suppress(CallEnded):
                self._conversation.send_printed(self._kind, text)


def _call_counts() -> dict[str, int]:
    """The cross-process calls that this rank has made so far, by group; empty where they are not recorded."""
    lockstep = sys.modules.get(f"{__package__}.lockstep.call_recorder")
    return lockstep.call_counts() if lockstep is not None else {}


_current: ParentConnection | None = None


def current_call() -> ParentConnection:
    """This rank's conversation with the parent. RuntimeError in a process that is no rank of a gang."""
    if _current is None:
        raise RuntimeError("there is no conversation: this function is not being run by a gang")
    return _current


def serve(connection: socket.socket) -> None:
    """Be a rank of the gang whose parent is at the other end of `connection`, until that says to leave."""
    global _current
    _current = ParentConnection(connection)
    _current.serve()
