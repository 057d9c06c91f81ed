"""The messages between an agent and the head, besides the messages of the worker behind the agent.

    agent                                     head
                          ◀──────────    JobInfo | AgentRefused (right after the handshake, see auth.py)
    AgentConnected        ──────────▶                           (the agent uses this connection, not the others)
    AgentReport           ──────────▶                           (facts about the host, after --host-check)
                                                                    (probe_messages.py, staging_messages.py, if the job
                                                                asks for it)
                          ◀──────────    StartWorkers           (once all agents have reported)
    Preloaded             ──────────▶                           (--preload is done)
    WorkerSpawned         ──────────▶
    FirstOutput, OutputChunk, StreamEnded, AtPrompt ─▶
                          ◀──────────    OutputCredit           (how much more output may be sent)
                          ◀──────────    SignalWorker
    FaultNotInjected      ──────────▶    InjectFault            (answered only if it was not possible)
                          ◀──────────    StartAgain             (answered by WorkerSpawned)
    RankReply             ◀─────────▶    RankQuery
    ProgramDetailsReply   ◀─────────▶    ProgramDetailsRequest
    FlightAtEnd      ──────────▶                           (as the program ends)
    ClockReply            ◀─────────▶    ClockProbe
    AgentSignalled        ──────────▶
    WorkerExited, StartFailed ───────▶
                          ◀──────────    NextAttempt            (this attempt is over, or a waiting agent gets ranks)
    AgentReport           ──────────▶                           (earlier messages belong to the attempt before)
                          ◀──────────    KeepRecord             (with --wait-hosts: for a head that replaces this one)
                          ◀──────────    Shutdown               (the job is over)

An agent has a number (agent_id.py), and ranks that the head assigns; none while it waits on a spare host for
NextAttempt. AgentEvents are about the agent and its host, WorkerEvents about one of its ranks. An AgentOrder is for the
agent; a RankOrder is for all of its ranks or, inside a ToRanks, for some of them.

Messages of worker_messages.py pass in both directions meanwhile. Times are seconds since the epoch on the sender's
clock. With the local backend, agents and head are in one process, and pass each other the values themselves.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping

from msgspec import field

from jaxrun.protocol.agent_id import AgentId
from jaxrun.protocol.bounds import EpochTime, FaultKind, Port, WaitStatus
from jaxrun.protocol.codec import Message
from jaxrun.protocol.env import WorkerEnv
from jaxrun.protocol.forkserver_messages import Preloaded
from jaxrun.protocol.hidden_fields import HidesFields
from jaxrun.protocol.job_record import JobRecord
from jaxrun.protocol.probe_messages import FabricFacts, HostFacts, Machine, PeerResults, ProbePeers
from jaxrun.protocol.query_messages import (
    FlightAtEnd,
    ProgramDetailsReply,
    ProgramDetailsRequest,
    RankQuery,
    RankReply,
)
from jaxrun.protocol.staging_messages import CopyStaged, Stage, StagedCopied
from jaxrun.protocol.worker_messages import AgentToWorker, WorkerToAgent


class HostCheck(HidesFields, frozen=True, forbid_unknown_fields=True):
    """--host-check: a shell command, its time limit in seconds, and variables to add to the agent's own."""

    hidden = frozenset({"environment"})

    command: str
    timeout: float
    environment: Mapping[str, str]


class JobInfo(HidesFields, Message, frozen=True):
    """The properties of the job that the agent's report depends on.

    job_id:     marks the job's processes
    run_dir:    the job's run directory; empty if it leaves no files
    platforms:  the platforms to look for, best first
    restarts:   whether there may be several attempts
    probe:      whether HostFacts must follow the report
    stage:      what must be on each host's disk before the workers start
    environment:  variables that the ranks get and that matter to the report
    host_timeout:  the seconds of silence after which the head's host counts as lost
    closed_port:  a port of the head's host at which nothing listens
    attempt:      the attempt for which the agent reports; 0 on a spare host, which is checked once it has ranks
    host_check:   what to run before each report
    """

    hidden = frozenset({"environment"})

    job_id: str
    run_dir: str
    platforms: tuple[str, ...]
    restarts: bool = False
    probe: bool = False
    stage: Stage | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    host_timeout: float = 2.0
    closed_port: int = 0
    attempt: int = 1
    host_check: HostCheck | None = None


