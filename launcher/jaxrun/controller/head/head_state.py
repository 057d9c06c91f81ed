"""The state of one attempt to run a job, which the head's state machines share: phase, outcome, limits, timers."""

from __future__ import annotations

import enum
from collections.abc import Hashable, Mapping, Sequence

from msgspec import Struct, field

from jaxrun.analysis.diagnosis.job_end import Completed, End
from jaxrun.analysis.lockstep.straggler import Straggler
from jaxrun.controller.head.consistency import Expected
from jaxrun.controller.head.stop_agreement import StopAgreement
from jaxrun.controller.head.timers import PROGRAM_CLOCKS, Timers
from jaxrun.controller.head.worker_table import WorkerTable
from jaxrun.protocol.agent_id import AgentId
from jaxrun.protocol.flight import Flight
from jaxrun.protocol.flight_file import LOCKSTEP_OFF
from jaxrun.spec.job.fault_spec import FaultSpec

FIRST_PROGRESS_S = 2.0  # until the ranks that the start-up, or the end of the job, waits for are printed
PROGRESS_INTERVAL_S = 1.0  # until they are printed again, if that replaces the line
REPEATED_SIGNAL_S = 0.2  # `timeout` and other wrappers send the same signal both to the process and to its group


class JobPhase(enum.Enum):
    """See the diagram in head.py."""

    STARTING = enum.auto()
    RUNNING = enum.auto()
    LEAVING = enum.auto()
    TERMINATING = enum.auto()
    SETTLING = enum.auto()
    DEBUGGING = enum.auto()
    STOPPING = enum.auto()
    CONCLUDING = enum.auto()
    OVER = enum.auto()


class TimeLimits(Struct, frozen=True):
    """Time limits in seconds; None and 0 mean no limit.

    init:          until all have joined
    job:           for the whole job
    grace:         until SIGKILL, for exit handlers after a failure, and for a rank that Ctrl-C does not reach
    signal_grace:  until SIGKILL, for ranks that were asked to end by SIGTERM or KeyboardInterrupt
    stall:         without progress, until the job is stopped
    learns_stall:  the least `stall` that is learned from the times between calls; None if none is learned
    stall_notice:  without progress, until a notice says who waits for whom
    save:          before the end of `job` and before `ends_at`, for the program to stop by itself
    ends_at:       when a scheduler ends the job, in seconds since the epoch
    unhurried:     no `grace` applies once all programs have ended: commands around the ranks still write their files
    grow:          minimum run time of the program on fewer hosts, before checking for others
    teardown:      until SIGKILL, for ranks that handle SIGTERM, after the failure of another; None for the default
    """

    init: float
    job: float | None
    grace: float
    signal_grace: float
    stall: float | None = None
    stall_notice: float | None = None
    save: float | None = None
    ends_at: float | None = None
    unhurried: bool = False
    grow: float | None = None
    teardown: float | None = None
    learns_stall: float | None = None


class ToldStall(Struct, frozen=True):
    """A stall of which a notice has told, in words: who waits for whom. Times are seconds since the epoch.

    who_waits:  what each rank did, to compare it with a later notice's
    """

    finding: str
    who_waits: Hashable
    progress_at: float
    told_at: float


class HeadOptions(Struct, frozen=True):
    """What a job asks of its head.

    has_other_clocks:  agents are on other hosts, whose clocks may differ from this one's
    chaos:      the faults to inject
    debug:      all ranks wait at first for an editor
    cores:      for all ranks; 0 if nobody wants to know whether they are too few
    keep_survivors:  the job goes on if a rank other than 0 fails
    in_pods:         SIGTERM at an agent says that its pod goes away
    returns:         how many times such ranks are started again, all together, in all attempts
    returns_used:    how many of them earlier attempts have used
    lockstep, no_terminal, requeue, drains, post_mortem:  as in a HeadState
    """

    has_other_clocks: bool = True
    lockstep: str = LOCKSTEP_OFF
    chaos: Sequence[FaultSpec] = ()
    no_terminal: str = ""
    requeue: bool = False
    debug: bool = False
    post_mortem: bool = False
    drains: bool = False
    keep_survivors: bool = False
    in_pods: bool = False
    returns: int = 0
    returns_used: int = 0
    cores: int = 0


class HeadJob(Struct, frozen=True):
    """The job of a head, for one attempt.

    hosts:     the host of each rank, as far as it is known
    agents:    the ranks of each agent
    expected:  the required properties of every worker
    """

    hosts: Mapping[int, str]
    agents: Mapping[AgentId, tuple[int, ...]]
    expected: Expected
    limits: TimeLimits
    options: HeadOptions = HeadOptions()


