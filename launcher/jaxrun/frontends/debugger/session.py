"""One session of `jaxrun debug`: the editor's port on this host, debugpy's adapter, and the bytes to and from the rank.

    editor ── 127.0.0.1, one connection, of this user ── adapter.py ── socket pair ── this process ── the job's socket

Nothing listens any more once an editor has sent something. The session ends when the editor lets go or its connection
ends, when the rank's program ends, or by `close`.
"""

from __future__ import annotations

import base64
import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from importlib.util import find_spec

from msgspec import UNSET

from jaxrun.errors import JaxrunError, UnavailableError, UsageError
from jaxrun.files.loopback import accept_own_that_speaks, wait_until_closed
from jaxrun.job_client.running_job import RequestRefused, RunningJob
from jaxrun.protocol.job_messages import Answer, Cancel, DebugRequest, GoRequest, Input
from jaxrun.records.document_types import DebugConfiguration, DebugpyAddress, PathMapping

_RECEIVE_BYTES = 2**15  # with its frame it is less than MAX_CLIENT_FRAME_BYTES
_LET_GO_S = 5.0  # for the rank to continue, and for the adapter to end
_DISCONNECT_S = 1.0  # for the adapter to let go of the rank by itself, once the editor is gone


def check_debugpy() -> None:
    """Raise UsageError if debugpy is missing on this side."""
    if find_spec("debugpy") is None:
        raise UsageError('jaxrun debug needs debugpy; install it: pip install "jaxrun[debug]"')


def make_configuration(rank: int, port: int, staged: Mapping[str, str]) -> DebugConfiguration:
    """Return the entry of launch.json with which VS Code attaches; `staged` maps directories to the rank's copies."""
    mappings = tuple(PathMapping(localRoot=here, remoteRoot=there) for here, there in staged.items())
    return DebugConfiguration(
        name=f"jaxrun rank {rank}",
        type="debugpy",
        request="attach",
        connect=DebugpyAddress(host="127.0.0.1", port=port),
        justMyCode=True,
        pathMappings=mappings or UNSET,
    )


def start_programs(job: RunningJob) -> None:
    """Let a job that waits for an editor at its start run without one. Raises UsageError if it does not wait."""
    try:
        job.ask(GoRequest())
    except RequestRefused as refused:
        raise UsageError(str(refused)) from None


class DebugSession:
    """Connects debugpy in a rank; `on_started` is called with the port and the staged directories, in a thread."""

    def __init__(
        self,
        job: RunningJob,
        rank: int,
        port: int,
        on_started: Callable[[int, Mapping[str, str]], None],
        on_editor: Callable[[], None],
    ) -> None:
        """`on_editor` is called when an editor has begun to speak. Raises UsageError if the port cannot be opened."""
        self._job = job
        self._on_started = on_started
        self._on_editor = on_editor
        self._number = job.new_number()
        try:
            self._listener = socket.create_server(("127.0.0.1", port))
        except OSError as error:
            raise UsageError(f"--port {port} cannot be opened: {error.strerror or error}; leave it out") from None
        self._bytes, self._adapters = socket.socketpair()
        self._adapter: subprocess.Popen[bytes] | None = None
        self._is_started = False
        self._end: str | JaxrunError = ""
        self._failure: UnavailableError | None = None
        self._asking = threading.Thread(target=self._ask, args=(rank,), daemon=True)
        self._asking.start()

    def wait(self) -> str:
        """Wait until the session has ended; returns why, if it was not the editor who ended it.

        Raises UsageError if the rank cannot be debugged, and UnavailableError if the job cannot be asked, or if
        debugpy's adapter cannot be started.
        """
        self._asking.join()
        if self._failure is not None:
            raise self._failure
        if isinstance(self._end, JaxrunError):
            raise self._end
        return self._end

    def close(self) -> None:
        """End the session, if it has not ended, and the adapter."""
        self._job.send(Cancel(self._number))
        self._asking.join(_LET_GO_S)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for an editor
        self._listener.close()
        self._bytes.close()
        self._adapters.close()
        if self._adapter is not None:
            try:
                self._adapter.wait(_LET_GO_S)
            except subprocess.TimeoutExpired:
                self._adapter.kill()
                self._adapter.wait()

    # ---- threads

    def _ask(self, rank: int) -> None:
        try:
            self._end = self._job.ask(DebugRequest(rank), None, self._on_answer, number=self._number).text
        except RequestRefused as refused:
            self._end = str(refused) if self._is_started else UsageError(str(refused))
        except UnavailableError as error:
            self._end = str(error) if self._is_started else error
        with contextlib.suppress(OSError):
            self._bytes.shutdown(socket.SHUT_RDWR)

    def _on_answer(self, answer: Answer) -> None:
        if "data" in answer.content:
            with contextlib.suppress(OSError):  # the adapter has ended
                self._bytes.sendall(base64.b64decode(answer.content["data"]))
            return
        self._is_started = True
        threading.Thread(target=self._serve_editor, daemon=True).start()
        self._on_started(self._listener.getsockname()[1], answer.content["staged"])

    def _serve_editor(self) -> None:
        """Wait for an editor, and pass on what it sends until it has gone."""
        with contextlib.suppress(OSError):  # closed by `close`, or the adapter cannot be started
            with accept_own_that_speaks(self._listener) as editor:
                self._listener.close()
                try:
                    self._adapter = adapter = _start_adapter(editor, self._adapters)
                except OSError as error:
                    self._failure = UnavailableError(f"debugpy's adapter cannot be started: {error.strerror or error}")
                    raise
                self._adapters.close()
                self._on_editor()
                threading.Thread(target=self._watch_editor, args=(editor, adapter), daemon=True).start()
                while data := self._bytes.recv(_RECEIVE_BYTES):
                    self._job.send(Input(self._number, data))
        self._job.send(Cancel(self._number))

    def _watch_editor(self, editor: socket.socket, adapter: subprocess.Popen[bytes]) -> None:
        """End the session once the editor is gone: the adapter does so only after some of an editor's requests."""
        with contextlib.suppress(OSError, ValueError):  # the session is over, and its sockets are closed
            wait_until_closed(editor)
            with contextlib.suppress(subprocess.TimeoutExpired):
                adapter.wait(_DISCONNECT_S)
            self._job.send(Cancel(self._number))


def _start_adapter(editor: socket.socket, rank: socket.socket) -> subprocess.Popen[bytes]:
    fd = rank.fileno()
    return subprocess.Popen(
        (sys.executable, "-m", f"{__package__}.adapter", str(fd)),
        stdin=editor.fileno(),
        stdout=editor.fileno(),
        stderr=subprocess.DEVNULL,
        pass_fds=(fd,),
        start_new_session=True,  # Ctrl-C is for this process, which ends the session in order
        env={**os.environ, "PYDEVD_DISABLE_FILE_VALIDATION": "1"},
    )
