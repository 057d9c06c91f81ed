"""Small typed stand-ins for what tests pass to the code: modules, frames, channels, devices. mypy checks this file."""

from __future__ import annotations

from dataclasses import dataclass, field
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
