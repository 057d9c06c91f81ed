"""What the head asks agents about their workers, and the answers: snapshots, flight recorders, programs.

They belong to the messages of agent_messages.py.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from jaxrun.protocol.flight import Flight, ProgramDetails


class SnapshotPurpose(enum.StrEnum):
    """What a snapshot is taken for."""

    SHOW = "show"  # print the stacks
    KEEP = "keep"  # write them to the run directory
    NATIVE = "native"  # the same, with C frames
    TIMEOUT = "timeout"  # --timeout is over
    EARLY_EXIT = "early"  # some ranks have finished: are the others stuck?
    PROGRESS = "progress"  # is there any progress? without stacks
    STALL = "stall"  # is there any progress? with stacks
    LATE = "late"  # ranks were asked to end, and have not
    COMPILE_WAIT = "compile-wait"  # ranks compile a program that others have not come to
    LOCKSTEP = "lockstep"  # only flight recorders, the last calls
    HISTORY = "history"  # only flight recorders, all that they hold
    STRAGGLER = "straggler"  # one rank that comes to calls later than others: where is it?
    PROFILE = "profile"  # only flight recorders, the last calls: which ones are to be profiled?
    OVERVIEW = "overview"  # how far each rank has come, and its vitals: without a signal to any

    @property
    def recorders_only(self) -> bool:
        return self in (SnapshotPurpose.LOCKSTEP, SnapshotPurpose.HISTORY, SnapshotPurpose.PROFILE)


@dataclass(frozen=True, slots=True)
class CallAim:
    """The moment `lead_s` seconds before a rank's next call at this site of its own; at site 0, any moment."""

    site: int
    lead_s: float


@dataclass(frozen=True, slots=True)
class SnapshotRequest:
    """Report what the agent's worker is doing; answered by a SnapshotReply with the same purpose.

    `site` and `lead_s` are those of a CallAim, for SnapshotPurpose.STRAGGLER.
    """

    purpose: SnapshotPurpose
    site: int = 0
    lead_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RankVitals:
    """What a rank uses, and how its host sees it.

    time:          when this was read, in seconds since the epoch on the clock of its host
    cpu_seconds:   user and system time so far, with that of the processes that it has started
    memory_bytes:  of its process that are in memory; 0 where that is not known
    kernel_wait:   what the kernel says that its main thread waits in
    gpu_percent:   for how much of the last moment its GPUs were busy, on average; -1 where that is not known
    gpu_bytes:     of their memory that are used, by whomever; -1 where that is not known
    """

    time: float
    cpu_seconds: float
    memory_bytes: int
    kernel_wait: str
    gpu_percent: float = -1.0
    gpu_bytes: int = -1


@dataclass(frozen=True, slots=True)
class SnapshotReply:
    """What workers are doing, by rank.

    stacks:         what the fault handler wrote
    kernel_waits:   what the kernel says that the main thread waits in
    cpu_seconds:    user and system time so far, with that of the processes that it has started
    bytes_written:  to stdout and stderr
    file_bytes:     that it has read from files and written to them, as far as the kernel counts them
    call_counters:  of its flight recorder, equal as long as it has neither entered, made nor compiled anything
    flights:        what the flight recorder holds
    native_stacks:  stacks with C frames, for SnapshotPurpose.NATIVE
    core_waits:     for how many seconds so far its threads have waited for a core, for SnapshotPurpose.LOCKSTEP
    vitals:         for SnapshotPurpose.OVERVIEW; the flights then hold the last call only
    """

    purpose: SnapshotPurpose
    stacks: Mapping[int, str]
    kernel_waits: Mapping[int, str]
    cpu_seconds: Mapping[int, float]
    bytes_written: Mapping[int, int] = field(default_factory=dict)
    file_bytes: Mapping[int, int] = field(default_factory=dict)
    call_counters: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    flights: Mapping[int, Flight] = field(default_factory=dict)
    native_stacks: Mapping[int, str] = field(default_factory=dict)
    core_waits: Mapping[int, float] = field(default_factory=dict)
    vitals: Mapping[int, RankVitals] = field(default_factory=dict)


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
