"""GangSpec: what a gang is asked to be, and the launcher's command line for that."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jaxrun import RUNTIME
from jaxrun.errors import UsageError
from jaxrun.protocol.flight_file import LOCKSTEP_RECORD

_RANK_PROGRAM = f"{RUNTIME}.gang.connect"
_GRACE_S = 1.0  # between SIGTERM and SIGKILL; a gang that is told to end has nothing to save


def split_options(options: str | Sequence[str]) -> tuple[str, ...]:
    """Return words of jaxrun's command line: those of a sequence as they are, a string split as a shell does it.

    Raises UsageError for anything else.
    """
    try:
        words = shlex.split(options) if isinstance(options, str) else list(options)
    except (TypeError, ValueError) as error:
        raise UsageError(f"options of a gang cannot be split into words ({error}): {options!r}") from None
    if not all(isinstance(word, str) for word in words):
        raise UsageError(f"options of a gang must be strings, such as ['--partition', 'debug'], not {options!r}")
    return tuple(words)


@dataclass(frozen=True, slots=True, kw_only=True)
class GangSpec:
    """None means that jaxrun decides, from the devices that it finds.

    processes, devices:  ranks, and devices of each
    hosts:               simulated ones with the local backend, real ones with the others
    env:                 variables to add to every rank
    options:             more words for jaxrun's command line
    """

    processes: int | None = None
    devices: int | None = None
    hosts: int | None = None
    backend: str = "local"
    platform: str = "auto"
    lockstep: str = LOCKSTEP_RECORD
    env: Mapping[str, str] = field(default_factory=dict)
    options: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("processes", "devices", "hosts"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise UsageError(f"{name} of a gang must be a whole number from 1, not {value!r}")
        if not all(isinstance(part, str) for pair in self.env.items() for part in pair):
            raise UsageError(f"env of a gang must map names to strings, not {dict(self.env)!r}")

    @property
    def may_fork(self) -> bool:
        """Whether the ranks may be forks of a process that has imported jax; the launcher decides whether they are."""
        return self.backend == "local" and self.platform not in ("rocm", "tpu") and "--no-fork" not in self.options

    def for_restart(self) -> GangSpec:
        """The spec of the gang's next start."""
        return self

    def command_line(self, run_dir: Path) -> tuple[str, ...]:
        """The words after `jaxrun`."""
        hosts = "--simulate-hosts" if self.backend == "local" else "--hosts"
        given = (
            ("--backend", self.backend),
            ("--processes", self.processes),
            ("--devices-per-process", self.devices),
            (hosts, self.hosts),
            ("--platform", self.platform),
            ("--lockstep", self.lockstep),
            ("--run-dir", run_dir),
            ("--grace", _GRACE_S),
            ("--stall-timeout", 0),  # a gang may wait for work for days
        )
        words = [str(word) for pair in given if pair[1] is not None for word in pair]
        for name, value in self.env.items():
            words += ["--env", f"{name}={value}"]
        return (*words, *self.options, "-m", _RANK_PROGRAM)

    def __str__(self) -> str:
        size = "" if self.processes is None else f" of {self.processes}"
        devices = "" if self.devices is None else f" x {self.devices} devices"
        where = "" if self.backend == "local" else f" by {self.backend}"
        return f"gang{size}{devices}{where}"
