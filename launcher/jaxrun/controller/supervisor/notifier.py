"""Runs the command of --notify at the events of a job that matter to someone who is not watching it.

The command gets the event as JSON by its standard input and its name in JAXRUN_EVENT. It never holds up the job: it
runs beside it, and is killed when its time is over. Only the end of the job waits for it, as long as that takes.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct

from jaxrun.analysis.verdict.verdict import Verdict
from jaxrun.analysis.verdict.verdict_text import headline_of
from jaxrun.files.procfs import descendants
from jaxrun.job_events.actions import RecordLoss, RecordReturn
from jaxrun.job_events.events import AttemptStarted, StallNotice
from jaxrun.node.agent.agent import OUTPUT
from jaxrun.node.agent.signals import SignalPipe
from jaxrun.node.channel.event_loop import EventLoop
from jaxrun.node.forkserver.client import start_process
from jaxrun.protocol.names import EVENT
from jaxrun.records.event_log.event_log import LoggedEvent
from jaxrun.spec.job.plan import Plan
from jaxrun.terminal import in_one_line
from jaxrun.text import format_status

NOTIFY_TIMEOUT_S = 10.0
_LAST_BYTES = 1000  # of what the command has printed
# The outer shell reports the status of the command by a descriptor of its own: whoever reaps children here does not.
_SCRIPT = '/bin/sh -c "$1" 3>&-; echo $? >&3'


class _Running(Struct):
    """A command that runs.

    status:  the pipe by which its shell says how it has ended; at its end-of-file the shell is gone
    output:  a file in memory with what it has printed
    until:   when it is killed
    """

    event: str
    pid: int
    status: int
    output: int
    until: float


class Notifier:
    """The notifications of one job. Times are seconds since the epoch.

    loop:     notices how commands end
    command:  a command line of the shell; empty for none
    about:    what each event says of the job, besides what it is
    tell:     prints a line
    """

    def __init__(
        self,
        loop: EventLoop,
        command: str,
        about: Mapping[str, Any],
        environ: Mapping[str, str],
        tell: Callable[[str], None],
    ) -> None:
        self._loop = loop
        loop.add_timer(self.deadline, self.poll)
        self._command = command
        self._about = about
        self._environ = environ
        self._tell = tell
        self._running: list[_Running] = []
        self._hosts = 0  # of the attempt before

    @classmethod
    def of_job(
        cls, loop: EventLoop, plan: Plan, run_dir: str, environ: Mapping[str, str], tell: Callable[[str], None]
    ) -> Notifier:
        job = plan.job
        about = {"job_id": plan.job_id, "name": job.name, "tag": job.tag, "run_dir": run_dir, "size": len(plan.workers)}
        return cls(loop, job.notify, about, environ, tell)

    @property
    def pids(self) -> set[int]:
        """The processes of commands that run."""
        return {pid for one in self._running for pid in (one.pid, *descendants(one.pid))}

    def deadline(self) -> float | None:
        """The latest time at which to call `poll`."""
        return min((one.until for one in self._running), default=None)

    def on_event(self, event: LoggedEvent) -> None:
        """Run the command if this event of the log is one to notify someone of."""
        match event.message:
            case AttemptStarted(reason=reason, hosts=hosts):
                before, self._hosts = self._hosts, hosts
                if before:
                    name = "shrunk" if hosts < before else "grown" if hosts > before else "restarted"
                    self._notify(name, event.time, attempt=event.attempt, reason=reason, hosts=hosts)
            case RecordLoss(rank=rank, headline=headline, restart=restart):
                facts = {"rank": rank, "headline": headline, "is_started_again": restart is not None}
                self._notify("lost", event.time, attempt=event.attempt, **facts)
            case RecordReturn(rank=rank, seconds=seconds):
                self._notify("returned", event.time, attempt=event.attempt, rank=rank, seconds=round(seconds, 3))
            case StallNotice(idle_s=idle_s):
                self._notify("stalled", event.time, attempt=event.attempt, idle_s=idle_s)

    def on_end(self, verdict: Verdict) -> None:
        """Run the command for the end of the job."""
        self._notify(
            "ended",
            time.time(),
            attempt=verdict.attempt,
            outcome=verdict.outcome,
            exit_code=verdict.exit_code,
            headline=headline_of(verdict),
            culprits=verdict.culprits,
            seconds=round(verdict.seconds, 3),
        )

    def _notify(self, event: str, now: float, **facts: Any) -> None:
        if not self._command:
            return
        self.poll()
        content = {"event": event, "time": round(now, 3), **self._about, **facts}
        told, output = os.memfd_create("event"), os.memfd_create("output")
        read, write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        os.write(told, json.dumps(content, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n")
        os.lseek(told, 0, os.SEEK_SET)
        argv = ("/bin/sh", "-c", _SCRIPT, "sh", self._command)
        try:
            pid = start_process(argv, {**self._environ, EVENT: event}, (told, output, output, write))
        except OSError as error:
            os.close(read)
            os.close(output)
            self._tell(f"--notify could not be run for the event {event}: {error.strerror}")
            return
        finally:
            os.close(told)
            os.close(write)
        self._running.append(_Running(event, pid, read, output, self._loop.clock() + NOTIFY_TIMEOUT_S))
        self._loop.add_reader(read, OUTPUT, self.poll)

    def poll(self) -> None:
        """Say which commands have failed since, and end those whose time is over."""
        now = self._loop.clock()
        for one in [*self._running]:
            status = _read_status(one.status)
            if status is None and now < one.until:
                continue
            if status is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(one.pid, signal.SIGKILL)
            self._running.remove(one)
            if status != 0:
                self._tell(_describe_failure(one, status))
            self._loop.remove_reader(one.status)
            os.close(one.status)
            os.close(one.output)

    def wait(self, signals: SignalPipe, tell: Callable[[str], None]) -> None:
        """Wait until no command runs any more, or a signal asks this process to end; `tell` prints from now on."""
        self._tell = tell
        self._loop.run_until(lambda: not self._running, signals=signals)


def _describe_failure(one: _Running, status: int | None) -> str:
    lines = os.pread(one.output, _LAST_BYTES, max(0, os.fstat(one.output).st_size - _LAST_BYTES))
    last = lines.decode(errors="replace").strip().splitlines()[-1:]
    how = f"did not end in {NOTIFY_TIMEOUT_S:g} s" if status is None else format_status(status, "was ")
    return ": ".join([f"--notify {how} for the event {one.event}", *map(in_one_line, last)])


def _read_status(fd: int) -> int | None:
    """The exit status that a shell has written; None if it has not, -9 if it has ended without a word."""
    try:
        text = os.read(fd, 16)
    except BlockingIOError:
        return None
    return int(text) if text.strip().isdigit() else -signal.SIGKILL
