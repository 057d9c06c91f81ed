"""The messages between a fork server, which has imported jax, and the process that uses it.

A fork server for the workers of a job answers the agent; each ForkWorker comes with the descriptors FORK_DESCRIPTORS:

    agent                                  fork server
    ConfigureForkServer   ──────────▶      (once)
    Preload               ──────────▶      (before all workers, if at all)
                          ◀──────────      Preloaded
    BeginAttempt          ──────────▶      (where another attempt may follow)
    ForkWorker            ──────────▶
                          ◀──────────      WorkerForked | ForkDeclined

A fork server for the launchers of gangs answers the Python process that has the gangs; each StartLauncher comes with
the descriptors LAUNCHER_DESCRIPTORS, and each LauncherStarted with a descriptor of the process:

    Preload               ──────────▶      (at any time: for later launchers)
    StartLauncher         ──────────▶
                          ◀──────────      LauncherStarted | ForkDeclined
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from jaxrun.protocol.hidden_fields import HidesFields

from .codec import Message, MessageDecoder, message_types


class ConfigureForkServer(HidesFields, Message, frozen=True):
    """What later workers run, and where.

    program:             the words after the runtime in a worker's command
    environment, unset:  how the job's environment differs from the fork server's
    """

    hidden = frozenset({"environment"})

    program: tuple[str, ...]
    environment: Mapping[str, str]
    unset: tuple[str, ...]
    directory: str


class ImportedName(Struct, frozen=True, forbid_unknown_fields=True):
    """A module to import, as in a line of the program.

    name:    "optax" for `import optax`, "flax:nnx,linen" for `from flax import nnx, linen`
    file:    the file with that line; empty if the user named the module
    line:    the line's number
    within:  the `__name__` of that file's module
    in_table: whether it is in the table of packages that are safe to import before the fork
    """

    name: str
    file: str = ""
    line: int = 0
    within: str = "__main__"
    in_table: bool = False

    @property
    def title(self) -> str:
        """The import for people: "optax", "flax (nnx, linen)"."""
        module, _, names = self.name.partition(":")
        return f"{module} ({names.replace(',', ', ')})" if names else module


class Preload(Message, frozen=True):
    """Import what the program will import first, before the workers are forked.

    imports:  in the program's order
    main:     the program's file, as its modules will see it in `__main__`; empty if unknown
    folder:   the directory of the program's own modules; empty if unknown
    by_rank:  variables that will differ by rank, which no module may read before the fork
    """

    imports: tuple[ImportedName, ...]
    main: str = ""
    folder: str = ""
    by_rank: tuple[str, ...] = ()


class Preloaded(Message, frozen=True):
    """The names imported before the fork, the seconds that took, and why the rest is left to the program."""

    names: tuple[str, ...]
    left_out: Mapping[str, str]
    seconds: float


class UnfinishedPreload(Message, frozen=True):
    """What a fork server passes on to its replacement after a module proved unsafe.

    program:   as in ConfigureForkServer
    left_out:  what must not be imported, and why
    """

    program: tuple[str, ...]
    order: Preload
    left_out: Mapping[str, str]


class BeginAttempt(Message, frozen=True):
    """Have a copy of the fork server fork the next `workers` workers; the server itself outlives the attempt."""

    workers: int


class ForkWorker(HidesFields, Message, frozen=True):
    """Fork the worker of this rank, with these variables on top of the fork server's own."""

    hidden = frozenset({"environment"})

    rank: int
    environment: Mapping[str, str]


class WorkerForked(Message, frozen=True):
    """The worker of this rank exists."""

    rank: int
    pid: int


class ForkDeclined(Message, frozen=True):
    """The fork server ends: forking is unsafe here or, if there is a traceback, jax could not be imported."""

    reason: str
    traceback: str


class StartLauncher(HidesFields, Message, frozen=True):
    """Run `jaxrun` with the words `argv` in `directory`, with these variables in place of the fork server's own."""

    hidden = frozenset({"environment"})

    argv: tuple[str, ...]
    directory: str
    environment: Mapping[str, str]
    unset: tuple[str, ...]


class LauncherStarted(Message, frozen=True):
    """The launcher's process exists."""

    pid: int


LAUNCHER_DESCRIPTORS = ("stderr", "control")
FORK_DESCRIPTORS = ("stdin", "stdout", "stderr", "channel", "stacks", "flight")

_ToForkServer = ConfigureForkServer | Preload | BeginAttempt | ForkWorker | StartLauncher
_OfForkServer = Preloaded | UnfinishedPreload | WorkerForked | ForkDeclined | LauncherStarted
ForkServerMessage = _ToForkServer | _OfForkServer


class ForkServerMessageDecoder(MessageDecoder[ForkServerMessage]):
    def __init__(self) -> None:
        super().__init__(message_types(ForkServerMessage))
