"""The messages between a worker and its agent, in the order of a job's life.

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
    ThreadFailed        ──────────▶    (a thread of the program died; the program continues)
    PoolWorkerDied      ──────────▶    (a worker of a process pool died; the pool continues without its task)
    SignalHandlers      ──────────▶    (the program handles SIGINT or SIGTERM itself, or no longer)
    Interrupted         ──────────▶    (KeyboardInterrupt is raised in it)
    MpiImported         ──────────▶    (the program, whose ranks an MPI has started, uses it)
    PreemptionNotice    ──────────▶    (from rank 0: SIGTERM has come to some rank, which JAX has handled)
                        ◀──────────    ProfileCalls      (flight_file.ORDERS_WORD makes the rank look for it)
    ProfileEnded        ──────────▶
                        ◀─────────▶    (debugger_messages.py, while it is being debugged)
                        ◀─────────▶    (debugpy_messages.py, while an editor debugs it; a signal makes it look for the
                                       first one)
                        ◀─────────▶    (stop_messages.py, if the program asks whether it should stop)
                        ◀─────────▶    (survivor_messages.py, with --keep-survivors)
    Failed | Done       ──────────▶    (the program's end; with --pdb, Failed is answered by a DebuggerDecision)
                        ◀──────────    Exit              (after Done: all ranks have finished)

They travel over the socket pair whose descriptor the worker finds in JAXRUN_CHANNEL_FD, and then to the head among the
messages of agent_messages.py. Times are seconds since the epoch on the sender's clock.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

from msgspec import Struct

from jaxrun.protocol.bounds import AbsolutePath, ExitCode, FileName
from jaxrun.protocol.codec import Message, MessageDecoder, message_types
from jaxrun.protocol.debugger_messages import DebuggerAnswer, DebuggerMessage
from jaxrun.protocol.debugpy_messages import DebugpyFromRank, DebugpyToRank
from jaxrun.protocol.error_chain import BackgroundSave, ErrorChain
from jaxrun.protocol.hidden_fields import HidesFields
from jaxrun.protocol.stop_messages import StopMessageToHead, StopMessageToRank
from jaxrun.protocol.survivor_messages import LiveRanksAsked, SurvivorMessageToRank


class Hello(Message, frozen=True):
    """A worker has started (`started_at`) and imported jax; `versions` and `environment` must be equal on all ranks.

    public_key:  of the key with which it joins by TLS, a compressed point of P-256 in hex; empty if it has none
    refusal:     why its JAX cannot do what the job asks for; empty if it can
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
    refusal: str = ""


class RankSecret(HidesFields, Message, frozen=True):
    """The secret that the ranks of an attempt share. A variable would appear in logs of the environment."""

    hidden = frozenset({"token"})

    token: str


class Certificate(Struct, frozen=True, forbid_unknown_fields=True):
    """The certificate with which a rank joins, for the key of its Hello; `chain` and `ca` are PEM.

    chain:  the rank's own certificate
    ca:     the authority that signed the certificates of all ranks
    peers:  the common beginning of the names (URI) of all ranks
    """

    chain: str
    ca: str
    peers: str


class StartCoordinator(Message, frozen=True):
    """Open the coordinator on a free port of `interface` (an address of rank 0's host), by TLS with a certificate."""

    interface: str
    certificate: Certificate | None = None


class CoordinatorReady(Message, frozen=True):
    """Rank 0's coordinator accepts connections at `address` ("host:port").

    master_port:  another port of that host, for the program to listen at (MASTER_PORT); 0 without --torch-env
    """

    rank: int
    address: str
    master_port: int = 0


class Join(Message, frozen=True):
    """Connect to the coordinator at `address` ("host:port"), by TLS if there is a certificate; it is listening.

    `master_port` as in CoordinatorReady.
    """

    address: str
    master_port: int = 0
    certificate: Certificate | None = None


class DeviceReport(Message, frozen=True):
    """JAX's view after this process has joined; `nonce` is the job id that the coordinator holds.

    cores:  the cores on which it may run, "0-31,64-95"; empty for all cores of its host
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


class Run(Message, frozen=True):
    """All device reports agree with the job: run the program."""


class Call(Message, frozen=True):
    """A cross-process call is about to start: the first one of a program or, with --lockstep strict, any.

    The first one is sent twice if its program is compiled for it: before that, and after it.

    group:             the ranks that take part, "0-3" or "0,2"
    number:            of the call within its group, from 1; 0 for a program that exchanges nothing between the ranks,
                       so a single rank may run it alone
    program:           its number in the rank's flight recorder
    key:               hash of everything that must be equal for the ranks to meet: name, shapes, dtypes, shardings,
                       mesh
    code:              hash of the lowered program; empty if unknown
    name:              as JAX calls it, "jit(step)"
    source_line:       where the user's program made the call, "train.py:88 train_step"
    waits_for_answer:  whether the rank makes the call, or compiles its program, only after a Proceed
    is_compiled:       whether the program is compiled; if not, its key is still unknown and empty, and another Call
                       with the same number follows after the compilation
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


