"""The state of one attempt to run a job, which the head's state machines share: phase, outcome, time limits."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from jaxrun.analysis.diagnosis.outcome import EndReason, JobOutcome
from jaxrun.analysis.lockstep.straggler import Straggler
from jaxrun.controller.head.stop_agreement import StopAgreement
from jaxrun.controller.head.worker_table import WorkerTable
from jaxrun.protocol.flight import Flight
from jaxrun.protocol.flight_file import LOCKSTEP_OFF

FIRST_PROGRESS_S = 2.0  # until the ranks that the start-up, or the end of the job, waits for are printed
PROGRESS_INTERVAL_S = 1.0  # until they are printed again, where that replaces the line


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


class Timeout(enum.Enum):
    """Where several have expired together, they are handled in this order."""

    STARTUP = enum.auto()  # --init-timeout: not all ranks have joined
    PROGRESS = enum.auto()  # the start-up, or the end, takes long: print which ranks it waits for
    SETTLE = enum.auto()  # after a failure: the failures that came with it have arrived
    ROOT_CAUSE = enum.auto()  # after a failure: the cause of what was only a consequence has not come
    INTERRUPT = enum.auto()  # after Ctrl-C: KeyboardInterrupt should have been raised in all ranks
    GRACE = enum.auto()  # --grace: workers that were asked to end have not
    KILL = enum.auto()  # workers that are late have been sent SIGTERM
    UNANSWERED = enum.auto()  # workers were killed, but nobody has reported their end
    CONCLUDE = enum.auto()  # all workers have ended, but what their flight recorders hold has not come
    JOB = enum.auto()  # --timeout
    TIME_LIMIT_NEAR = enum.auto()  # --save-time: ask the program to stop
    STALL_CHECK = enum.auto()  # --stall-timeout, --stall-notice: is there any progress?
    EARLY_EXIT_CHECK = enum.auto()  # some ranks have finished: do the others wait for them?
    DIVERGENCE_CHECK = enum.auto()  # do the flight recorders agree?
    GROW = enum.auto()  # --grow: are there more hosts again?


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """Seconds; None and 0 are no limit.

    init:          until all have joined
    job:           for the whole job
    grace:         until SIGKILL, for exit handlers after a failure, and for a rank that Ctrl-C does not reach
    signal_grace:  until SIGKILL, for ranks that were asked to end, by SIGTERM or KeyboardInterrupt
    stall:         without progress, until the job is stopped
    stall_notice:  without progress, until people are told who waits for whom
    save:          before the end of `job` and before `ends_at`, for the program to stop by itself
    ends_at:       when a scheduler ends the job, in seconds since the epoch
    unhurried:     once all programs have ended, no `grace` holds: commands around the ranks still write their files
    grow:          of the program on fewer hosts, until others are looked for
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

    def at_start(self, now: float) -> dict[Timeout, float]:
        """What runs from the start of the job on, `now`, and when it expires."""
        timeouts = {Timeout.STARTUP: now + self.init, Timeout.PROGRESS: now + FIRST_PROGRESS_S}
        if self.job is not None:
            timeouts[Timeout.JOB] = now + self.job
        near = self.near(timeouts.get(Timeout.JOB))
        return timeouts if near is None else {**timeouts, Timeout.TIME_LIMIT_NEAR: near}

    def near(self, job_ends_at: float | None) -> float | None:
        """When the program is asked to stop by itself, if `job` is over at this time; None if it never is."""
        ends = [at for at in (job_ends_at, self.ends_at) if at is not None]
        return min(ends) - self.save if self.save is not None and ends else None


def grace_timeouts(now: float, grace: float) -> dict[Timeout, float]:
    """What runs once ranks are to end within `grace` seconds."""
    return {Timeout.GRACE: now + grace, Timeout.PROGRESS: now + FIRST_PROGRESS_S}


