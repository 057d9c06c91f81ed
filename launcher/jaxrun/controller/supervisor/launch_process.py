"""The process that starts the agents (mpirun or srun): its output, its end, and how it is ended.

If agents hang, or their hosts do, the engine must end everything that it has started: Open MPI does so as soon as one
process ends with an error; MPICH and Slurm wait for the last one.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from jaxrun.files.own_files import open_own_directory
from jaxrun.node.agent.agent import OUTPUT
from jaxrun.node.channel.event_loop import EventLoop
from jaxrun.protocol.agent_id import AgentId
from jaxrun.spec.engines.engine import CancelCommand, LaunchOutput
from jaxrun.spec.job.plan import LaunchCommand
from jaxrun.text import format_ranks_on_hosts, format_signal

_LOG = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
LOG_NAME = "launch_command.log"
_READ_BYTES = 65536
_TAIL_BYTES = 4096
_TAIL_LINES = 12
_LONG_TAIL_BYTES, _LONG_TAIL_LINES = 65536, 100  # of a command whose output explains itself
# Grace before SIGTERM, and then before SIGKILL.
_GRACE_S = (5.0, 2.0)
_GRACE_AFTER_FAILURE_S = (0.6, 0.6)


class LaunchProcess:
    """The running launch command, in a session of its own, with our stdin; its output goes to launch_command.log.

    all_reported:  whether it has started all agents
    has_silent:    whether there may be agents that do not end by themselves
    launch_id:     the engine's name for the processes that it started, which may outlive this one; empty if unknown
    """

    def __init__(
        self, command: LaunchCommand, environ: Mapping[str, str], directory: Path | None, *, has_stdin: bool = True
    ) -> None:
        """Start it; without our stdin if no rank reads that. Raises OSError."""
        self.command = command
        self.title = command.title
        self.status: int | None = None
        self.all_reported = False
        self.has_silent = True
        self.launch_id = ""
        self._tail = b""
        self._pipe, writing = os.pipe()
        self._log = _open_log(directory)
        os.set_blocking(self._pipe, False)
        streams: list[Any] = [(os.POSIX_SPAWN_DUP2, writing, 1), (os.POSIX_SPAWN_DUP2, writing, 2)]
        if not has_stdin:
            streams.append((os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0))
        try:
            self.pid = os.posix_spawn(command.argv[0], command.argv, environ, file_actions=streams, setsid=True)
        except BaseException:
            self._close_files()
            raise
        finally:
            os.close(writing)

    def fileno(self) -> int:
        return self._pipe

    def read(self) -> bytes | None:
        """Read and log new output; None once no process holds the pipe any more."""
        try:
            data = os.read(self._pipe, _READ_BYTES)
        except BlockingIOError:
            return b""
        if not data:
            return None
        limit = _LONG_TAIL_BYTES if self.command.engine.explains_itself else _TAIL_BYTES
        self._tail = (self._tail + data)[-limit:]
        if self._log is not None:
            with contextlib.suppress(OSError):
                os.write(self._log, data)
        return data

    def reap(self) -> bool:
        """Whether it has ended by now; then `status` and all of its output are known."""
        if self.status is None:
            with contextlib.suppress(ChildProcessError):
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self.status = os.waitstatus_to_exitcode(status)
                    while self.read():
                        pass
        return self.status is not None

    def signal(self, signum: signal.Signals) -> None:
        if self.status is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signum)

    @property
    def _bears_sigterm(self) -> bool:
        return self.all_reported or self.command.sigterm_at_start

    def ask_to_end(self) -> None:
        """Make it end everything that it has started, and itself, without waiting for it."""
        self.signal(signal.SIGTERM if self._bears_sigterm else signal.SIGKILL)

    def stop(self, loop: EventLoop, *, hurry: bool) -> None:
        """Wait in `loop` for it to exit; escalate to SIGTERM (if it handles that safely), then SIGKILL.

        With `hurry`, escalate soon, because it may be stuck.
        """
        graces = _GRACE_AFTER_FAILURE_S if hurry else _GRACE_S
        for seconds, signum in zip(graces, (signal.SIGTERM, signal.SIGKILL), strict=True):
            if self._wait(loop, seconds):
                return
            if signum == signal.SIGKILL or self._bears_sigterm:
                self.signal(signum)
        self._wait(loop, graces[-1])

    @property
    def failed(self) -> bool:
        """Whether it ended of its own accord, with an error."""
        return self.status is not None and self.status > 0

    @property
    def was_killed(self) -> bool:
        """Whether SIGKILL ended it: by the kernel, for memory, or by a scheduler. Nobody stops a job in this way."""
        return self.status == -signal.SIGKILL

    def failed_agents(self) -> set[AgentId]:
        """Return the agents that have failed, according to the output of the launch command."""
        return set(self._read_tail().failed_agents)

    def _read_tail(self) -> LaunchOutput:
        return self.command.engine.read_output(self._tail.decode(errors="replace"))

    def last_lines(self) -> str:
        """Return the last lines of its output, indented; empty if there is none."""
        lines = [line.rstrip() for line in self._read_tail().lines]
        if self.command.engine.explains_itself:
            return "\n".join(lines[-_LONG_TAIL_LINES:])
        return "\n".join(f"  {line}" for line in [line for line in lines if line.strip(" -\0")][-_TAIL_LINES:])

    def add_last_lines(self, text: str) -> str:
        """Add its output to a text about missing agents: it may explain why, and still wait for the others."""
        words = self.last_lines()
        return text if not words or words in text or text in words else f"{text}\n{self.title} said:\n{words}"

    @property
    def log_note(self) -> str:
        return f"; {LOG_NAME} has its output" if self._log is not None and self._tail else ""

    def describe_failed_start(self) -> str:
        """Describe that it could not start all agents, but continues."""
        said = self.last_lines()
        explained = self.command.engine.explains_itself
        return said if explained else f"{self.title} could not start all agents; it said:\n{said}{self._hint}"

    def describe_end(self) -> str:
        """Write `srun (Slurm 22.05.8) ended with status 1`."""
        assert self.status is not None
        how = f"was killed by {format_signal(-self.status)}" if self.status < 0 else f"ended with status {self.status}"
        return f"{self.title} {how}"

    def describe_failure(self, hosts: Mapping[int, str], reported: Collection[int]) -> str:
        """Describe that it ended before the job, and the ranks whose agents have not reported."""
        words = self.last_lines()
        if self.command.engine.explains_itself and self.failed_agents():
            return words
        said = f"; it said:\n{words}" if words else ""
        missing = [rank for rank in hosts if rank not in reported]
        named = [rank for rank in self.command.engine.read_output(words).named_ranks if rank in hosts]
        lacking = f"\nnot heard from: {format_ranks_on_hosts(missing, hosts)}" if missing and reported else ""
        if not reported and named:
            lacking = f"\nthat is {format_ranks_on_hosts(named, hosts)}"
        return f"{self.describe_end()} before the job was over{said}{lacking}{self._hint}"

    @property
    def _hint(self) -> str:
        hint = self._read_tail().hint
        return f"\n{hint}" if hint else ""

    def close(self) -> str:
        """Release it; returns a text for the user, if there is one."""
        self._close_files()
        may_remain = self.was_killed and self.has_silent and not self.command.attached
        return cancel(self.command.engine.cancel, self.launch_id) if may_remain else ""

    def _close_files(self) -> None:
        os.close(self._pipe)
        if self._log is not None:
            os.close(self._log)

    def _wait(self, loop: EventLoop, seconds: float) -> bool:
        if self.reap():
            return True

        def read() -> None:
            if self.read() is None:
                part.remove_reader(self._pipe)

        part = loop.part()
        part.add_reader(self._pipe, OUTPUT, read)
        process = -1
        with contextlib.suppress(ProcessLookupError):  # someone else has reaped it
            process = os.pidfd_open(self.pid)
            part.add_reader(process, OUTPUT, lambda: None)  # its end ends the wait
        try:
            return loop.run_until(self.reap, seconds)
        finally:
            part.close()
            if process >= 0:
                os.close(process)


def _open_log(directory: Path | None) -> int | None:
    if directory is None:
        return None
    with contextlib.suppress(OSError):
        folder = open_own_directory(directory)
        try:
            return os.open(LOG_NAME, _LOG, 0o666, dir_fd=folder)
        finally:
            os.close(folder)
    return None


_CANCEL_TIMEOUT_S = 10.0
_ABORT_WAIT_S = 2.0  # for the engine to end this process as well


def abort_job(command: LaunchCommand, exit_code: int, environ: Mapping[str, str]) -> str:
    """Make the engine to which this process is attached kill all processes of its job, including this one.

    Returns a sentence for the user if it does not; else an empty text.
    """
    engine = command.engine
    if engine.cancel is not None:
        return cancel(engine.cancel, engine.cancel.launch_id(environ))
    if engine.abort is not None and (descriptor := environ.get(engine.abort.fd_variable, "")).isdecimal():
        try:
            os.write(int(descriptor), engine.abort.message(exit_code))
        except OSError:
            return ""
        time.sleep(_ABORT_WAIT_S)
    return ""


def cancel(command: CancelCommand | None, launch_id: str) -> str:
    """Make an engine kill everything that it started together; returns a sentence for the user if it cannot."""
    import subprocess  # takes 5 ms, and is hardly ever needed

    if command is None or not launch_id:
        return ""
    words = [*command.argv, launch_id]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_CANCEL_TIMEOUT_S, errors="replace")
        failure = done.stderr.strip() if done.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        failure = str(error)
    if not failure or any(text in failure for text in command.too_late):
        return ""
    return f"{command.title} {launch_id} may still run on other hosts ({failure}); end it with: {' '.join(words)}"
