"""The messages with which the head queries agents about their workers: stacks, flight recorders, programs.

They belong to the messages of agent_messages.py.
"""

from __future__ import annotations

import enum

from msgspec import Struct, field

from jaxrun.protocol.codec import Message
from jaxrun.protocol.flight import Flight, ProgramDetails
from jaxrun.protocol.nccl_report import NcclReport


class RankDetail(enum.StrEnum):
    """The kind of query to a rank. Only for stacks does the rank get a signal, and the answer takes a moment."""

    PROGRESS = "progress"  # counters: is there any progress?
    VITALS = "vitals"  # how far it has come, and the resources that it uses
    CALLS = "calls"  # its last cross-process calls
    HISTORY = "history"  # all that its flight recorder holds
    STACKS = "stacks"  # Python stacks, with its counters and last calls
    NATIVE_STACKS = "native stacks"  # the same, with C frames
    IDENTITY = "identity"  # its process id in its own namespace, and its host's addresses
    SIGTERM = "sigterm"  # whether JAX has logged that it got SIGTERM
    NCCL = "nccl"  # the report of NCCL's own service about all ranks, if asking is harmless
    NCCL_AT_END = "nccl at the end"  # the same for a job that is about to end: also if asking may crash a rank

    @property
    def needs_signal(self) -> bool:
        return self in (RankDetail.STACKS, RankDetail.NATIVE_STACKS)

    @property
    def has_last_calls(self) -> bool:
        """Whether the answer's flight has the rank's last calls and counters, and not much more."""
        return self is RankDetail.CALLS or self.needs_signal


class RankQuery(Message, frozen=True):
    """A query to a rank. Its agent answers with a RankReply of the same number."""

    number: int
    detail: RankDetail


class ChildProcess(Struct, frozen=True, forbid_unknown_fields=True):
    """A process that a rank has started.

    command:  its command; empty if it has ended, or has the same command as the rank's own program
    status:   as in `subprocess`, negative for a signal, for a process that has ended and was not waited for; None while
              it is alive
    is_fork:  whether it is a fork of the rank, which has copies of the rank's locks
    """

    pid: int
    command: str = ""
    status: int | None = None
    is_fork: bool = False


class RankReply(Message, frozen=True):
    """The state of a rank; fields that were not asked for are empty.

    number:         the RankQuery's; 0 for a rank that has not replied
    time:           of the stacks or the reply, in seconds since the epoch on its host's clock
    stacks:         the output of the fault handler
    native_stacks:  stacks with C frames
    kernel_wait:    the kernel function in which its main thread sleeps, or its ProcessState
    cpu_seconds:    user and system time so far, including the processes that it has started
    core_wait_s:    seconds that its threads have waited for a core so far
    bytes_written:  to stdout and stderr
    file_bytes:     bytes that it has read from files and written to them, as far as the kernel counts them
    call_counters:  of its flight recorder; equal as long as it has not entered, made or compiled anything
    flight:         the content of its flight recorder; for VITALS only the last call
    memory_bytes:   of its process, with shared pages divided among those that share them (PSS); 0 if unknown
    gpu_percent:    share of the last moment in which its GPUs were busy, on average; -1 if unknown
    gpu_bytes:      used memory of its GPUs, by any process; -1 if unknown
    host_memory_bytes, host_memory_limit_bytes:  used memory of its host, or of its cgroup if that is fuller, and how
                    much there is; 0 if unknown
    children:       the processes that it has started, if stacks were asked for
    own_pid:        its process id in its own namespace
    addresses:      the IP addresses of its host
    got_sigterm:    whether its last lines on stderr have JAX's line about SIGTERM
    nccl:           the report of NCCL's own service; None if it was not asked, or has not answered
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
    host_memory_bytes: int = 0
    host_memory_limit_bytes: int = 0
    children: tuple[ChildProcess, ...] = ()
    own_pid: int = 0
    addresses: tuple[str, ...] = ()
    got_sigterm: bool = False
    nccl: NcclReport | None = None


class ProcessState(enum.StrEnum):
    """The kernel's letter for a process that does not answer signals; used in place of the kernel function."""

    STOPPED = "T"  # by a signal
    TRACED = "t"  # by a debugger
    ENDED = "Z"
    DISK = "D"  # waits in the kernel, where no signal reaches it, for a disk, a file server or a driver


class FlightAtEnd(Message, frozen=True):
    """The flight recorder of a rank when its program ends, or after it has died.

    core_wait_s:  seconds that its threads have waited for a core; 0.0 if it has died
    """

    rank: int
    flight: Flight
    core_wait_s: float = 0.0


class ProgramDetailsRequest(Message, frozen=True):
    """Read the flight recorder's details of a program; answered by a ProgramDetailsReply."""

    program: int


class ProgramDetailsReply(Message, frozen=True):
    """The details of a program in a rank's flight recorder, and the rank's last calls."""

    rank: int
    program: int
    details: ProgramDetails
    flight: Flight = field(default_factory=Flight)
