"""Runs the functions that the caller of a gang sends to this rank, and sends back their results or exceptions.

While a function runs, it may exchange values with the caller: `current_call().send(value)`,
`current_call().receive()`.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import sys
import threading
import time
from types import FrameType
from typing import Any

import jaxrun_runtime
from jaxrun.errors import ProtocolError, add_note
from jaxrun.protocol.blocking_connection import BlockingConnection
from jaxrun.protocol.gang_messages import GangMessage, GangMessageKind, pack
from jaxrun.protocol.message_tags import ConnectionTags
from jaxrun.protocol.payload import OwnedDescriptor, Payload, pickle_exception
from jaxrun_runtime import failure_report
from jaxrun_runtime.gang import notebook_cells
from jaxrun_runtime.gang.printing import PrintForwarding
from jaxrun_runtime.interrupts import Interrupts
from jaxrun_runtime.lockstep import call_sites

INTERRUPT_TIMEOUT_S = 2.0  # wait for an interrupt that the caller has sent


class CallEnded(Exception):
    """Raised when the caller has ended the call or is gone, so that no more values come."""


class CallerConnection:
    """This rank's connection to the Python process that calls the gang."""

    def __init__(self, connection: socket.socket, tags: ConnectionTags | None) -> None:
        self.rank: int = jaxrun_runtime.rank
        self.size: int = jaxrun_runtime.size
        self._shares_memory = connection.family == socket.AF_UNIX
        self._connection = BlockingConnection(connection, tags, "the caller")
        self._send_lock = threading.Lock()
        self._interrupts = CallInterrupts()
        self._call_number = 0
        self._shut_down = False
        self._received: GangMessage | None = None  # a message whose `_receive` was interrupted before it returned

    # ---- used by the function that the gang runs

    def send(self, value: Any, file: OwnedDescriptor | None = None) -> None:
        """Send the caller a value that can be pickled. `file`: see payload.dump."""
        self._send(self._pack(GangMessageKind.VALUE, value, file))

    def receive(self) -> Any:
        """Wait for the next value that the caller sends in this call. Raises CallEnded if none can come."""
        message = self._receive()
        if message.kind is GangMessageKind.VALUE and message.call == self._call_number:
            return message.load()
        self._shut_down = message.kind is GangMessageKind.SHUTDOWN
        raise CallEnded("the caller has ended this call, and will send no more values")

    # ---- calls

    def serve(self) -> None:
        """Run calls until the caller shuts the gang down or is gone."""
        import jax

        about = {
            "rank": self.rank,
            "size": self.size,
            "host": jaxrun_runtime.host,
            "pid": os.getpid(),
            "local_rank": jaxrun_runtime.local_rank,
            "devices": len(jax.local_devices()),
            "platform": jax.default_backend(),
        }
        self._interrupts.install()  # after jax, which may install handlers, and before the caller can interrupt
        self._send(self._pack(GangMessageKind.READY, about))
        with contextlib.suppress(CallEnded):
            while not self._shut_down:
                self._handle(self._receive())  # no variable keeps the message, or the memory of its arrays

    def _handle(self, message: GangMessage) -> None:
        if message.kind is GangMessageKind.CALL:
            self._run(message)
        elif message.kind is GangMessageKind.SHUTDOWN:
            self._shut_down = True

    def _run(self, task: GangMessage) -> None:
        self._call_number = task.call
        note = json.loads(task.note or b"{}")
        interrupts_before = note.get("interrupts", 0)
        for name, source in note.get("cells", {}).items():
            notebook_cells.cache_source(source, name)
        # Functions must find the modules beside the caller's script.
        sys.path[:0] = [entry for entry in note.get("path", ()) if entry not in sys.path]
        self._interrupts.wait_for(interrupts_before)
        value, error = self._call_function(task, interrupts_before)
        with contextlib.suppress(CallEnded):
            self._send(GangMessage(GangMessageKind.ENDED, task.call))
            self._send(self._pack_result(value) if error is None else self._pack_exception(error))

    def _call_function(self, task: GangMessage, interrupts_before: int) -> tuple[Any, BaseException | None]:
        """Return the function's result, or the exception that it raises, even a sys.exit: it must not end the rank."""
        try:
            with PrintForwarding(self._send_printed):
                self._interrupts.active = True
                try:
                    self._interrupts.raise_early(interrupts_before)
                    function, args, kwargs = task.load()
                    return function(*args, **kwargs), None
                finally:
                    self._interrupts.active = False
        except BaseException as error:
            return None, error

    def _pack_result(self, value: Any) -> GangMessage:
        try:
            return self._pack(GangMessageKind.RESULT, value)
        except BaseException as error:
            add_note(error, "while pickling the function's return value to send it to the caller")
            return self._pack_exception(error)

    def _pack_exception(self, error: BaseException) -> GangMessage:
        """Describe and pickle the exception, even if methods of its class raise exceptions, such as sys.exit."""
        try:
            content = self._describe_exception(error)
        except BaseException as secondary:
            text = f"the function raised a {type(error).__name__}, whose own methods raise"
            content = self._describe_exception(RuntimeError(f"{text}: {type(secondary).__name__}"))
        return self._pack(GangMessageKind.EXCEPTION, content)

    def _describe_exception(self, error: BaseException) -> dict[str, Any]:
        if isinstance(error, KeyboardInterrupt):
            call_sites.trim_internal_frames(error)
        report = failure_report.describe_failure(error, self.rank)
        content = {name: getattr(report, name) for name in ("error", "message", "traceback", "notes", "status", "time")}
        return {**content, "home": str(type(error).__module__), "exception": pickle_exception(error)}

    # ---- messages

    def _send_printed(self, kind: GangMessageKind, text: str) -> None:
        with contextlib.suppress(CallEnded):
            self._send(GangMessage(kind, self._call_number, Payload(text.encode("utf-8", "backslashreplace"))))

    def _pack(self, kind: GangMessageKind, value: Any, file: OwnedDescriptor | None = None) -> GangMessage:
        ends_call = kind in (GangMessageKind.RESULT, GangMessageKind.EXCEPTION)
        note = json.dumps(_call_counts()).encode() if ends_call else b""
        share = self._shares_memory
        return pack(kind, self._call_number, value, share=share, note=note, reduce=reduce_array, file=file)

    def _send(self, message: GangMessage) -> None:
        with self._interrupts.deferred(), self._send_lock:
            try:
                self._connection.send(message)
            except ConnectionError as error:
                self._shut_down = True
                raise CallEnded from error

    def _receive(self) -> GangMessage:
        poll = select.poll()
        poll.register(self._connection.socket, select.POLLIN)
        if self._received is None:
            poll.poll()
        with self._interrupts.deferred():
            try:
                self._received = self._received or self._connection.receive()
            except (ConnectionError, ProtocolError) as error:
                self._shut_down = True
                raise CallEnded from error
        message, self._received = self._received, None  # after an interrupt here, the next `_receive` returns it
        return message


