"""What the head asks agents about their workers, and the answers: snapshots, flight recorders, programs.

They belong to the messages of agent_messages.py.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from jaxrun.protocol.flight import Flight, ProgramDetails
from jaxrun.protocol.nccl_report import NcclReport


class RankDetail(enum.StrEnum):
    """What a rank is asked for. Only for stacks does it get a signal, whose answer takes a moment."""

    PROGRESS = "progress"  # counters: is there any progress?
    VITALS = "vitals"  # how far it has come, and what it uses
    CALLS = "calls"  # its last cross-process calls
    HISTORY = "history"  # all that its flight recorder holds
    STACKS = "stacks"  # Python stacks, with its counters and last calls
    NATIVE_STACKS = "native stacks"  # the same, with C frames
    IDENTITY = "identity"  # by what other programs know it: its own process id, and its host's addresses
    NCCL = "nccl"  # what NCCL's own service says of all ranks, where asking is harmless
    NCCL_AT_END = "nccl at the end"  # the same of a job that is about to end: also where asking may crash a rank

    @property
    def needs_signal(self) -> bool:
        return self in (RankDetail.STACKS, RankDetail.NATIVE_STACKS)


@dataclass(frozen=True, slots=True)
class RankQuery:
    """What is the rank doing? Answered by its agent, with a RankReply of the same number."""

    number: int
    detail: RankDetail


@dataclass(frozen=True, slots=True)
class ChildProcess:
    """A process that a rank has started.

    command:  with which it was started; empty for one that has ended, or does what the rank's own program does
    status:   as `subprocess` gives it, negative for a signal, of one that has ended and was not waited for; None while
              it lives
    """

    pid: int
    command: str = ""
    status: int | None = None


@dataclass(frozen=True, slots=True)
class RankReply:
    """What a rank is doing; what was not asked for is empty.

    number:         of the RankQuery; 0 stands for a rank that has not replied
    time:           seconds since the epoch on the clock of its host: of the stacks, or of the reply
    stacks:         what the fault handler wrote
    native_stacks:  stacks with C frames
    kernel_wait:    what the kernel says that its main thread waits in, or its ProcessState
    cpu_seconds:    user and system time so far, with that of the processes that it has started
    core_wait_s:    for how many seconds so far its threads have waited for a core
    bytes_written:  to stdout and stderr
    file_bytes:     that it has read from files and written to them, as far as the kernel counts them
    call_counters:  of its flight recorder, equal as long as it has neither entered, made nor compiled anything
    flight:         what its flight recorder holds; for VITALS the last call only
    memory_bytes:   of its process that are in memory; 0 where that is not known
    gpu_percent:    for how much of the last moment its GPUs were busy, on average; -1 where that is not known
    gpu_bytes:      of their memory that are used, by whomever; -1 where that is not known
    children:       the processes that it has started, with its stacks
    own_pid:        the number by which its process knows itself
    addresses:      the IP addresses of its host
    nccl:           what NCCL's own service says; None where it was not asked, or has not answered
    """

    rank: int
    number: int = 0
    time: float = 0.0
    stacks: str = ""
    native_stacks: str = ""
    kernel_wait: str = ""
    cpu_seconds: float = 0.0
    core_wait_s: float = 0.0
    bytes_written: int = 0
    file_bytes: int = 0
    call_counters: tuple[int, ...] = ()
    flight: Flight = field(default_factory=Flight)
    memory_bytes: int = 0
    gpu_percent: float = -1.0
    gpu_bytes: int = -1
    children: tuple[ChildProcess, ...] = ()
    own_pid: int = 0
    addresses: tuple[str, ...] = ()
    nccl: NcclReport | None = None


class ProcessState(enum.StrEnum):
    """The kernel's letter for a process that does not answer signals: it takes the place of what a thread waits in."""

    STOPPED = "T"  # by a signal
    TRACED = "t"  # by a debugger
    ENDED = "Z"
    DISK = "D"  # waits in the kernel, where no signal reaches it, for a disk, a file server or a driver


@dataclass(frozen=True, slots=True)
class RecorderSnapshot:
    """What the flight recorder of a rank holds as its program ends, or when it has died.

    `core_wait_s`: for how many seconds its threads have waited for a core; 0.0 where it has died.
    """

    rank: int
    flight: Flight
    core_wait_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ProgramDetailsRequest:
    """Read what the flight recorder of the agent's worker says of a program; answered by a ProgramDetailsReply."""

    program: int


@dataclass(frozen=True, slots=True)
class ProgramDetailsReply:
    """What a rank's flight recorder says of a program."""

    rank: int
    program: int
    details: ProgramDetails
