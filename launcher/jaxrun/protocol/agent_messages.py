"""What an agent and the head send each other, besides what the worker behind the agent sends and receives.

    agent                                     head
                          ◀──────────    JobInfo | AgentRefused (right after the handshake, see auth.py)
    AgentConnected        ──────────▶                           (of several connections, this is the one)
    AgentReport           ──────────▶                           (what is there, after --host-check)
                                                                (probe_messages.py, staging.py, where the job
                                                                asks for it)
                          ◀──────────    StartWorkers           (once all agents have reported)
    Preloaded             ──────────▶                           (of --preload)
    WorkerSpawned         ──────────▶
    FirstOutput, OutputChunk, StreamEnded ─▶
                          ◀──────────    OutputCredit           (how much more output may be sent)
                          ◀──────────    SignalWorker
    FaultNotInjected      ──────────▶    InjectFault            (answered only if it was not possible)
    RankReply             ◀─────────▶    RankQuery
    ProgramDetailsReply   ◀─────────▶    ProgramDetailsRequest
    RecorderSnapshot      ──────────▶                           (as the program ends)
    ClockReply            ◀─────────▶    ClockProbe
    AgentSignalled        ──────────▶
    WorkerExited, StartFailed ───────▶
                          ◀──────────    NextAttempt            (this attempt is over, or the agent waits no more)
    AgentReport           ──────────▶                           (all before it belongs to the earlier attempt)
                          ◀──────────    Shutdown               (the job is over)

An agent has a number (agent_id.py) and any number of ranks, as the head says; none while it waits on a spare host for
NextAttempt. AgentEvents are about the agent and its host, WorkerEvents about one of its ranks. An AgentOrder is for the
agent; a RankOrder is for all of its ranks, or inside a ToRanks for some of them.

Messages of worker_messages.py pass in both directions all the while. Times are seconds since the epoch on the sender's
clock. With the local backend, agent and head are one process, and hand each other the same values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from jaxrun.protocol.agent_id import AgentId
from jaxrun.protocol.codec import ANY_MESSAGE
from jaxrun.protocol.env import WorkerEnv
from jaxrun.protocol.forkserver_messages import Preloaded
from jaxrun.protocol.probe_messages import FabricFacts, HostFacts, Machine, PeerResults, ProbePeers
from jaxrun.protocol.snapshot_messages import (
    ProgramDetailsReply,
    ProgramDetailsRequest,
    RankQuery,
    RankReply,
    RecorderSnapshot,
)
from jaxrun.protocol.staging_messages import CopyStaged, Stage, StagedCopied
from jaxrun.protocol.worker_messages import AgentToWorker, WorkerToAgent


@dataclass(frozen=True, slots=True)
class HostCheck:
    """--host-check: the command of a shell, its time limit in seconds, and variables beside the agent's own."""

    command: str
    timeout: float
    environment: Mapping[str, str] = field(repr=False)


@dataclass(frozen=True, slots=True)
class JobInfo:
    """What job this is, and what the agent's report depends on.

    job_id:     by which its processes are known
    run_dir:    the job's run directory; empty where it leaves no files
    platforms:  those to look for, best first
    restarts:   whether there may be several attempts
    probe:      whether HostFacts are to follow the report
    stage:      what is to be on each host's disk before the workers start
    environment:  variables that the ranks get and that matter to the report
    host_timeout:  the seconds of silence after which the head's host counts as lost
    closed_port:  of the head's host, at which nothing listens
    attempt:      for which the agent reports; 0 where it waits on a spare host, which is checked once it has ranks
    host_check:   what is to be run before each report
    """

    job_id: str
    run_dir: str
    platforms: tuple[str, ...]
    restarts: bool = False
    probe: bool = False
    stage: Stage | None = None
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    host_timeout: float = 2.0
    closed_port: int = 0
    attempt: int = 1
    host_check: HostCheck | None = None


@dataclass(frozen=True, slots=True)
class AgentRefused:
    """The job has no use for this agent, and goes on without it.

    is_taken:  another agent has its place, so that nothing is wrong with this one
    """

    reason: str
    is_taken: bool = False


@dataclass(frozen=True, slots=True)
class AgentConnected:
    """The agent uses this connection, and closes all others that it has begun. From now on its end is the agent's."""

    agent: AgentId
    host: str


@dataclass(frozen=True, slots=True)
class AgentReport:
    """What is there on an agent's host, before its worker is started.

    address, head_address:  the two ends of its connection to the head, as the agent sees them
    directory:              the agent's working directory
    machine:                the cores and GPUs that it may use
    can_write_run_dir:      whether the job's run directory is writable on this host
    command:                the program and arguments that a person has typed there; empty where an engine started it
    attempt:                the attempt that the agent is ready for, if it has been told of one
    launch_id:              by which its engine knows the processes that it has started together; in Slurm the step
                            of which the agent is a task, "12.0"; empty where the engine has no such name
    stage_port:             where it gives others what is staged; 0 for nowhere
    fabric:                 what decides by which network NCCL sends; None where no GPUs are seen
    check_failure:          how --host-check has failed, "exited with status 3", with the last line of its output
    """

    agent: AgentId
    size: int
    host: str
    boot_id: str
    pid: int
    time: float
    jaxrun_version: str
    address: str
    head_address: str
    directory: str
    machine: Machine
    can_write_run_dir: bool
    command: tuple[str, ...] = ()
    attempt: int = 1
    launch_id: str = ""
    stage_port: int = 0
    fabric: FabricFacts | None = None
    check_failure: str = ""