class Proceed(Message, frozen=True):
    """All ranks of the group are about to make this same call: make it, or compile its program first."""

    group: str
    number: int


class CallMismatch(Message, frozen=True):
    """The ranks of the group are about to make different calls: raise DivergenceError with this reason."""

    group: str
    number: int
    reason: str


class ProfileCalls(Message, frozen=True):
    """Take a JAX profile of the calls `first` to `last` of the group; answered by ProfileEnded.

    directory:  the directory of profiles, for xprof
    session:    the session in it to which this profile belongs
    """

    group: str
    first: int
    last: int
    directory: AbsolutePath
    session: FileName


class ProfileEnded(Message, frozen=True):
    """The rank has written its profile, with `nbytes` bytes; or it has not, for the reason `error`.

    started_at:  when the profile began; 0.0 if it never did
    last:        the last call in it: the program may end before the requested call
    is_late:     the order came too late
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


class ThreadFailed(Message, frozen=True):
    """A thread of the program ended by an exception, which Python only prints.

    chain:  the exceptions that led to it, and itself, oldest first; empty if unknown
    save:   the background save that has failed with it, and whose error the program gets at its next call of orbax
    """

    rank: int
    time: float
    thread: str
    error: str
    traceback: str
    chain: ErrorChain = ()
    save: BackgroundSave | None = None


class PoolWorkerDied(Message, frozen=True):
    """A worker of a process pool of the program died while the pool was running.

    status:  as in `subprocess`, negative for a signal; never 0
    """

    rank: int
    time: float
    pid: int
    status: int


class SignalHandlers(Message, frozen=True):
    """Whether the program itself handles SIGINT (`interrupt`) and SIGTERM (`termination`).

    A program that asks JAX whether the job is being preempted also handles SIGTERM; `own_termination`: by a handler of
    its own, which runs even if other ranks have ended.
    """

    rank: int
    interrupt: bool
    termination: bool
    own_termination: bool = False


class Interrupted(Message, frozen=True):
    """SIGINT has been raised as KeyboardInterrupt in the program."""

    rank: int
    time: float


class MpiImported(Message, frozen=True):
    """The program has imported mpi4py.MPI in a process that an MPI has started."""

    rank: int


class PreemptionNotice(Message, frozen=True):
    """One of the ranks was sent SIGTERM, which JAX has handled. `rank` reports it, and need not be that rank."""

    rank: int


class WorkerStage(enum.StrEnum):
    """The stages of a worker."""

    START = "start"
    JOIN = "join"
    PROVE = "prove"  # proves that its devices are as planned
    PROGRAM = "program"


class Failed(Message, frozen=True):
    """The worker failed, and will exit with `status`.

    stage:      the stage in which it failed
    error:      the exception's type; "SystemExit" for a sys.exit
    message:    the exception's text
    traceback:  with the frames of the user's program only
    waits_for_debugger:  the worker does not end before a DebuggerDecision (--pdb)
    chain:      the exceptions that led to it, and itself, oldest first; empty if there is only one
    """

    rank: int
    time: float
    stage: WorkerStage
    status: ExitCode
    error: str
    message: str
    traceback: str
    notes: tuple[str, ...] = ()
    waits_for_debugger: bool = False
    chain: ErrorChain = ()


class Done(Message, frozen=True):
    """The program has ended with status 0, and so have its threads and exit handlers; the worker waits for Exit."""

    rank: int
    time: float


class Exit(Message, frozen=True):
    """All processes are done: end now."""


_AtStart = Hello | CoordinatorReady | DeviceReport
_OfProgram = (
    ThreadFailed | PoolWorkerDied | SignalHandlers | Interrupted | MpiImported | PreemptionNotice | Failed | Done
)
_Debugging = DebuggerMessage | DebugpyFromRank
WorkerToAgent = _AtStart | Call | ProfileEnded | _Debugging | StopMessageToHead | LiveRanksAsked | _OfProgram
_Answer = Proceed | CallMismatch | DebuggerAnswer | StopMessageToRank | SurvivorMessageToRank
AgentToWorker = RankSecret | StartCoordinator | Join | Run | ProfileCalls | DebugpyToRank | _Answer | Exit
WorkerMessage = WorkerToAgent | AgentToWorker


class WorkerMessageDecoder(MessageDecoder[WorkerMessage]):
    def __init__(self) -> None:
        super().__init__(message_types(WorkerMessage))
