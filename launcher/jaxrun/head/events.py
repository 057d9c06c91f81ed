"""What goes into the head and what comes out of it: events, actions, the ending of a job. All are values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from jaxrun.contract import Message
from jaxrun.lockstep.divergence import Divergence
from jaxrun.verdict.ends import End


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds: until all have joined, for the whole job, between SIGTERM and SIGKILL, without any sign of life.

    None and 0 are no limit.
    """

    init: float
    job: float | None
    grace: float
    stall: float | None = None


@dataclass(frozen=True, slots=True)
class Report:
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
    version: str
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
    sees_run_dir: bool


@dataclass(frozen=True, slots=True)
class Spawned:
    rank: int
    pid: int


@dataclass(frozen=True, slots=True)
class Exited:
    """A worker has been reaped; `status` is negative for a signal."""

    rank: int
    status: int
    fatal: str = ""
    tail: str = ""
    out_of_memory: str = ""


@dataclass(frozen=True, slots=True)
class Unavailable:
    """The workers could not be started at all."""

    text: str
    traceback: str = ""


@dataclass(frozen=True, slots=True)
class Lost:
    """The agent of this rank cannot be reached any more, for the reason that `text` gives.

    by_engine: what had started it has ended it, because of another's end
    """

    rank: int
    text: str
    by_engine: bool = False


@dataclass(frozen=True, slots=True)
class Signalled:
    """The launcher has received a signal."""

    signum: int


@dataclass(frozen=True, slots=True)
class SignalAsked:
    """The process that the launcher works for wants all workers to be sent a signal."""

    signum: int


@dataclass(frozen=True, slots=True)
class FaultAsked:
    """The process that the launcher works for wants this to be done to these ranks; `kind` as in planning/chaos.py."""

    kind: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HungUp:
    """The process that the launcher works for wants the end of the job, or is gone; `by` says which."""

    by: str


@dataclass(frozen=True, slots=True)
class Spared:
    """A fault of this kind could not be done to this rank, for the reason that `text` gives."""

    rank: int
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class AgentSignalled:
    """The agent of this rank was sent a signal, as a scheduler does to all of them at the end of their time."""

    rank: int
    signum: int


@dataclass(frozen=True, slots=True)
class StacksTaken:
    """By rank: what its fault handler wrote, what the kernel says that it waits in, CPU seconds used, bytes written,
    what its flight recorder holds (as text, see lockstep/flight.py), and for "native" its stack with C frames."""

    purpose: str
    dumps: Mapping[int, str]
    waits: Mapping[int, str]
    cpu: Mapping[int, float]
    written: Mapping[int, int] = field(default_factory=dict)
    flights: Mapping[int, str] = field(default_factory=dict)
    natives: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Flown:
    """What the flight recorder of a rank holds as its program ends, or when it has died."""

    rank: int
    flight: str


@dataclass(frozen=True, slots=True)
class Described:
    """The line of text about a program in a rank's flight recorder; empty if there is none."""

    rank: int
    program: int
    text: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = (
    Report
    | Spawned
    | Exited
    | Lost
    | Unavailable
    | Signalled
    | SignalAsked
    | FaultAsked
    | HungUp
    | Spared
    | AgentSignalled
    | StacksTaken
    | Flown
    | Described
    | Tick
    | Message
)


@dataclass(frozen=True, slots=True)
class Begin:
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
    shown: bool
    lockstep: str


@dataclass(frozen=True, slots=True)
class Send:
    ranks: tuple[int, ...]
    message: Message


@dataclass(frozen=True, slots=True)
class Kill:
    ranks: tuple[int, ...]
    signum: int


@dataclass(frozen=True, slots=True)
class Inflict:
    """Do a fault to these ranks, as if it had come by itself; where that cannot be, it is answered by Spared."""

    ranks: tuple[int, ...]
    kind: str


@dataclass(frozen=True, slots=True)
class TakeStacks:
    """Ask the fault handlers; answered by StacksTaken with the same purpose.

    `purpose`: "show" on the screen, "keep" in the run directory, the same with C frames ("native"), or to decide about
    "timeout", "early" exit or "stall".
    For "lockstep" only the flight recorders are read, and for "history" all that they hold.
    """

    ranks: tuple[int, ...]
    purpose: str


FLIGHTS_ONLY = ("lockstep", "history")


@dataclass(frozen=True, slots=True)
class Describe:
    """Read what the flight recorder of this rank says of a program; answered by Described."""

    rank: int
    program: int


@dataclass(frozen=True, slots=True)
class Say:
    text: str


@dataclass(frozen=True, slots=True)
class Keep:
    """Write this file into the run directory."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Ending:
    """How the job ended: the head's last word, from which the verdict is made.

    `divergence`: the first call in which the ranks were seen out of step.
    `reason`: "ok", "failed", "refused", "unavailable", "timeout", "stall", "early-exit", "interrupted" or "preempted".
    """

    reason: str
    ends: tuple[End, ...]
    text: str = ""
    traceback: str = ""
    dumps: Mapping[int, str] = field(default_factory=dict)
    waits: Mapping[int, str] = field(default_factory=dict)
    flights: Mapping[int, str] = field(default_factory=dict)
    signum: int = 0
    decided_at: float | None = None
    run_at: float | None = None
    divergence: Divergence | None = None


@dataclass(frozen=True, slots=True)
class Finish:
    ending: Ending


@dataclass(frozen=True, slots=True)
class Dismiss:
    """To an agent on another host: the job is over, end with this status."""

    status: int


Action = Begin | Send | Kill | Inflict | TakeStacks | Describe | Say | Keep | Finish | Dismiss
