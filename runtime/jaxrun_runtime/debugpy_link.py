"""Connects debugpy in this rank with `jaxrun debug`, over the channel to the agent, whenever the agent asks for it.

debugpy needs a TCP connection. It gets one to this process itself: no adapter listens on this host, and nobody else can
connect. The main thread may be in C++ all the while. After the end of a session debugpy stays imported, and traces
nothing.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import types
from typing import TYPE_CHECKING, Any

from jaxrun.files.loopback import accept_own
from jaxrun.protocol.debugger_messages import DebuggerClosed, DebuggerDecision
from jaxrun.protocol.debugpy_messages import (
    DebugpyInput,
    DebugpyOutput,
    DebugpyReady,
    DebugpyStart,
    DebugpyStarted,
    DebugpyStopped,
)
from jaxrun.protocol.staging_messages import read_staged
from jaxrun_runtime import stack_dumps
from jaxrun_runtime.agent_channel import AgentChannel, AgentDisconnected

if TYPE_CHECKING:
    from jaxrun.protocol.env import WorkerEnv

_RECEIVE_BYTES = 2**15
_QUIET = "PYDEVD_DISABLE_FILE_VALIDATION"  # else it warns that Python's own modules are frozen

_BODY = b'{"seq":1000000000,"type":"request","command":"disconnect","arguments":{"terminateDebuggee":false}}'
_DISCONNECT = b"Content-Length: %d\r\n\r\n%b" % (len(_BODY), _BODY)  # resumes the program, without breakpoints


class DebugpyLink:
    """Starts a session for each DebugpyStart. The agent's signal makes the thread of stacks look for the message."""

    def __init__(self, env: WorkerEnv, channel: AgentChannel) -> None:
        self._rank = env.rank
        self._channel = channel
        channel.handle(DebugpyStart, self._on_start)
        stack_dumps.observe_main_thread(self._look)

    def _look(self, frame: types.FrameType | None) -> None:
        self._channel.poll(DebugpyStart)  # reading calls the handler

    def _on_start(self, message: Any) -> None:
        session = _Session(self._rank, message.session, self._channel)
        try:
            _start_thread("jaxrun-debugger", session.run)
        except RuntimeError as error:  # it must not reach the thread that reads the channel
            self._channel.send(DebugpyStarted(self._rank, message.session, _explain(error)))


def show_error(error: BaseException, channel: AgentChannel, rank: int) -> None:
    """Wait until an editor is connected with this rank, and show it where `error` was raised until it continues.

    Returns at once if the head decides that the job ends.
    """
    if not channel.receive(DebuggerDecision).granted:
        return
    import debugpy

    if hasattr(debugpy, "trigger_exception_handler"):
        debugpy.trigger_exception_handler(error, as_uncaught=False)
    else:
        print(f"jaxrun: debugpy {debugpy.__version__} cannot show this error; install a newer one", file=sys.stderr)
    channel.send(DebuggerClosed(rank))


class _Session:
    def __init__(self, rank: int, number: int, channel: AgentChannel) -> None:
        self._rank = rank
        self._number = number
        self._channel = channel
        self._debugpy: Any = None
        self._link: socket.socket | None = None

    def run(self) -> None:
        """Connect debugpy, and pass on what it sends until it closes its connection."""
        with contextlib.suppress(AgentDisconnected):
            try:
                self._debugpy, self._link = _connect()
            except Exception as error:
                self._channel.send(DebugpyStarted(self._rank, self._number, _explain(error)))
                self._channel.receive_debugpy(self._number)
                return
            self._channel.send(DebugpyStarted(self._rank, self._number, staged=read_staged(os.environ)))
            _start_thread("jaxrun-debugger-input", self._pass_input)
            _start_thread("jaxrun-debugger-start", self._report_ready)
            with self._link:
                while data := _receive(self._link):
                    self._channel.send(DebugpyOutput(self._rank, self._number, data))
            with contextlib.suppress(RuntimeError):  # nobody waits
                self._debugpy.wait_for_client.cancel()
            _stop_tracing()
            self._channel.send(DebugpyStopped(self._rank, self._number))

    def _pass_input(self) -> None:
        """Pass on what the editor sends until the session is over; its end resumes the program."""
        assert self._link is not None
        with contextlib.suppress(AgentDisconnected):
            while isinstance(message := self._channel.receive_debugpy(self._number), DebugpyInput):
                with contextlib.suppress(OSError):  # debugpy has closed it: that ends `run`
                    self._link.sendall(message.data)
        with contextlib.suppress(OSError):  # an editor that has disconnected in order has had it closed
            self._link.sendall(_DISCONNECT)
            self._link.shutdown(socket.SHUT_WR)

    def _report_ready(self) -> None:
        with contextlib.suppress(AgentDisconnected, RuntimeError):  # the session ends
            self._debugpy.wait_for_client()
            if self._debugpy.is_client_connected():
                self._channel.send(DebugpyReady(self._rank, self._number))


def _connect() -> tuple[types.ModuleType, socket.socket]:
    """Import debugpy and connect it with this thread; returns it, and our end of the connection."""
    before = os.environ.get(_QUIET)
    os.environ[_QUIET] = "1"
    try:
        import debugpy
        import debugpy.server.api
    finally:
        if before is None:
            del os.environ[_QUIET]
        else:
            os.environ[_QUIET] = before
    for thread in threading.enumerate():
        if thread.name.startswith("jaxrun-"):
            _hide(thread)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        _start_tracing(listener.getsockname()[1], os.path.dirname(debugpy.__file__))
        return debugpy, accept_own(listener)


def _explain(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name == "debugpy":
        return f'{sys.executable} there has no debugpy; install it: pip install "jaxrun[debug]"'
    return f"debugpy cannot be connected there: {type(error).__name__}: {error}"


def _receive(link: socket.socket) -> bytes:
    try:
        return link.recv(_RECEIVE_BYTES)
    except OSError:
        return b""


def _start_thread(name: str, target: Any) -> None:
    thread = threading.Thread(target=target, name=name, daemon=True)
    _hide(thread)
    thread.start()


def _hide(thread: threading.Thread) -> None:
    """Make debugpy leave a thread alone, which it would stop with the program's threads."""
    thread.pydev_do_not_trace = thread.is_pydev_daemon_thread = True  # type: ignore[attr-defined]


# ---- functions of pydevd, the part of debugpy that traces; debugpy has none of its own for this


def _start_tracing(port: int, own_directory: str) -> None:
    """Connect to this port, as debugpy.listen does: debugpy.connect would wait for an editor."""
    import pydevd

    pydevd.settrace(
        host="127.0.0.1",
        port=port,
        suspend=False,
        wait_for_ready_to_run=False,
        patch_multiprocessing=False,  # the processes that a rank starts are left alone
        notify_stdin=False,
        dont_trace_start_patterns=(own_directory,),
    )


def _stop_tracing() -> None:
    import pydevd

    pydevd.stoptrace()
    if sys.version_info < (3, 12):  # it stops only this thread's
        import pydevd_tracing

        pydevd_tracing.set_trace_to_threads(_untrace, create_dummy_thread=False)


def _untrace(frame: types.FrameType, event: str, arg: object) -> None:
    """End the tracing of the thread that calls this as its trace function."""
    sys.settrace(None)