class CallInterrupts(Interrupts):
    """Raises interrupts as KeyboardInterrupt in the running function only, while `active`.

    The launcher sends an interrupt as SIGINT. It may arrive before or after the function for which it is meant. So each
    call says how many interrupts the caller has sent before.
    """

    def __init__(self) -> None:
        super().__init__()
        self._count = 0
        self._idle_count = 0  # interrupts that arrived while no function was running

    def wait_for(self, count: int) -> None:
        """Wait until `count` interrupts have arrived: interrupts for earlier functions must not hit the next one."""
        deadline = time.monotonic() + INTERRUPT_TIMEOUT_S
        while self._count < count and time.monotonic() < deadline:
            time.sleep(0.001)

    def raise_early(self, count: int) -> None:
        """Raise an interrupt that arrived before its function began; `count` interrupts were for earlier functions."""
        early = min(self._count - count, self._idle_count)
        self._idle_count = 0
        if early > 0:
            self._report()
            raise KeyboardInterrupt
        self._count = count

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        self._count += 1
        self._idle_count += not self.active
        self._pending = self.active
        if self.active and not self._deferring:
            self._report()
            raise KeyboardInterrupt


def reduce_array(value: Any) -> Any:
    """Reduce a JAX array to a numpy array, for a pickler's reducer_override; NotImplemented for other values.

    Raises ValueError for an array of which this rank holds only a part, and for keys of jax.random.
    """
    jax = sys.modules.get("jax")
    if jax is None or not isinstance(value, jax.Array):
        return NotImplemented
    if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        raise ValueError(
            "a function that a gang runs cannot return a key of jax.random, which numpy does not know; "
            "return jax.random.key_data(key)"
        )
    if not (value.is_fully_addressable or value.is_fully_replicated):
        raise ValueError(
            f"no rank can see all of an array of shape {value.shape} whose sharding is {value.sharding}, so none can "
            "return it; return what each rank has, [shard.data for shard in x.addressable_shards], or gather it first, "
            "jax.experimental.multihost_utils.process_allgather(x, tiled=True)"
        )
    import numpy

    return numpy.asarray, (numpy.asarray(value),)


def _call_counts() -> dict[str, int]:
    """Return the number of this rank's cross-process calls so far, by group; empty if they are not recorded."""
    lockstep = sys.modules.get("jaxrun_runtime.lockstep.call_recorder")
    return lockstep.call_counts() if lockstep is not None else {}


_current: CallerConnection | None = None


def current_call() -> CallerConnection:
    """Return the connection to the caller of the running function. Raises RuntimeError outside of a gang."""
    if _current is None:
        raise RuntimeError("there is no call: this function is not being run by a gang")
    return _current


def serve(connection: socket.socket, tags: ConnectionTags | None) -> None:
    """Run the calls that arrive on `connection`, until the caller shuts the gang down or is gone.

    tags:  make and check the tags of messages, from the handshake; None on a Unix socket
    """
    global _current
    _current = CallerConnection(connection, tags)
    try:
        _current.serve()
    finally:
        _current = None