class AgentRefused(Message, frozen=True):
    """The job does not need this agent, and continues without it.

    is_taken:    another agent has its place, so nothing is wrong with this one
    may_return:  the job has no rank for it now, but may have one later
    """

    reason: str
    is_taken: bool = False
    may_return: bool = False


class AgentConnected(Message, frozen=True):
    """The agent uses this connection and closes all others. When it ends, the agent counts as lost.

    record:  of the job in which the agent has lost an earlier head; None if there was none
    """

    agent: AgentId
    host: str
    record: JobRecord | None = None


class KeepRecord(Message, frozen=True):
    """Keep this, in place of an earlier one, for a head that takes the place of this one."""

    record: JobRecord


class AgentReport(Message, frozen=True):
    """Facts about an agent's host, before its workers are started.

    address, head_address:  the two ends of its connection to the head, as the agent sees them
    directory:              the agent's working directory
    machine:                the cores and GPUs that it may use
    can_write_run_dir:      whether the job's run directory is writable on this host
    command:                the program and arguments that a person typed there; empty if an engine started the agent
    attempt:                the attempt that the agent is ready for, if the head has named one
    launch_id:              the engine's name for the processes that it started together: in Slurm, the step of the
                            agent's task, "12.0"; empty if the engine has no such name
    stage_port:             the port at which other hosts can copy what is staged; 0 for none
    fabric:                 what decides by which network NCCL sends; None if no GPUs are visible
    check_failure:          how --host-check failed, "exited with status 3", with the last line of its output
    lacks_environment:      whether the environment of the job is still to be copied to this host; the agent reports
                            again once it is there
    lacks_directory:        whether its workers start in a copy of `directory`, which this host does not have
    simulated_boot_id:      the boot id that its ranks take for their host's, if `host` is simulated; empty if it is not
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
    stage_port: Port = 0
    fabric: FabricFacts | None = None
    check_failure: str = ""
    lacks_environment: bool = False
    lacks_directory: bool = False
    simulated_boot_id: str = ""


class StartWorker(HidesFields, frozen=True, forbid_unknown_fields=True):
    """A worker for an agent to start.

    worker:       its variables, except those that only its host knows
    program:      the words after the runtime in a worker's command
    environment:  variables to set on top of the agent's own
    log_dir:      where the agent writes the worker's output; empty if it sends all of it
    show_output:  whether the agent sends the output for the screen
    fork:         whether the worker may be forked from a process that has imported jax
    wrap:         the words of the command inside which it is started (--wrap)
    preload:      what to import before the fork (--preload)
    """

    hidden = frozenset({"environment"})

    worker: WorkerEnv
    program: tuple[str, ...]
    environment: Mapping[str, str]
    log_dir: str = ""
    show_output: bool = True
    fork: bool = False
    wrap: tuple[str, ...] = ()
    preload: str = "none"


class StartWorkers(Message, frozen=True):
    """Start these workers, one for each of the agent's ranks.

    waits:  the agent has no rank yet: it only starts the process that imports jax and will fork such a worker
    """

    workers: tuple[StartWorker, ...]
    waits: bool = False


class WorkerSpawned(Message, frozen=True):
    """The worker's process exists."""

    rank: int
    pid: int


class StartFailed(Message, frozen=True):
    """Workers could not be started.

    text:       why; a whole sentence if it is not about one worker, or if there is a traceback
    traceback:  of an import that all workers would have shared
    rank:       whose worker, by its agent; None if none of the job's could be
    """

    text: str
    traceback: str = ""
    rank: int | None = None

    @property
    def sentence(self) -> str:
        """What has happened, for people."""
        is_whole = self.rank is None or self.traceback
        return self.text if is_whole else f"rank {self.rank} could not be started: {self.text}"


class WorkerExited(Message, frozen=True):
    """The worker's process has been reaped.

    status:         negative for a signal
    crash_dump:     what its fault handler wrote at a fatal signal
    stderr_tail:    the last lines of its stderr
    out_of_memory:  what the kernel says about its death, if memory was short
    peak_memory_bytes:  the most memory that it was seen to hold, once a second, without what others share; 0 if unknown
    """

    rank: int
    status: WaitStatus
    crash_dump: str = ""
    stderr_tail: str = ""
    out_of_memory: str = ""
    peak_memory_bytes: int = 0


