"""GangSpec: the arguments of a gang, and the launcher's command line for it."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec.structs import force_setattr

from jaxrun.errors import UsageError
from jaxrun.protocol.flight_file import LOCKSTEP_RECORD
from jaxrun.protocol.hidden_fields import HidesFields
from jaxrun.protocol.names import RUNTIME
from jaxrun.spec.backends import LOCAL
from jaxrun.spec.job.option_checks import PRELOAD_AUTO, PRELOAD_NONE, check_preload

_RANK_PROGRAM = f"{RUNTIME}.gang"
_OF_LOST_RANKS = ("--keep-survivors", "--max-restarts")  # what a job does that loses a rank
_OF_HOSTS = "mpirun or ssh"  # the launcher chooses
_GRACE_S = 1.0  # between SIGTERM and SIGKILL; a gang that is told to end has nothing to save


class GangSpec(HidesFields, frozen=True):
    """The arguments of Gang, which documents them. Raises UsageError for invalid ones."""

    hidden = frozenset({"env"})

    processes: int | None = None
    devices: int | None = None
    hosts: int | None = None
    backend: str = LOCAL
    platform: str = "auto"
    env: Mapping[str, str] | None = None
    lockstep: str = LOCKSTEP_RECORD
    run_dir: str | os.PathLike[str] | None = None
    options: str | Sequence[str] = ()
    preload: str | Sequence[str] = PRELOAD_AUTO

    def __post_init__(self) -> None:
        for name in ("processes", "devices", "hosts"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise UsageError(f"{name} of a gang must be a whole number from 1, not {value!r}")
        env = dict(self.env or {})
        if not all(isinstance(part, str) for pair in env.items() for part in pair):
            raise UsageError(f"env of a gang must map names to strings, not {env!r}")
        if wrong := [name for name in env if not name or "=" in name]:
            raise UsageError(f"a variable's name must not be empty, nor contain '=': env of a gang has {wrong[0]!r}")
        force_setattr(self, "env", env)
        force_setattr(self, "options", split_options(self.options))
        names = {option.partition("=")[0] for option in self.options}
        if refused := [name for name in _OF_LOST_RANKS if name in names]:
            again = "a gang that loses a rank starts again"
            raise UsageError(f"options of a gang cannot have {refused[0]}: {again}; leave it out")
        if self.backend == LOCAL and any(map(_names_hosts, self.options)):
            force_setattr(self, "backend", _OF_HOSTS)
        force_setattr(self, "preload", _join_modules(self.preload))
        if self.run_dir is not None:
            force_setattr(self, "run_dir", Path(self.run_dir).absolute())

    @property
    def may_fork(self) -> bool:
        """Whether the ranks may be forked from a process that has imported jax; the launcher decides."""
        return self.backend == LOCAL and self.platform not in ("rocm", "tpu") and "--no-fork" not in self.options

    @property
    def interface(self) -> str:
        """The value of --interface, which also selects how ranks reach this process."""
        words = [part for option in self.options for part in option.split("=", 1)]
        return words[words.index("--interface") + 1] if "--interface" in words[:-1] else ""

    @property
    def named_modules(self) -> tuple[str, ...] | None:
        """The modules to import before the fork; None for the main file's leading imports."""
        assert isinstance(self.preload, str)
        if self.preload == PRELOAD_AUTO:
            return None
        return () if self.preload == PRELOAD_NONE else tuple(self.preload.split(","))

    def command_line(self, run_dir: Path, modules: Sequence[str] = ()) -> tuple[str, ...]:
        """Return the launcher's words; `modules` are those that its fork server has to import."""
        hosts = "--simulate-hosts" if self.backend == LOCAL else "--hosts"
        given = (
            ("--backend", None if self.backend == _OF_HOSTS else self.backend),
            ("--processes", self.processes),
            ("--devices-per-process", self.devices),
            (hosts, self.hosts),
            ("--platform", self.platform),
            ("--lockstep", self.lockstep),
            ("--run-dir", run_dir),
            ("--preload", ",".join(modules) or PRELOAD_NONE),
            ("--grace", _GRACE_S),
            ("--stall-timeout", 0),  # a gang may wait for work for days
        )
        words = [str(word) for pair in given if pair[1] is not None for word in pair]
        for name, value in (self.env or {}).items():
            words += ["--env", f"{name}={value}"]
        return (*words, *self.options, "-m", _RANK_PROGRAM)

    def __str__(self) -> str:
        size = "" if self.processes is None else f" of {self.processes}"
        devices = "" if self.devices is None else f" x {self.devices} devices"
        where = "" if self.backend == LOCAL else f" by {self.backend}"
        return f"gang{size}{devices}{where}"


def _names_hosts(word: str) -> bool:
    """Whether this word of jaxrun's command line is an option that names hosts."""
    return word.startswith(("-H", "--host=", "--hostfile")) or word == "--host"


def _join_modules(preload: str | Sequence[str]) -> str:
    """Return the value of --preload. Raises UsageError."""
    joined = preload if isinstance(preload, str) else ",".join(preload) or PRELOAD_NONE
    if wrong := check_preload(joined):
        raise UsageError(f"preload of a gang {wrong}")
    return joined


def split_options(options: str | Sequence[str]) -> tuple[str, ...]:
    """Return words of jaxrun's command line: a sequence unchanged, a string split as in a shell."""
    try:
        words = shlex.split(options) if isinstance(options, str) else list(options)
    except (TypeError, ValueError) as error:
        raise UsageError(f"options of a gang cannot be split into words ({error}): {options!r}") from None
    if not all(isinstance(word, str) for word in words):
        raise UsageError(f"options of a gang must be strings, such as ['--partition', 'debug'], not {options!r}")
    return tuple(words)
