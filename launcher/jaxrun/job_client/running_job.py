"""Finds the job of a run directory while it runs, and asks its launcher by the socket that job.json names."""

from __future__ import annotations

import contextlib
import errno
import itertools
import math
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

from jaxrun.errors import ProtocolError, UnavailableError, UsageError
from jaxrun.files.own_files import open_own_directory
from jaxrun.protocol.codec import Form, MessageDecoder, encode_json_frame, message_types
from jaxrun.protocol.job_messages import (
    MAX_ANSWER_FRAME_BYTES,
    SOCKET_VERSION,
    Answer,
    Answered,
    AnswerState,
    Ask,
    Dropped,
    FromClient,
    Greeting,
    JobBegan,
    JobEnded,
    NotStarted,
    Request,
    ToClient,
)
from jaxrun.records.rundir import job_sockets
from jaxrun.records.rundir.jobs import has_open
from jaxrun.records.rundir.recorded_files import RecordedLauncher, find_run_dir, read_plan
from jaxrun.records.rundir.rundir import EVENTS_FILE, JOB_FILE, LATEST_LINK, VERDICT_FILE

ANSWER_TIMEOUT_S = 5.0  # ranks on other hosts have 1.5 s of it
_GREETING_S = 1.0
_RECEIVE_BYTES = 2**18
_START_POLL_S = 0.05
_TYPES = message_types(ToClient)


