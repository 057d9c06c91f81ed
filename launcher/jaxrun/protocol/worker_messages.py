"""What a worker and its agent send each other, in the order of a job's life.

    worker                             agent and head
                        ◀──────────    RankSecret        (from the agent itself, before anything else)
    Hello               ──────────▶    all hellos are compared
                        ◀──────────    StartCoordinator  (to rank 0)
    CoordinatorReady    ──────────▶    (from rank 0: it accepts connections at this address)
                        ◀──────────    Join              (to the others: connect to it now)
    DeviceReport        ──────────▶    all reports are compared with the job
                        ◀──────────    Run
    Call                ──────────▶    (a cross-process call is about to start, or to be compiled first)
                        ◀──────────    Proceed | CallMismatch   (if the call waits for it)
    ThreadFailed        ──────────▶    (a thread of the program died; the program goes on)
    SignalHandlers      ──────────▶    (the program handles SIGINT or SIGTERM itself, or no longer)
    Interrupted         ──────────▶    (KeyboardInterrupt is raised in it)
    MpiImported         ──────────▶    (the program, whose ranks an MPI has started, uses it)
                        ◀──────────    ProfileCalls      (see flight_file.ORDERS_WORD for how it is noticed)
    ProfileEnded        ──────────▶
                        ◀─────────▶    (debugger_messages.py, while it is being debugged)
                        ◀─────────▶    (stop_messages.py, where the program asks whether it should stop)
    Failed | Done       ──────────▶    (the program's end; with --pdb, Failed is answered by a DebuggerDecision)
                        ◀──────────    Exit              (after Done: everybody has finished)

They travel over the socket pair whose descriptor the worker finds in JAXRUN_CHANNEL_FD, and on to the head among the
messages of agent_messages.py. Times are seconds since the epoch on the sender's clock.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from jaxrun.protocol.codec import MessageDecoder, message_types
from jaxrun.protocol.debugger_messages import DebuggerAnswer, DebuggerMessage
from jaxrun.protocol.stop_messages import StopMessageToHead, StopMessageToRank


@dataclass(frozen=True, slots=True)
class Hello:
    """A worker has started (`started_at`) and imported jax; `versions` and `environment` must be alike on all ranks.

    public_key:  of the key that it has made to join by TLS, a compressed point of P-256 in hex; empty if it has none
    """

    rank: int
    host: str
    pid: int
    time: float
    started_at: float
    versions: Mapping[str, str]
    program_hash: str
    environment: Mapping[str, str]
    public_key: str = ""


@dataclass(frozen=True, slots=True)
class RankSecret:
    """The secret by which the ranks of an attempt know each other. Variables would show it to all that log them."""

    token: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Certificate:
    """By which a rank joins with the key of its Hello; `chain` and `ca` are PEM.

    chain:  the rank's own
    ca:     of the authority that has signed those of all ranks
    peers:  how the names (URI) of all ranks begin
    """

    chain: str
    ca: str
    peers: str


@dataclass(frozen=True, slots=True)
class StartCoordinator:
    """Open the coordinator on a free port of `interface` (an address of rank 0's host), with a certificate by TLS."""

    interface: str
    certificate: Certificate | None = None


@dataclass(frozen=True, slots=True)
class CoordinatorReady:
    """Rank 0's coordinator accepts connections at `address` ("host:port").

    master_port:  another port of that host, for the program to listen at (MASTER_PORT); 0 without --torch-env
    """

    rank: int
    address: str
    master_port: int = 0


@dataclass(frozen=True, slots=True)
class Join:
    """Connect to the coordinator at `address` ("host:port"), with a certificate by TLS; it listens.

    `master_port` as in CoordinatorReady.
    """

    address: str
    master_port: int = 0
    certificate: Certificate | None = None


@dataclass(frozen=True, slots=True)
class DeviceReport:
    """What JAX reports once this process has joined; `nonce` is the job id that the coordinator holds.

    cores:  on which it may run, "0-31,64-95"; empty for all of its host
    """

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
    cores: str = ""


@dataclass(frozen=True, slots=True)
class Run:
    """All device reports are as they should be: run the program."""


@dataclass(frozen=True, slots=True)
class Call:
    """A cross-process call is about to start: the first one of a program or, with --lockstep strict, any.

    The first one is sent twice if its program is compiled for it: before that, and after it.

    group:             the ranks that take part, "0-3" or "0,2"
    number:            of the call among those of this group, from 1; 0 for a program that exchanges nothing between
                       the ranks, so that one may run it alone
    program:           its number in the rank's flight recorder
    key:               hash of what must be alike for the ranks to meet: name, shapes, dtypes, shardings, mesh
    code:              hash of the lowered program; empty where it is not known
    name:              as JAX calls it, "jit(step)"
    source_line:       where the user's program made the call, "train.py:88 train_step"
    waits_for_answer:  whether the rank makes the call, or compiles its program, only after a Proceed
    is_compiled:       whether the program is compiled; if not, its key is not known yet and empty, and another Call,
                       with the same number, follows after the compilation
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
    is_compiled: bool = True


@dataclass(frozen=True, slots=True)
class Proceed:
    """All ranks of the group are about to make this same call: make it, or compile its program first."""

    group: str
    number: int


@dataclass(frozen=True, slots=True)
class CallMismatch:
    """The ranks of the group are not about to make the same call: raise DivergenceError with this reason."""

    group: str
    number: int
    reason: str


@dataclass(frozen=True, slots=True)
class ProfileCalls:
    """Take a JAX profile of the calls `first` to `last` of the group; answered by ProfileEnded.

    directory:  where profiles are, for xprof
    session:    the one in it to which this profile belongs
    """

    group: str
    first: int
    last: int
    directory: str
    session: str


@dataclass(frozen=True, slots=True)
class ProfileEnded:
    """The rank has written its profile, of so many bytes; or it has not, for the reason `error`.

    started_at:  when it began to take it; 0.0 if it never did
    last:        the last call in it: the program may end earlier than it was asked for
    is_late:     that the order came too late is the reason
    """

    rank: int
    time: float
    started_at: float
    session: str
    file: str
    bytes: int
    last: int
    error: str
    is_late: bool


@dataclass(frozen=True, slots=True)
class ThreadFailed:
    """A thread of the program ended by an exception, which Python only prints."""

    rank: int
    time: float
    thread: str
    error: str
    traceback: str


@dataclass(frozen=True, slots=True)
class SignalHandlers:
    """Whether the program itself handles SIGINT (`interrupt`) and SIGTERM (`termination`).

    It also handles SIGTERM if it asks JAX whether the job is being preempted.
    """

    rank: int
    interrupt: bool
    termination: bool


@dataclass(frozen=True, slots=True)
class Interrupted:
    """SIGINT has been raised as KeyboardInterrupt in the program."""

    rank: int
    time: float


@dataclass(frozen=True, slots=True)
class MpiImported:
    """The program has imported mpi4py.MPI in a process that an MPI has started."""

    rank: int


class WorkerStage(enum.StrEnum):
    """How far a worker has come."""

    START = "start"
    JOIN = "join"
    PROVE = "prove"  # that its devices are those that the job asks for
    PROGRAM = "program"


@dataclass(frozen=True, slots=True)
class Failed:
    """The worker failed, and ends with `status` right after this.

    stage:      in which it failed
    error:      the exception's type; "SystemExit" for a sys.exit
    message:    the exception's text
    traceback:  with the frames of the user's program only
    waits_for_debugger:  the worker does not end before a DebuggerDecision (--pdb)
    """

    rank: int
    time: float
    stage: WorkerStage
    status: int
    error: str
    message: str
    traceback: str
    notes: tuple[str, ...] = field(default=())
    waits_for_debugger: bool = False


@dataclass(frozen=True, slots=True)
class Done:
    """The program has ended with status 0, its threads and exit handlers too; the worker waits for Exit."""

    rank: int
    time: float


@dataclass(frozen=True, slots=True)
class Exit:
    """All processes are done: end now."""


_AtStart = Hello | CoordinatorReady | DeviceReport
_OfProgram = ThreadFailed | SignalHandlers | Interrupted | MpiImported | Failed | Done
WorkerToAgent = _AtStart | Call | ProfileEnded | DebuggerMessage | StopMessageToHead | _OfProgram
_Answer = Proceed | CallMismatch | DebuggerAnswer | StopMessageToRank
AgentToWorker = RankSecret | StartCoordinator | Join | Run | ProfileCalls | _Answer | Exit
WorkerMessage = WorkerToAgent | AgentToWorker


class WorkerMessageDecoder(MessageDecoder[WorkerMessage]):
    def __init__(self) -> None:
        super().__init__(message_types(WorkerMessage))