@dataclass(frozen=True, slots=True)
class StartWorker:
    """A worker that an agent is to start.

    worker:       what it is told by its environment, but for what its host alone knows
    program:      the words after the runtime in a worker's command
    environment:  variables to set on top of the agent's own
    log_dir:      where the agent writes the worker's output; empty if it sends all of it
    show_output:  whether the agent sends what is for the screen
    fork:         whether it may be forked from a process that has imported jax
    wrap:         the words of the command inside which it is started (--wrap)
    preload:      what is imported before the fork (--preload)
    """

    worker: WorkerEnv
    program: tuple[str, ...]
    environment: Mapping[str, str] = field(repr=False)
    log_dir: str = ""
    show_output: bool = True
    fork: bool = False
    wrap: tuple[str, ...] = ()
    preload: str = "none"


@dataclass(frozen=True, slots=True)
class StartWorkers:
    """Start these workers, one for each of the agent's ranks.

    waits:  the agent has no rank yet: it only starts the process that imports jax, from which such a worker is forked
    """

    workers: tuple[StartWorker, ...]
    waits: bool = False


@dataclass(frozen=True, slots=True)
class WorkerSpawned:
    """The worker's process exists."""

    rank: int
    pid: int


@dataclass(frozen=True, slots=True)
class StartFailed:
    """The workers could not be started at all."""

    text: str
    traceback: str = ""


@dataclass(frozen=True, slots=True)
class WorkerExited:
    """The worker's process has been reaped.

    status:         negative for a signal
    crash_dump:     what its fault handler wrote at a fatal signal
    stderr_tail:    the last lines of its stderr
    out_of_memory:  what the kernel says of its death, where it says that memory was short
    """

    rank: int
    status: int
    crash_dump: str = ""
    stderr_tail: str = ""
    out_of_memory: str = ""


@dataclass(frozen=True, slots=True)
class AgentSignalled:
    """The agent was sent a signal, as a scheduler does to all of them at the end of their time."""

    agent: AgentId
    signum: int


@dataclass(frozen=True, slots=True)
class OutputChunk:
    """What a worker wrote to its "out" or "err"."""

    rank: int
    stream: str
    data: bytes


@dataclass(frozen=True, slots=True)
class StreamEnded:
    """A worker's "out" or "err" has ended."""

    rank: int
    stream: str


@dataclass(frozen=True, slots=True)
class FirstOutput:
    """The worker has written for the first time."""

    rank: int


@dataclass(frozen=True, slots=True)
class MemoryShortage:
    """The memory of the agent's host, or of its ranks' cgroup, will be full within a minute at its present growth.

    rank:       the rank that grows most
    used:       bytes in use
    limit:      bytes that there are
    full_in_s:  seconds until then
    growth:     bytes per second
    growing:    the ranks that account for a good part of the growth; none where other processes grow
    """

    rank: int
    used: int
    limit: int
    full_in_s: float
    growth: float
    growing: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ForkingDeclined:
    """The agent starts each worker in an interpreter of its own: the process that has imported jax cannot be forked."""

    reason: str


@dataclass(frozen=True, slots=True)
class OutputCredit:
    """So many bytes of the agent's OutputChunks have been shown or kept: it may send as many more."""

    bytes: int


@dataclass(frozen=True, slots=True)
class SignalWorker:
    """Send this signal to the worker."""

    signum: int


@dataclass(frozen=True, slots=True)
class InjectFault:
    """Do a fault to the agent's worker, as if it had come by itself; `kind` as in job/fault_spec.py."""

    kind: str


@dataclass(frozen=True, slots=True)
class FaultNotInjected:
    """A fault of this kind could not be done to this rank, for this reason."""

    rank: int
    kind: str
    reason: str


@dataclass(frozen=True, slots=True)
class ClockProbe:
    """Report what the host's clock says; `asked_at` is on the head's clock."""

    asked_at: float


@dataclass(frozen=True, slots=True)
class ClockReply:
    """What the clock of the agent's host said; `asked_at` is the ClockProbe's."""

    agent: AgentId
    asked_at: float
    time: float


@dataclass(frozen=True, slots=True)
class NextAttempt:
    """The attempt is over: the agent ends what is left of it, and reports for the attempt of this number.

    In that it has these ranks.
    """

    attempt: int
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Shutdown:
    """The agent ends with this status: the job is over, or goes on with other agents.

    headline:  why the job failed, in a sentence; empty if it did not, or goes on
    """

    status: int
    job_goes_on: bool = False
    headline: str = ""


AgentEvent = AgentConnected | AgentReport | AgentSignalled | HostFacts | PeerResults | StagedCopied | ClockReply
_OfWorker = WorkerSpawned | WorkerExited | StartFailed | FaultNotInjected
WorkerEvent = _OfWorker | MemoryShortage | RankReply | RecorderSnapshot | ProgramDetailsReply
HostTask = ProbePeers | CopyStaged  # before the workers start
AgentOrder = HostTask | StartWorkers | ClockProbe
WorkerOrder = InjectFault | RankQuery | ProgramDetailsRequest | AgentToWorker
RankOrder = SignalWorker | WorkerOrder


@dataclass(frozen=True, slots=True)
class ToRanks:
    """An order for some of the agent's ranks only."""

    ranks: tuple[int, ...]
    order: RankOrder = field(metadata=ANY_MESSAGE)


AgentMessage = WorkerEvent | FirstOutput | ForkingDeclined | Preloaded | WorkerToAgent  # wherever the head is
AgentToHead = AgentEvent | AgentMessage | OutputChunk | StreamEnded
HeadToAgent = JobInfo | AgentRefused | AgentOrder | RankOrder | ToRanks | OutputCredit | NextAttempt | Shutdown
BEAT = OutputCredit(0)  # says nothing: what counts is that the agent's kernel confirms it
