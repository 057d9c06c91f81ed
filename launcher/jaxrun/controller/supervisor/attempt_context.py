"""What runs one attempt of a job: made by attempts.py, used by those that serve its agents."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from jaxrun.controller.supervisor.dispatcher import Dispatcher
from jaxrun.controller.supervisor.parent_link import ParentLink
from jaxrun.controller.supervisor.terminal import Terminal
from jaxrun.node.agent.guard import Guard
from jaxrun.node.agent.signals import SignalPipe
from jaxrun.records.output.output import Output
from jaxrun.records.rundir.rundir import RunDir
from jaxrun.spec.job.plan import Plan


@dataclass(frozen=True, slots=True)
class Supervision:
    """What all attempts of a job share; `clock` returns seconds since the epoch."""

    environ: Mapping[str, str]
    directory: RunDir
    output: Output
    signals: SignalPipe
    clock: Callable[[], float]
    guard: Guard
    terminal: Terminal


@dataclass(frozen=True, slots=True)
class AttemptContext(Supervision):
    """What the agents work with during one attempt.

    plan:      of this attempt
    log_dir:   where its logs and flight recorders go, None for nowhere
    parent:    the process that the launcher works for, if it is one that says more than by signals
    """

    plan: Plan
    log_dir: Path | None
    dispatcher: Dispatcher
    parent: ParentLink | None
