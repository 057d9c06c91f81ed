"""The request of one command line: a Job has a value for every option, and an invalid one cannot be created.

Everything that depends on the machine, the file system or the environment is decided later, in the plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from jaxrun.protocol.settings import WorkerSettings
from jaxrun.spec.job.combinations import check_combinations
from jaxrun.spec.job.option_declaration import check_values
from jaxrun.spec.job.options import FAILURE_GRACE_S, GROW_S, SIGNAL_GRACE_S, JobOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Job(JobOptions):
    """The request of one command line.

    program:       the path or module name, then its arguments
    env:           variables to add to every worker
    placement:     the host of each rank, if it is already decided, after the loss of a host
    spare_hosts:   the spare hosts that are left then
    excluded:      the hosts that must not be used, with the reasons
    probe_hosts:   first let the agents on other hosts report them, and connect to each other
    """

    program: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    placement: tuple[str, ...] = ()
    spare_hosts: tuple[str, ...] = ()
    excluded: Mapping[str, str] = field(default_factory=dict)
    probe_hosts: bool = False

    def __post_init__(self) -> None:
        check_values(self)
        check_combinations(self, self.program)

    @property
    def worker_settings(self) -> WorkerSettings:
        return WorkerSettings(**{each.name: getattr(self, each.name) for each in fields(WorkerSettings)})

    @property
    def why_no_fork(self) -> str:
        """Why each rank needs a fresh interpreter, on any platform; empty if ranks may be forked."""
        return self.no_fork or (f"--wrap starts each rank inside {self.wrap[0]}" if self.wrap else "")

    @property
    def failure_grace(self) -> float:
        return FAILURE_GRACE_S if self.grace is None else self.grace

    @property
    def signal_grace(self) -> float:
        return max(SIGNAL_GRACE_S, self.save_time or 0.0) if self.grace is None else self.grace

    @property
    def grow_after(self) -> float | None:
        """The minimum duration of an attempt on fewer hosts; None if it is never stopped to use more hosts."""
        return ((GROW_S if self.grow is None else self.grow) or None) if self.max_restarts else None

    @property
    def host_wait(self) -> float:
        """How many seconds the job waits for a lost host, at its full size; 0 if it does not."""
        return self.wait_hosts or 0.0

    @property
    def name(self) -> str:
        """The program's file or module without path and suffix: "train" for "src/train.py"."""
        from pathlib import PurePath

        return self.program[0].rpartition(".")[2] if self.module else PurePath(self.program[0]).stem

    def shows(self, rank: int) -> bool:
        """Whether the screen shows the output of `rank`."""
        if self.only_ranks:
            return any(rank in ranks for ranks in self.only_ranks)
        return not any(rank in ranks for ranks in self.quiet_ranks)
