"""What goes into the head and what comes out of it: events, actions, the ending of a job. All are values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from jaxrun.diagnosis.worker_outcome import WorkerOutcome
from jaxrun.lockstep.divergence import Divergence
from jaxrun.protocol import Message


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """Seconds: until all have joined, for the whole job, between SIGTERM and SIGKILL, without any sign of life.

    None and 0 are no limit.
    """

    init: float
    job: float | None
    grace: float
    stall: float | None = None


@dataclass(frozen=True, slots=True)
class AgentReport:
    """An agent on some host says what is there, before its worker is started.

    address, head_address:  the two ends of its connection to the head, as it sees them
    directory:              where it was started
    cpus:                   the cores that it may use
    gpu_platform:           "cuda" or "rocm", or empty; the GPUs' names and ids are in the order of their ordinals
    sees_run_dir:           whether it can write to the job's run directory
    """

    rank: int
    size: int
    host: str
    boot_id: str
    pid: int
    time: float
    jaxrun_version: str
    address: str
    head_address: str
    directory: str
    cpus: tuple[int, ...]
    gpu_platform: str
    gpu_names: tuple[str, ...]
    gpu_ids: tuple[str, ...]
    gpu_limit: str
    tpu: bool
    cuda_plugin: bool
    can_write_run_dir: bool


@dataclass(frozen=True, slots=True)
class WorkerSpawned:
    rank: int
    pid: int


@dataclass(frozen=True, slots=True)
class WorkerExited:
    """A worker has been reaped; `status` is negative for a signal."""

    rank: int
    status: int
    crash_dump: str = ""
    stderr_tail: str = ""
    out_of_memory: str = ""


@dataclass(frozen=True, slots=True)
class StartFailed:
    """The workers could not be started at all."""

    text: str
    traceback: str = ""


@dataclass(frozen=True, slots=True)
class AgentLost:
    """The agent of this rank cannot be reached any more, for the reason that `text` gives.

    by_engine: what had started it has ended it, because of another's end
    """

    rank: int
    reason: str
    ended_by_launch_command: bool = False


@dataclass(frozen=True, slots=True)
class LauncherSignalled:
    """The launcher has received a signal."""

    signum: int


@dataclass(frozen=True, slots=True)
class SignalRequested:
    """The process that the launcher works for wants all workers to be sent a signal."""

    signum: int


@dataclass(frozen=True, slots=True)
class FaultRequested:
    """The process that the launcher works for wants this to be done to these ranks; `kind` as in planning/chaos.py."""

    kind: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ParentExited:
    """The process that the launcher works for wants the end of the job, or is gone; `by` says which."""

    reason: str


@dataclass(frozen=True, slots=True)
class FaultNotInjected:
    """A fault of this kind could not be done to this rank, for the reason that `text` gives."""

    rank: int
    kind: str
    reason: str


@dataclass(frozen=True, slots=True)
class AgentSignalled:
    """The agent of this rank was sent a signal, as a scheduler does to all of them at the end of their time."""

    rank: int
    signum: int


@dataclass(frozen=True, slots=True)
class SnapshotReply:
    """By rank: what its fault handler wrote, what the kernel says that it waits in, CPU seconds used, bytes written,
    what its flight recorder holds (as text, see lockstep/flight.py), and for "native" its stack with C frames."""

    purpose: str
    stacks: Mapping[int, str]
    kernel_waits: Mapping[int, str]
    cpu_seconds: Mapping[int, float]
    bytes_written: Mapping[int, int] = field(default_factory=dict)
    flights: Mapping[int, str] = field(default_factory=dict)
    native_stacks: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RecorderSnapshot:
    """What the flight recorder of a rank holds as its program ends, or when it has died."""

    rank: int
    flight: str


@dataclass(frozen=True, slots=True)
class ProgramDetails:
    """The line of text about a program in a rank's flight recorder; empty if there is none."""

    rank: int
    program: int
    details: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = (
    AgentReport
    | WorkerSpawned
    | WorkerExited
    | AgentLost
    | StartFailed
    | LauncherSignalled
    | SignalRequested
    | FaultRequested
    | ParentExited
    | FaultNotInjected
    | AgentSignalled
    | SnapshotReply
    | RecorderSnapshot
    | ProgramDetails
    | Tick
    | Message
)


@dataclass(frozen=True, slots=True)
class StartWorker:
    """What an agent on some host is to start: one worker.

    program:      the words after `python -m jaxrun_runtime`
    environment:  variables to set on top of the agent's own
    log_dir:      where it writes the worker's output; empty if it sends all of it
    shown:        whether it sends what is for the screen
    lockstep:     how the ranks are kept in step
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    host: str
    program: tuple[str, ...]
    environment: Mapping[str, str]
    local_device_ids: tuple[int, ...]
    init_timeout: float
    run_dir: str
    log_dir: str
    show_output: bool
    lockstep: str


@dataclass(frozen=True, slots=True)
class Send:
    ranks: tuple[int, ...]
    message: Message


@dataclass(frozen=True, slots=True)
class SignalRanks:
    ranks: tuple[int, ...]
    signum: int


@dataclass(frozen=True, slots=True)
class InjectFault:
    """Do a fault to these ranks, as if it had come by itself; where that cannot be, it is answered by Spared."""

    ranks: tuple[int, ...]
    kind: str


@dataclass(frozen=True, slots=True)
class TakeSnapshot:
    """Ask the fault handlers; answered by StacksTaken with the same purpose.

    `purpose`: "show" on the screen, "keep" in the run directory, the same with C frames ("native"), or to decide about
    "timeout", "early" exit or "stall".
    For "lockstep" only the flight recorders are read, and for "history" all that they hold.
    """

    ranks: tuple[int, ...]
    purpose: str


RECORDERS_ONLY = ("lockstep", "history")


@dataclass(frozen=True, slots=True)
class ProgramDetailsRequest:
    """Read what the flight recorder of this rank says of a program; answered by Described."""

    rank: int
    program: int


@dataclass(frozen=True, slots=True)
class PrintLine:
    text: str


@dataclass(frozen=True, slots=True)
class WriteFile:
    """Write this file into the run directory."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """How the job ended: the head's last word, from which the verdict is made.

    `divergence`: the first call in which the ranks were seen out of step.
    `reason`: "ok", "failed", "refused", "unavailable", "timeout", "stall", "early-exit", "interrupted" or "preempted".
    """

    reason: str
    workers: tuple[WorkerOutcome, ...]
    text: str = ""
    traceback: str = ""
    stacks: Mapping[int, str] = field(default_factory=dict)
    kernel_waits: Mapping[int, str] = field(default_factory=dict)
    flights: Mapping[int, str] = field(default_factory=dict)
    signum: int = 0
    decided_at: float | None = None
    run_at: float | None = None
    divergence: Divergence | None = None


@dataclass(frozen=True, slots=True)
class Finish:
    outcome: JobOutcome


@dataclass(frozen=True, slots=True)
class Shutdown:
    """To an agent on another host: the job is over, end with this status."""

    status: int


Action = (
    StartWorker
    | Send
    | SignalRanks
    | InjectFault
    | TakeSnapshot
    | ProgramDetailsRequest
    | PrintLine
    | WriteFile
    | Finish
    | Shutdown
)