class JobTimeouts:
    def __init__(self) -> None:
        self._at: dict[Timeout, float] = {}
        self._held: dict[Timeout, float] = {}  # seconds that are left

    def start(self, timeout: Timeout, at: float) -> None:
        """Let `timeout` expire at this time, in place of an earlier or later one."""
        self._at[timeout] = at

    def advance(self, timeout: Timeout, at: float) -> None:
        """Let `timeout` expire at this time if it would later."""
        self._at[timeout] = min(at, self._at.get(timeout, at))

    def at(self, timeout: Timeout) -> float | None:
        return self._at.get(timeout)

    def cancel(self, *timeouts: Timeout) -> None:
        for timeout in timeouts:
            self._at.pop(timeout, None)

    def start_only(self, timeouts: Mapping[Timeout, float]) -> None:
        """Of all timeouts let only these run."""
        self._at, self._held = dict(timeouts), {}

    def hold(self, now: float, *timeouts: Timeout) -> None:
        """Let these, as far as they run, stand still until `resume`."""
        for timeout in timeouts:
            if timeout in self._at:
                self._held[timeout] = self._at.pop(timeout) - now

    def resume(self, now: float) -> None:
        for timeout, seconds in self._held.items():
            self._at[timeout] = now + seconds
        self._held.clear()

    def postpone(self, seconds: float) -> None:
        self._at = {timeout: at + seconds for timeout, at in self._at.items()}

    def deadline(self) -> float | None:
        return min(self._at.values(), default=None)

    def pop_expired(self, now: float) -> Timeout | None:
        """One timeout that has expired, which then runs no more."""
        for timeout in Timeout:
            if timeout in self._at and self._at[timeout] <= now:
                del self._at[timeout]
                return timeout
        return None


@dataclass(slots=True)
class HeadState:
    """What the head's state machines share. `enter` alone changes the phase, `decide` alone sets the outcome.

    lockstep:        of --lockstep
    no_terminal:     why no rank can have the terminal, to complete "it cannot be debugged: …"; empty if one can
    platform:        of the devices, as all ranks report it; empty until they have joined
    requeue:         the job is started again after it was told to end, even where it had to be killed
    run_at:          when the program was started; None if it was not
    flights:         what the flight recorders held when they were last read, by rank
    straggler:       the rank, or the host, for which the others wait, if there is one
    stop_requested:  somebody has asked for the end of the job, be it that it was ending already
    is_near_told:    TIME_LIMIT_NEAR has expired, once and for all
    is_terminal_closed:  the job is being ended, so no rank gets the terminal any more
    debugged:        the ranks that a person debugs: that the job stands still meanwhile is no stall
    stop:            how the program is asked to stop by itself, which is no end of the job yet
    """

    workers: WorkerTable
    limits: TimeLimits
    lockstep: str = LOCKSTEP_OFF
    no_terminal: str = ""
    requeue: bool = False
    platform: str = ""
    timeouts: JobTimeouts = field(default_factory=JobTimeouts)
    run_at: float | None = None
    flights: dict[int, Flight] = field(default_factory=dict)
    straggler: Straggler | None = None
    stop_requested: bool = False
    is_near_told: bool = False
    is_terminal_closed: bool = False
    debugged: set[int] = field(default_factory=set)
    stop: StopAgreement = field(init=False)
    _phase: JobPhase = field(default=JobPhase.STARTING, init=False)
    _outcome: JobOutcome = field(default_factory=lambda: JobOutcome(EndReason.OK), init=False)

    def __post_init__(self) -> None:
        self.stop = StopAgreement(self.workers)

    @property
    def phase(self) -> JobPhase:
        return self._phase

    @property
    def outcome(self) -> JobOutcome:
        """What is known of how the job ends."""
        return self._outcome

    @property
    def is_healthy(self) -> bool:
        """Whether nothing has happened yet that ends the job."""
        return self.phase in (JobPhase.STARTING, JobPhase.RUNNING)

    @property
    def terminal_refusal(self) -> str:
        """Why no rank gets the terminal now; empty if one can."""
        return "the job is being ended" if self.is_terminal_closed else self.no_terminal

    def enter(self, phase: JobPhase, timeouts: Mapping[Timeout, float] | None = None) -> None:
        """Begin a phase. Of all timeouts only these continue; all of them if None."""
        self._phase = phase
        if timeouts is not None:
            self.timeouts.start_only(timeouts)

    def decide(self, outcome: JobOutcome) -> None:
        """Replace what was known of how the job ends."""
        self._outcome = outcome

    def hold_clocks(self, now: float) -> None:
        """Somebody sits at a debugger's prompt: what --timeout and --grow count stands still until `resume_clocks`."""
        self.timeouts.hold(now, Timeout.JOB, Timeout.GROW)
        self._reschedule_near()

    def resume_clocks(self, now: float) -> None:
        self.timeouts.resume(now)
        self._reschedule_near()

    def postpone_clocks(self, seconds: float) -> None:
        """The job has stood still for so long; the end of an allocation has come nearer all the same."""
        self.timeouts.postpone(seconds)
        self._reschedule_near()

    def _reschedule_near(self) -> None:
        """Have TIME_LIMIT_NEAR follow --timeout, which may have been moved."""
        near = self.limits.near(self.timeouts.at(Timeout.JOB))
        if not self.is_healthy or self.is_near_told:
            return
        if near is None:
            self.timeouts.cancel(Timeout.TIME_LIMIT_NEAR)
        else:
            self.timeouts.start(Timeout.TIME_LIMIT_NEAR, near)