class HeadState(Struct):
    """The state shared by the head's state machines.

    Only `enter` changes the phase, only `decide` and `refine` the end.

    lockstep:        the value of --lockstep
    no_terminal:     why no rank can have the terminal, to complete "it cannot be debugged: …"; empty if one can
    requeue:         the job is started again after it was told to end, even if it had to be killed
    drains:          SIGTERM at an agent or the launcher says that its pod goes away, and another takes its place
    post_mortem:     the culprit of a failure keeps its frames for an editor (--debug-post-mortem)
    waits_at_start:  all ranks wait before the program's first line for an editor (--debug)
    platform:        of the devices, as all ranks report it; empty until they have joined
    run_at:          when the program started; None if it has not
    flights:         the content of the flight recorders at the last reading, by rank
    straggler:       the rank, or the host, for which the others wait, if there is one
    stall:           what the last notice has told, as long as there is no progress
    stop_requested:  someone asked to stop the job, possibly while it was already ending
    is_terminal_closed:  the job is ending, so no rank gets the terminal any more
    at_prompt:       the ranks that a person debugs in the terminal, or that wait for it
    in_editor:       the ranks that a person debugs from an editor
    drained:         the agents that have got SIGTERM because their pod goes away; 0 for the launcher
    leaving:         the same, of those without which the others go on (--keep-survivors)
    """

    workers: WorkerTable
    limits: TimeLimits
    lockstep: str = LOCKSTEP_OFF
    no_terminal: str = ""
    requeue: bool = False
    drains: bool = False
    post_mortem: bool = False
    waits_at_start: bool = False
    platform: str = ""
    timers: Timers = field(default_factory=Timers)
    run_at: float | None = None
    flights: dict[int, Flight] = field(default_factory=dict)
    straggler: Straggler | None = None
    stall: ToldStall | None = None
    stop_requested: bool = False
    is_terminal_closed: bool = False
    at_prompt: set[int] = field(default_factory=set)
    in_editor: set[int] = field(default_factory=set)
    drained: set[AgentId] = field(default_factory=set)
    leaving: set[AgentId] = field(default_factory=set)
    _stop: StopAgreement | None = None
    _clock_holders: set[Hashable] = field(default_factory=set)
    _phase: JobPhase = JobPhase.STARTING
    _end: End = Completed()
    _decided_at: float | None = None

    @property
    def stop(self) -> StopAgreement:
        """Cooperative stop (`should_stop`): the job runs until the program exits."""
        if self._stop is None:
            self._stop = StopAgreement(self.workers)
        return self._stop

    @property
    def phase(self) -> JobPhase:
        return self._phase

    @property
    def end(self) -> End:
        """Why the job ends, as far as it is known."""
        return self._end

    @property
    def decided_at(self) -> float | None:
        """When that was decided; None as long as the job ends only with its programs."""
        return self._decided_at

    @property
    def is_healthy(self) -> bool:
        """Whether nothing has happened yet that ends the job."""
        return self.phase in (JobPhase.STARTING, JobPhase.RUNNING)

    @property
    def terminal_refusal(self) -> str:
        """Why no rank gets the terminal now; empty if one can."""
        return "the job is being ended" if self.is_terminal_closed else self.no_terminal

    @property
    def debugged(self) -> set[int]:
        """The ranks that a person debugs; meanwhile standing still is not a stall."""
        all_wait = self.waits_at_start and self.phase is not JobPhase.STARTING
        return set(self.workers.hosts) if all_wait else self.at_prompt | self.in_editor

    def hold_clocks(self, now: float, holder: Hashable) -> None:
        """Stop PROGRAM_CLOCKS until all their holders have resumed them."""
        self._clock_holders.add(holder)
        self.timers.hold(now, *PROGRAM_CLOCKS)

    def resume_clocks(self, now: float, holder: Hashable) -> None:
        self._clock_holders.discard(holder)
        if not self._clock_holders:
            self.timers.resume(now, *PROGRAM_CLOCKS)

    def enter(self, phase: JobPhase) -> None:
        """Begin a phase. The timers of the previous one are cancelled, except when the program starts to run."""
        self._phase = phase
        if phase is JobPhase.OVER:
            self.timers.cancel_all()
        elif phase is not JobPhase.RUNNING:
            self.timers.cancel_phase()

    def decide(self, end: End, at: float) -> None:
        """Note why the job ends, and when that was decided."""
        self._end, self._decided_at = end, at

    def refine(self, end: End) -> None:
        """Note more about the end that was decided."""
        self._end = end
