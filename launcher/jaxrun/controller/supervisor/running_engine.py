"""The engine of a job while it runs: its launch command, how that is ended, and what is left of it then."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from jaxrun.controller.supervisor.engine_abort import cancel_step
from jaxrun.controller.supervisor.launch_process import LaunchProcess
from jaxrun.spec.job.plan import LaunchCommand


@dataclass(slots=True)
class RunningEngine:
    """A launch command that was started.

    all_reported:  whether it has started all agents
    has_silent:    whether there may be agents that do not end by themselves
    slurm_step:    the step of its tasks, which outlive an srun that is killed; empty until an agent has reported it
    """

    launch: LaunchProcess
    command: LaunchCommand
    all_reported: bool = False
    has_silent: bool = True
    slurm_step: str = ""

    @property
    def _bears_sigterm(self) -> bool:
        return self.all_reported or self.command.sigterm_at_start

    def ask_to_end(self) -> None:
        """Have the launch command end all that it has started, and itself, and do not wait for it."""
        self.launch.signal(signal.SIGTERM if self._bears_sigterm else signal.SIGKILL)

    def stop(self, *, hurry: bool) -> None:
        """Wait for the end of the launch command, in a `hurry` not for long, and bring it about."""
        self.launch.stop(hurry=hurry, sigterm=self._bears_sigterm)

    def release(self) -> str:
        """Let go of a launch command that was stopped; returns what the user is to be told, if anything."""
        is_srun = self.command.engine == "slurm" and not self.command.attached_to
        was_killed = self.launch.status == -signal.SIGKILL
        self.launch.close()
        return cancel_step(self.slurm_step) if is_srun and was_killed and self.has_silent else ""
