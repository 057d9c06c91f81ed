"""Small typed stand-ins for what tests pass to the code: modules, frames, channels, devices. mypy checks this file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any


def fake_module(name: str, **members: object) -> ModuleType:
    """A module with these members."""
    made = ModuleType(name)
    vars(made).update(members)
    return made


@dataclass
class Code:
    """Code of which only the file is known."""

    co_filename: str


@dataclass
class Frame:
    """A frame at a line of a file."""

    f_code: CodeType | Code
    f_lineno: int
    f_back: Frame | None = None
    f_lasti: int = 0


@dataclass
class Channel:
    """A channel whose messages are kept; with an `error`, to send raises it."""

    error: Exception | None = None
    sent: list[object] = field(default_factory=list)

    def send(self, message: object) -> None:
        if self.error is not None:
            raise self.error
        self.sent.append(message)


@dataclass
class Screen:
    """Output of ranks that is kept, and a terminal that may take no more for now."""

    congested: bool = False
    written: list[tuple[int, str, bytes]] = field(default_factory=list)

    def write(self, rank: int, stream: str, data: bytes) -> None:
        self.written.append((rank, stream, data))


@dataclass
class Device:
    """A device of JAX."""

    process_index: int = 0
    id: int = 0
    slice_index: int = 0


@dataclass
class Mesh:
    """A mesh of JAX: an array of devices, with a name and a length for each axis."""

    devices: Any
    axis_names: tuple[str, ...]
    shape: dict[str, int]


@dataclass
class RankWorker:
    """What a gang knows of a rank."""

    host: str = "h0"
    platform: str = "cpu"


@dataclass
class Argument:
    """An argument of a program, as JAX describes it."""

    shape: tuple[int, ...]
    dtype: str


@dataclass
class Sharding:
    """A sharding of JAX whose memory is not the device's own."""

    spec: object
    memory_kind: str


@dataclass
class FollowedJob:
    """A job that `jaxrun top` shows."""

    run_dir: Path
    is_running: bool = True


@dataclass
class Shell:
    """IPython's shell: the variables of its user."""

    user_ns: dict[str, object]


@dataclass
class EndedCall:
    """A call of a gang that has failed."""

    failures: list[Any]
    interrupted: tuple[int, ...] = ()
    outcomes: list[int] = field(default_factory=list)
    running: tuple[int, ...] = ()
    disconnected: tuple[int, ...] = ()
    waiting: str = ""
    lost_state: str = ""


@dataclass
class HloModule:
    """A compiled module of XLA."""

    content: object

    def to_string(self) -> str:
        return str(self.content)


@dataclass
class Program:
    """A lowered program: its code, and the outside functions that it calls."""

    code: bytes
    calls: set[str]


class CompileOptions:
    """XLA's options of a compilation."""

    device_assignment = None

    def SerializeAsString(self) -> bytes:  # as XLA calls it
        return b"options"


@dataclass
class PytestConfig:
    """What pytest was told of one option."""

    option: str
    given: object
    ini: object

    def getoption(self, name: str) -> object:
        assert name == self.option
        return self.given

    def getini(self, name: str) -> object:
        assert name == self.option
        return self.ini


@dataclass
class SessionCall:
    """The call of a gang in which the sessions of its ranks run."""

    receive: Callable[..., object]
    disconnected: set[int] = field(default_factory=set)

    def send(self, *_: object) -> None:
        """Nobody receives it."""


class SessionGang:
    """The gang of such a call."""

    fault = None

    def stacks(self) -> str:
        return "ranks are there"


@dataclass
class BrokenFinder:
    """A finder of modules that raises."""

    error: Exception

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        raise self.error


@dataclass
class NotingAgent:
    """An agent that notes what it is told to do."""

    note: Callable[[object], None]

    def start(self) -> None:
        self.note("start")

    def execute(self, ranks: object, order: object) -> None:
        self.note((ranks, order))

    def signal_all(self, signum: int) -> None:
        self.note(signum)


@dataclass
class NotingRelay:
    """A relay of output that notes the credit that it gets."""

    note: Callable[[object], None]

    def flush_due(self) -> None:
        """Nothing waits."""

    def add_credit(self, nbytes: int) -> None:
        self.note(nbytes)
