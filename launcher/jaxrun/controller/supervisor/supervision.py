"""What all attempts of a job share: its run directory, its screen, and whoever follows it from outside."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

from msgspec import Struct

from jaxrun.controller.supervisor.job_history import JobHistory
from jaxrun.controller.supervisor.job_server import JobServer
from jaxrun.controller.supervisor.job_terminal import Terminal
from jaxrun.controller.supervisor.notifier import Notifier
from jaxrun.controller.supervisor.train_job_status import TrainJobStatus
from jaxrun.job_events.events import Event
from jaxrun.node.agent.guard import Guard
from jaxrun.node.agent.signals import SignalPipe
from jaxrun.node.channel.event_loop import EventLoop
from jaxrun.protocol.hidden_fields import HidesFields
from jaxrun.records.output.output import Output
from jaxrun.records.rundir.rundir import RunDir


class Outside(Struct, frozen=True):
    """Who talks to the job from outside, and who is told of it.

    server:     tools that ask and follow the job at its socket
    notifier:   the commands of --notify
    train_job:  a TrainJob of Kubernetes
    events:     have come from there, and wait for the head of this attempt or of the next one
    """

    signals: SignalPipe
    terminal: Terminal
    server: JobServer
    notifier: Notifier
    train_job: TrainJobStatus
    events: deque[Event]


class Supervision(HidesFields, frozen=True):
    """What all attempts of a job share.

    loop:     serves the job from before its first attempt to its end
    history:  the attempts that other launchers have made; when the job began
    """

    hidden = frozenset({"environ"})

    environ: Mapping[str, str]
    directory: RunDir
    output: Output
    loop: EventLoop
    guard: Guard
    outside: Outside
    history: JobHistory

    @property
    def started(self) -> float:
        """When the job began, in seconds since the epoch."""
        return self.history.started

    @property
    def clock(self) -> Callable[[], float]:
        """Returns seconds since the epoch."""
        return self.loop.clock
