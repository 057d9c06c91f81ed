"""What all attempts of a job share: its run directory, its screen, and whoever follows it from outside."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from msgspec import Struct

from jaxrun.controller.supervisor.job_history import JobHistory
from jaxrun.controller.supervisor.job_server import JobServer
from jaxrun.controller.supervisor.job_terminal import Terminal
from jaxrun.controller.supervisor.notifier import Notifier
from jaxrun.controller.supervisor.train_job_status import TrainJobStatus
from jaxrun.node.agent.guard import Guard
from jaxrun.node.agent.signals import SignalPipe
from jaxrun.protocol.hidden_fields import HidesFields
from jaxrun.records.output.output import Output
from jaxrun.records.rundir.rundir import RunDir


class Outside(Struct, frozen=True):
    """Who talks to the job from outside, and who is told of it.

    server:     tools that ask and follow the job at its socket
    notifier:   the commands of --notify
    train_job:  a TrainJob of Kubernetes
    """

    signals: SignalPipe
    terminal: Terminal
    server: JobServer
    notifier: Notifier
    train_job: TrainJobStatus


class Supervision(HidesFields, frozen=True):
    """What all attempts of a job share.

    clock:    returns seconds since the epoch
    history:  the attempts that other launchers have made; when the job began
    """

    hidden = frozenset({"environ"})

    environ: Mapping[str, str]
    directory: RunDir
    output: Output
    clock: Callable[[], float]
    guard: Guard
    outside: Outside
    history: JobHistory

    @property
    def started(self) -> float:
        """When the job began, in seconds since the epoch."""
        return self.history.started