class RequestRefused(UnavailableError):
    """The job's launcher has refused a request."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer.text)
        self.answer = answer


class RunningJob:
    """A job, by a connection to its launcher. All methods may be called from several threads at once.

    began, not_started:  what a launcher that this process has started says about the start of its job
    verdict:             the text of verdict.json, once the launcher has sent it
    """

    def __init__(self, run_dir: Path, link: socket.socket, pid: int) -> None:
        """`link` is connected to the launcher `pid`, which has the job of `run_dir`."""
        link.setblocking(True)
        self.run_dir = run_dir
        self.began: JobBegan | None = None
        self.not_started: NotStarted | None = None
        self.verdict = ""
        self._pid = pid
        self._link = link
        self._decoder: MessageDecoder[ToClient] = MessageDecoder(_TYPES, MAX_ANSWER_FRAME_BYTES, form=Form.JSON)
        self._numbers = itertools.count(1)
        self._sending = threading.Lock()
        self._changed = threading.Condition()  # holds for all that follows
        self._is_reading = False  # whether a thread reads from the link, for all
        self._answers: dict[int, list[Answer]] = {}  # that nobody has fetched yet, of each request under way
        self._is_greeted = False  # by the launcher
        self._is_over = False
        self._trouble = ""  # why nothing more can be read, where that is not the end of the job
        self.send(Greeting(SOCKET_VERSION))

    @property
    def is_running(self) -> bool:
        """Whether its launcher is alive and has not reported that the job is over."""
        self._read(0)
        return not self._is_over

    def fileno(self) -> int:
        """The descriptor that is readable when something has come, such as the end of the job."""
        return self._link.fileno()

    def new_number(self) -> int:
        return next(self._numbers)

    def send(self, message: FromClient) -> None:
        """Send a message; does nothing once the launcher has ended."""
        frame = encode_json_frame(message)
        with self._sending:
            with contextlib.suppress(OSError):  # reading notices it
                self._link.sendall(frame, socket.MSG_NOSIGNAL)

    def ask(
        self,
        request: Request,
        timeout: float | None = ANSWER_TIMEOUT_S,
        on_progress: Callable[[Answer], None] = lambda answer: None,
        *,
        number: int | None = None,
    ) -> Answer:
        """Ask the job's launcher; returns its final answer. `on_progress` is called with each earlier one.

        number:  of the request, from `new_number`, where more is sent about it

        Raises RequestRefused, and UnavailableError if no answer comes within `timeout` seconds, or, with None, before
        the job ends.
        """
        deadline = time.monotonic() + timeout if timeout is not None else math.inf
        number = self.new_number() if number is None else number
        self._answers[number] = []
        try:
            self.send(Ask(number, request))
            while True:
                left = deadline - time.monotonic()  # an answer that has come counts, even after a pause of this process
                self._read(max(0.0, left) if timeout is not None else None, number)
                for answer in self._fetch(number):
                    if answer.state is AnswerState.DONE:
                        return answer
                    if answer.state is AnswerState.REFUSED:
                        raise RequestRefused(answer)
                    on_progress(answer)
                self._check(timeout if left <= 0 else None)
        finally:
            del self._answers[number]

    def wait_until_over(self, timeout: float) -> bool:
        """Wait until the launcher says that the job is over, or no more can be read; returns whether that is so."""
        deadline = time.monotonic() + timeout
        while not self._is_over:
            left = deadline - time.monotonic()
            self._read(max(0.0, left))
            if left <= 0:
                break
        return self._is_over

    def await_greeting(self, timeout: float) -> None:
        """Wait for the Greeting of the launcher, which comes at once unless that is stopped, or begins an attempt.

        Raises UnavailableError if the launcher is of another version, or refuses this client.
        """
        deadline = time.monotonic() + timeout
        while not self._is_greeted and not self._is_over and (left := deadline - time.monotonic()) > 0:
            self._read(left)
        self.check_connection()

    def check_connection(self) -> None:
        """Raise UnavailableError if the launcher has closed the connection, though its job is not over."""
        if self._trouble:
            raise UnavailableError(f"the launcher of this job cannot be asked: {self._trouble}")

    def shut_down(self) -> None:
        """Tell the launcher that nothing more comes."""
        with self._sending, contextlib.suppress(OSError):
            self._link.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._link.close()

    # ---- reading: one thread does so for all that wait

    def _fetch(self, number: int) -> list[Answer]:
        with self._changed:
            found, self._answers[number] = self._answers[number], []
        return found

    def _check(self, waited: float | None) -> None:
        """Raise UnavailableError if no answer will come, or none has come within the `waited` seconds that are over."""
        self.check_connection()
        if self._is_over:
            raise UnavailableError(
                f"the job ended before it answered; to see how it went: jaxrun explain {self.run_dir}"
            )
        if waited is not None:
            raise UnavailableError(
                f"the launcher (process {self._pid}) has not answered in {waited:g} s; is it stopped?"
            )

    def _read(self, timeout: float | None, number: int = 0) -> None:
        """Wait until something has come, for `timeout` seconds at most, unless the request `number` has an answer."""
        with self._changed:
            if self._is_over or self._answers.get(number):
                return
            if self._is_reading:
                self._changed.wait(timeout)
                return
            self._is_reading = True
        data: bytes | None = None
        try:
            data = _receive(self._link, timeout)
        finally:
            with self._changed:
                self._is_reading = False
                if data is not None:
                    self._feed(data)
                self._changed.notify_all()

    def _feed(self, data: bytes) -> None:
        if not data:
            self._is_over = True
            return
        try:
            for message in self._decoder.decode_each(data):
                if not self._trouble:
                    self._on_message(message)
        except ProtocolError as error:
            if not self._trouble:
                self._give_up(f"it is of another version of jaxrun: {error}")

    def _on_message(self, message: ToClient) -> None:
        match message:
            case Greeting(version=version):
                self._is_greeted = True
                if version != SOCKET_VERSION:
                    self._give_up(_describe_version(version))
            case Answered(number=number, answer=answer):
                if number in self._answers:
                    self._answers[number].append(answer)
            case JobBegan():
                self.began = message
            case NotStarted():
                self.not_started = message
            case JobEnded(verdict=verdict):
                self.verdict, self._is_over = verdict, True
            case Dropped(reason=reason):
                self._give_up(reason)

    def _give_up(self, trouble: str) -> None:
        self._trouble, self._is_over = trouble, True


def _describe_version(version: int) -> str:
    age = "an older" if version < SOCKET_VERSION else "a newer"
    speaks = f"its socket speaks version {version}, not {SOCKET_VERSION}"
    return f"it is of {age} jaxrun, and {speaks}; ask with the jaxrun that started the job"


def _receive(link: socket.socket, timeout: float | None) -> bytes | None:
    """Return the next bytes; b"" at the end of the connection, None if nothing has come in time."""
    try:
        poll = select.poll()
        poll.register(link, select.POLLIN)
        if not poll.poll(None if timeout is None else timeout * 1000):
            return None
        return link.recv(_RECEIVE_BYTES)
    except (OSError, ValueError):  # it is closed, maybe by another thread
        return b""


def wait_for_job(run_dir: Path, launcher: int) -> RunningJob | None:
    """Wait until the process `launcher` has begun the job of `run_dir`; None if the job is over already.

    Raises UsageError if the job cannot be asked.
    """
    while not (run_dir / JOB_FILE).exists():
        if not has_open(launcher, run_dir / EVENTS_FILE):
            return None
        time.sleep(_START_POLL_S)
    try:
        return find_running_job(run_dir, "jaxrun top")
    except UsageError:
        if has_open(launcher, run_dir / EVENTS_FILE):
            raise
        return None


def find_running_job(path: Path | None, command: str) -> RunningJob:
    """Return the job of the run directory `path`; by default, the latest below the working directory.

    Raises UsageError if the job is over or cannot be asked from here, and UnavailableError if its launcher refuses;
    `command` is what to type elsewhere.
    """
    run_dir = find_run_dir(path)
    if run_dir.is_symlink() or run_dir.name == LATEST_LINK:
        run_dir = run_dir.resolve()
    _check_running(run_dir)
    plan, here = read_plan(run_dir), os.uname().nodename
    launcher = plan.launcher
    if not launcher.host:
        raise UsageError(f"{run_dir} does not say which process runs its job; did another version of jaxrun write it?")
    try:
        os.close(open_own_directory(run_dir))
    except OSError as error:
        raise UsageError(f"cannot ask the job of {run_dir}: {error.strerror}") from None
    try:
        job = _connect(run_dir, launcher, plan.job_id)
        job.await_greeting(_GREETING_S)
        return job
    except OSError as error:
        _check_running(run_dir)  # it may just have ended
        if launcher.host != here:
            where = f"on {launcher.host}, not on {here}"
            raise UsageError(f"the launcher of this job runs {where}; type there: {command} {run_dir}") from None
        if isinstance(error, PermissionError):
            raise UsageError(
                f"cannot ask the job of {run_dir}: {error.strerror}; only the user who has started it may"
            ) from None
        if not has_open(launcher.pid, run_dir / EVENTS_FILE):
            gone = f"the launcher of {run_dir} is gone, and left no verdict"
            raise UsageError(f"{gone}; to see what is known: jaxrun explain {run_dir}") from None
        if not launcher.socket:
            raise UsageError(
                f"the job of {run_dir} has no socket, so it cannot be asked: an older jaxrun has started it, or its "
                f"launcher has said at its start why there is none; its log: {run_dir / EVENTS_FILE}"
            ) from None
        raise UsageError(
            f"cannot ask the job of {run_dir}: {launcher.socket}: {error.strerror}; its launcher is process "
            f"{launcher.pid}"
        ) from None


def _check_running(run_dir: Path) -> None:
    """Raise UsageError if the job is over."""
    if (run_dir / VERDICT_FILE).exists():
        raise UsageError(f"the job of {run_dir} is over; how it went: jaxrun explain {run_dir}") from None


def _connect(run_dir: Path, launcher: RecordedLauncher, job_id: str) -> RunningJob:
    """Raises OSError if the launcher cannot be reached from here."""
    if not job_id or os.path.basename(launcher.socket) != job_sockets.socket_name(job_id):
        raise FileNotFoundError(errno.ENOENT, "it is not the name of a job's socket")
    link = job_sockets.connect(launcher.socket, launcher.pid, ANSWER_TIMEOUT_S)
    return RunningJob(run_dir, link, launcher.pid)
