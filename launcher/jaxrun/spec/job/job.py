"""The request of one command line: a Job has a value for every option, and an invalid one cannot be created.

Everything that depends on the machine, the file system or the environment is decided later, in the plan.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from msgspec import field

from jaxrun.protocol.names import SUBCOMMANDS, WORDS_OF_OTHERS
from jaxrun.protocol.settings import WorkerSettings
from jaxrun.spec.job.combinations import check_combinations
from jaxrun.spec.job.option_declaration import check_values, options_of
from jaxrun.spec.job.option_kinds import AUTO_S
from jaxrun.spec.job.options import (
    FAILURE_GRACE_S,
    GROW_S,
    LEAST_DEFAULT_STALL_S,
    LEAST_STALL_S,
    SIGNAL_GRACE_S,
    JobOptions,
)


class Job(JobOptions, frozen=True, kw_only=True):
    """The request of one command line.

    program:      the path or module name, then its arguments
    env:          variables to add to every worker, --env's and --env-file's among them
    probe_hosts:  first let the agents on other hosts report them, and connect to each other
    """

    hidden = frozenset({"env", "assignments"})

    program: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    probe_hosts: bool = False

    def __post_init__(self) -> None:
        check_values(self)
        check_combinations(self, self.program)

    def command_words(self, without: Collection[str] = ()) -> list[str]:
        """Return the words of a command line, after `jaxrun`, that asks for this job.

        They have each option whose value is not its default, and the program.

        without:  the fields whose options are left out
        """
        words = [
            word
            for field, option in options_of(self)
            if field.name not in ("module", *without) and (value := getattr(self, field.name)) != field.default
            for word in option.words(value)
        ]
        if self.module:
            return [*words, "-m", *self.program]
        # Without this, a program called `list` would be a command of jaxrun.
        is_command = not words and (self.program[0] in SUBCOMMANDS or self.program[0] in WORDS_OF_OTHERS)
        return [*words, *(("--",) if is_command else ()), *self.program]

    @property
    def worker_settings(self) -> WorkerSettings:
        return WorkerSettings(**{name: getattr(self, name) for name in WorkerSettings.__struct_fields__})

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
    def least_learned_stall(self) -> float | None:
        """The least --stall-timeout that is learned from the times between calls; None if none is learned."""
        if self.stall_timeout == AUTO_S:
            return LEAST_STALL_S
        return LEAST_DEFAULT_STALL_S if self.max_restarts and self.stall_timeout is None else None

    @property
    def host_wait(self) -> float:
        """How many seconds the job waits for a lost host, at its full size; 0 if it does not."""
        return self.wait_hosts or 0.0

    @property
    def outlives_hosts(self) -> bool:
        """Whether the job may go on after the loss of a host: with fewer hosts, others, or the ranks that live."""
        return bool(self.spares or self.min_hosts or self.wait_hosts or self.keep_survivors)

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
