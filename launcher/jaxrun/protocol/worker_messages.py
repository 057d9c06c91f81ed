"""What worker and agent say to each other, in the order of a job's life.

    worker                          agent and head
    Hello            ──────────▶    all hellos are compared
                     ◀──────────    Lead        (rank 0: open the coordinator)
    Listening        ──────────▶    (rank 0: it accepts connections at this address)
                     ◀──────────    Join        (the others: connect to it now)
    Proof            ──────────▶    all proofs are held against the job
                     ◀──────────    Run
    Call             ──────────▶    (a cross-process call is about to start)
                     ◀──────────    (Proceed | OutOfStep, if the call waits for it)
    ThreadFailed     ──────────▶    (a thread of the program died; the program goes on)
    Failed | Done    ──────────▶    the program's end
                     ◀──────────    Leave       (after Done: everybody has finished)

Agent and fork server (one import of jax, then a fork for each worker) speak the same way; a Fork carries the six
descriptors of FORK_DESCRIPTORS beside it:

    ForkSetUp  ──────────▶  fork server    (once, to one that was started before the job was known)
    Fork       ──────────▶
               ◀──────────  Forked | ForkDeclined

The fork server of a Python process with gangs starts launchers, each with a fork server of its own:

    StartLauncher    ──────────▶  fork server  (with the descriptors of LAUNCHER_DESCRIPTORS beside it)
                     ◀──────────  LauncherStarted  (with a descriptor of its process) | ForkDeclined

Times are seconds since the epoch on the sender's clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from jaxrun.protocol.codec import MessageDecoder, message_types


@dataclass(frozen=True, slots=True)
class Hello:
    """A worker has started and imported jax. `versions` and `environment` must be alike on all ranks."""

    rank: int
    host: str
    pid: int
    time: float
    started_at: float
    versions: Mapping[str, str]
    program_hash: str
    environment: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class StartCoordinator:
    """Rank 0 opens the coordinator on a free port of `interface` (an address of its host)."""

    interface: str


@dataclass(frozen=True, slots=True)
class CoordinatorReady:
    """Rank 0's coordinator accepts connections at `address` ("host:port")."""

    rank: int
    address: str


@dataclass(frozen=True, slots=True)
class Join:
    """Connect to the coordinator at `address` ("host:port"); it listens."""

    address: str


@dataclass(frozen=True, slots=True)
class DeviceReport:
    """What JAX itself says once this process has joined; `nonce` is the job id that the coordinator holds."""

    rank: int
    process_index: int
    process_count: int
    local_devices: int
    global_devices: int
    device_kinds: tuple[str, ...]
    platform: str
    nonce: str
    joined_at: float
    time: float


@dataclass(frozen=True, slots=True)
class Run:
    """Every process has proved itself: run the program."""


@dataclass(frozen=True, slots=True)
class Call:
    """A cross-process call is about to start: the first of a program, or any, where it `waits`.

    group:    the ranks that take part, "0-3" or "0,2"
    number:   of the call among those of this group, from 1
    program:  its number in the rank's flight recorder
    key:      hash of what must be alike for the ranks to meet: name, shapes, dtypes, shardings, mesh
    code:     hash of the lowered program; empty where it is not known
    name:     as JAX calls it, "jit(step)"
    place:    where the user's program made the call, "train.py:88 train_step"
    waits:    for Proceed or OutOfStep
    """

    rank: int
    time: float
    group: str
    number: int
    program: int
    key: str
    code: str
    name: str
    source_line: str
    waits_for_answer: bool


@dataclass(frozen=True, slots=True)
class Proceed:
    """All ranks of the group are about to make this same call: make it."""

    group: str
    number: int


@dataclass(frozen=True, slots=True)
class CallMismatch:
    """The ranks of the group are not about to make the same call, for the reason that `text` gives: raise it."""

    group: str
    number: int
    reason: str


@dataclass(frozen=True, slots=True)
class ThreadFailed:
    """A thread of the program ended by an exception, which Python only prints."""

    rank: int
    time: float
    thread: str
    error: str
    traceback: str


@dataclass(frozen=True, slots=True)
class Failed:
    """Last words: the worker ends with `status` right after this.

    `stage` is "start", "join", "prove" or "program"; `error` the exception's type, "SystemExit" for a
    sys.exit; `message` its text; `traceback` holds the frames of the user's program only.
    """

    rank: int
    time: float
    stage: str
    status: int
    error: str
    message: str
    traceback: str
    notes: tuple[str, ...] = field(default=())


@dataclass(frozen=True, slots=True)
class Done:
    """The program has ended with status 0, its threads and exit handlers too; the worker waits for Leave."""

    rank: int
    time: float


@dataclass(frozen=True, slots=True)
class Exit:
    """Every process is done: end now."""


@dataclass(frozen=True, slots=True)
class ConfigureForkServer:
    """The program that the workers will run, how their environment differs from the fork server's, and where to go."""

    program: tuple[str, ...]
    environment: Mapping[str, str]
    unset: tuple[str, ...]
    directory: str


@dataclass(frozen=True, slots=True)
class ForkWorker:
    """Fork the worker of this rank, with these variables on top of the fork server's own."""

    rank: int
    environment: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class WorkerForked:
    """The worker of this rank exists."""

    rank: int
    pid: int


@dataclass(frozen=True, slots=True)
class ForkDeclined:
    """The fork server ends: forking is not safe here, or (then with a traceback) jax could not be imported."""

    reason: str
    traceback: str


@dataclass(frozen=True, slots=True)
class StartLauncher:
    """Run `jaxrun` with the words `argv` in `directory`, with these variables in place of the fork server's own."""

    argv: tuple[str, ...]
    directory: str
    environment: Mapping[str, str]
    unset: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LauncherStarted:
    """It runs, or will in a moment; whether it does is for itself to say."""

    pid: int


LAUNCHER_DESCRIPTORS = ("stderr", "control")
FORK_DESCRIPTORS = ("stdin", "stdout", "stderr", "channel", "stacks", "flight")

WorkerToAgent = Hello | CoordinatorReady | DeviceReport | Call | ThreadFailed | Failed | Done
AgentToWorker = StartCoordinator | Join | Run | Proceed | CallMismatch | Exit
_ForkServer = ConfigureForkServer | ForkWorker | WorkerForked | ForkDeclined | StartLauncher | LauncherStarted
Message = WorkerToAgent | AgentToWorker | _ForkServer


class WorkerMessageDecoder(MessageDecoder[Message]):
    """Decodes all messages of this module."""

    def __init__(self) -> None:
        super().__init__(message_types(Message))
