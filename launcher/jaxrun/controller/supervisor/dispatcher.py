"""The single way into the head: logs events and passes them to it, logs its actions and returns them.

Parts of an action that need neither agents nor output, such as the answer to a request, are done here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from jaxrun.analysis.verdict.phrasing import describe_loss, describe_others
from jaxrun.analysis.verdict.stack_text import describe_stacks, format_stall_notice
from jaxrun.controller.head.head import Head
from jaxrun.controller.supervisor.job_server import JobServer
from jaxrun.job_events.actions import (
    Action,
    AnswerRequest,
    PrintLine,
    PrintLoss,
    PrintStacks,
    PrintStallNotice,
    RecordLoss,
)
from jaxrun.job_events.events import Event, Tick
from jaxrun.protocol.flight import ToldStep
from jaxrun.records.event_log.event_log import LoggedEvent, LoggedMessage, find_message
from jaxrun.records.rundir.rundir import RunDir
from jaxrun.text import agree, format_ranges


class Dispatcher:
    """Feeds events to the head and returns its actions; `clock` returns seconds since the epoch."""

    def __init__(
        self, head: Head, files: RunDir, server: JobServer, clock: Callable[[], float], attempt: int = 1
    ) -> None:
        """`attempt` is logged with each event; the `server` gets the answers to requests."""
        self._attempt = attempt
        self._head = head
        self._files = files
        self._server = server
        self._clock = clock

    @property
    def hosts(self) -> Mapping[int, str]:
        return self._head.hosts

    @property
    def told_step(self) -> ToldStep | None:
        return self._head.told_step

    def handle(self, event: Event) -> list[Action]:
        self._log(event)
        return [self._prepare(action) for action in self._head.handle(event, self._clock())]

    def handle_timeouts(self) -> list[Action]:
        """Return the actions that are due because the head's deadline has passed."""
        deadline = self._head.deadline()
        return self.handle(Tick()) if deadline is not None and deadline <= self._clock() else []

    def deadline(self) -> float | None:
        """The latest time at which to call `handle_timeouts`, in seconds since the epoch."""
        return self._head.deadline()

    def record(self, message: LoggedMessage, to: tuple[int, ...] = ()) -> None:
        """Log a message that the head does not need, or that it has sent to these ranks."""
        self._files.record(LoggedEvent(self._clock(), message, self._attempt, to))

    def _prepare(self, action: Action) -> Action:
        """Log an action, and execute the parts that need neither agents nor output."""
        self._log(action)
        if isinstance(action, PrintStacks):
            return PrintLine(f"{action.heading}{describe_stacks(action.stacks) or 'no rank has stacks to show yet'}")
        if isinstance(action, PrintStallNotice):
            return PrintLine(_format_notice(action, self._files.shown_path))
        if isinstance(action, PrintLoss):
            for loss in action.losses:
                headline = describe_loss([loss.worker], self.hosts, action.run_at)
                self.record(RecordLoss(loss.worker.rank, loss.incarnation, headline, loss.restart))
            return PrintLine(_format_losses(action, self.hosts))
        if isinstance(action, AnswerRequest):
            self._server.answer(action.number, action.answer)
        return action

    def _log(self, thing: Event | Action) -> None:
        found = find_message(thing)
        if found is not None:
            self.record(*found)


def _format_losses(told: PrintLoss, hosts: Mapping[int, str]) -> str:
    workers = [loss.worker for loss in told.losses]
    text = f"{describe_loss(workers, hosts, told.run_at)}; {describe_others(told.others)}"
    if any(loss.restart is not None for loss in told.losses):
        where = f" on the spare host {told.spare}" if told.spare else ""
        text += f", and {agree('it is', len(workers))} started again{where}"
        if counted := [loss.restart for loss in told.losses if loss.restart]:
            text += f" ({format_ranges(counted)} of {told.most})"
        if told.waits and not told.spare:
            host = agree("its", len(workers))
            text += f" once {host} host is back, or another in its place (--wait-hosts)"
    failure = workers[0].failure
    return text + (f"\n{failure.traceback.rstrip()}" if failure is not None else "")


def _format_notice(notice: PrintStallNotice, run_dir: Path | None) -> str:
    return format_stall_notice(
        notice.stacks, notice.idle_s, run_dir, limit_s=notice.limit_s, is_as_before=notice.is_as_before
    )