class AgentSignalled(Message, frozen=True):
    """The agent received a signal; a scheduler signals all agents when their time is up."""

    agent: AgentId
    signum: signal.Signals


class OutputChunk(Message, frozen=True):
    """What a worker wrote to its "out" or "err"."""

    rank: int
    stream: str
    data: bytes


class StreamEnded(Message, frozen=True):
    """A worker's "out" or "err" has ended."""

    rank: int
    stream: str


class FirstOutput(Message, frozen=True):
    """The worker has written output for the first time."""

    rank: int


class AtPrompt(Message, frozen=True):
    """The rank with the standard input has begun a line, and may wait now for what a person types."""

    rank: int


class MemoryShortage(Message, frozen=True):
    """The memory of the agent's host, or of its ranks' cgroup, will be full within a minute if it keeps growing.

    rank:       the rank that grows most
    used:       bytes in use
    limit:      bytes available in total
    full_in_s:  seconds until then
    growth:     bytes per second
    growing:    the ranks that cause a large part of the growth; empty if other processes do
    """

    rank: int
    used: int
    limit: int
    full_in_s: float
    growth: float
    growing: tuple[int, ...] = ()


class ForkingDeclined(Message, frozen=True):
    """The agent starts each worker in a fresh interpreter, because the process that imported jax cannot be forked."""

    reason: str


class OutputCredit(Message, frozen=True):
    """This number of bytes of the agent's OutputChunks has been shown or stored: it may send as many more."""

    bytes: int


class SignalWorker(Message, frozen=True):
    """Send this signal to the worker."""

    signum: int


class InjectFault(Message, frozen=True):
    """Inject a fault into the agent's worker; `kind` is one of FAULT_KINDS (job/fault_spec.py)."""

    kind: FaultKind


class StartAgain(Message, frozen=True):
    """Start the worker again, whose process has ended, while the other ranks go on."""


class FaultNotInjected(Message, frozen=True):
    """A fault of this kind could not be injected into this rank, for this reason."""

    rank: int
    kind: FaultKind
    reason: str


class ClockProbe(Message, frozen=True):
    """Report the time on the host's clock; `asked_at` is on the head's clock."""

    asked_at: float


class ClockReply(Message, frozen=True):
    """The time on the clock of the agent's host; `asked_at` is the ClockProbe's."""

    agent: AgentId
    asked_at: EpochTime
    time: EpochTime


class NextAttempt(Message, frozen=True):
    """The attempt is over: end its remaining workers, and report for the attempt of this number.

    `ranks` are the agent's ranks in that attempt. An agent that waits also gets it while that attempt runs.
    """

    attempt: int
    ranks: tuple[int, ...]


class Shutdown(Message, frozen=True):
    """End with this status: the job is over, or continues with other agents.

    headline:  why the job failed, in a sentence; empty if it did not fail, or continues
    leaves:    the host of this agent goes away, and the job continues without it
    """

    status: int
    job_goes_on: bool = False
    headline: str = ""
    leaves: bool = False


AgentEvent = AgentConnected | AgentReport | AgentSignalled | HostFacts | PeerResults | StagedCopied | ClockReply
_OfWorker = WorkerSpawned | WorkerExited | StartFailed | FaultNotInjected
WorkerEvent = _OfWorker | MemoryShortage | RankReply | FlightAtEnd | ProgramDetailsReply
HostTask = ProbePeers | CopyStaged  # done before the workers start
AgentOrder = HostTask | NextAttempt | StartWorkers | ClockProbe | Shutdown
WorkerOrder = InjectFault | StartAgain | RankQuery | ProgramDetailsRequest | AgentToWorker
RankOrder = SignalWorker | WorkerOrder


class ToRanks(Message, frozen=True):
    """An order for some of the agent's ranks only."""

    ranks: tuple[int, ...]
    order: RankOrder


# In the same process or on another host.
AgentMessage = WorkerEvent | FirstOutput | AtPrompt | ForkingDeclined | Preloaded | WorkerToAgent
AgentToHead = AgentEvent | AgentMessage | OutputChunk | StreamEnded
_ForAgent = JobInfo | AgentRefused | KeepRecord | AgentOrder | OutputCredit | NextAttempt | Shutdown
HeadToAgent = _ForAgent | RankOrder | ToRanks
BEAT = OutputCredit(0)  # carries nothing: the acknowledgement of the agent's kernel counts
