"""Reads the event log into attempts and ranks, for explain, timeline and trace. No I/O."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct, field

from jaxrun.analysis.diagnosis.error_choice import choose_error
from jaxrun.analysis.lockstep.straggler import Straggler
from jaxrun.job_events.actions import (
    RecordClock,
    RecordLoss,
    RecordReplacement,
    RecordReturn,
    RecordTime,
    SignalRanks,
)
from jaxrun.job_events.events import (
    AgentLost,
    AttemptEnded,
    AttemptStarted,
    LauncherNote,
    LauncherSignalled,
    StallNotice,
)
from jaxrun.protocol.agent_id import AgentId
from jaxrun.protocol.agent_messages import AgentReport, InjectFault, StartFailed, WorkerExited, WorkerSpawned
from jaxrun.protocol.forkserver_messages import Preloaded
from jaxrun.protocol.stop_messages import CheckpointSaved, StopRequested
from jaxrun.protocol.worker_messages import (
    DeviceReport,
    Done,
    Failed,
    Hello,
    PoolWorkerDied,
    ProfileEnded,
    ThreadFailed,
)
from jaxrun.records.event_log.event_log import LoggedEvent
from jaxrun.records.history.job_trace import Moment, Span
from jaxrun.text import format_ranks, format_signal, format_sizes, format_status

_HAVE_OWN_TIMES = (Hello, DeviceReport, Failed, ProfileEnded)
_ENDS = (WorkerExited, AgentLost, Done, Failed)
_MAX_S = 1e11  # some thousand years


class RankLog(Struct):
    """The logged facts about one rank.

    offset, clock_error:  what to add to times of its own clock, and the error of that, in seconds
    at:                   when the launcher first received each message of the rank, by the message's type
    process_started, joined:  when its process began, and when it had joined the others
    cores:                the cores on which it might run; empty for all cores of its host
    peak_memory_bytes:    the most memory that it was seen to hold; 0 if unknown
    losses:     how many times it was lost, while the others went on
    absences:   from its losses to its returns
    """

    host: str = ""
    pid: int = 0
    status: int | None = None
    offset: float = 0.0
    clock_error: float = 0.0
    at: dict[type, float] = field(default_factory=dict)
    process_started: float | None = None
    joined: float | None = None
    cores: str = ""
    peak_memory_bytes: int = 0
    marks: list[Moment] = field(default_factory=list)
    profiles: list[Span] = field(default_factory=list)
    losses: int = 0
    absences: list[Span] = field(default_factory=list)

    @property
    def end(self) -> float | None:
        """When it ended, or reported that it would; None if unknown."""
        return next((self.at[kind] for kind in _ENDS if kind in self.at), None)


class AttemptLog(Struct):
    """The logged facts about one attempt.

    outcome, log:  how it ended, and the file to look at first, if another attempt followed
    ended_with:    the same in one word, as in verdict.json: "killed"
    details:       what else is known about that end, such as which rank was stuck where
    stopped:       the ranks that jaxrun killed
    size:          the number of its hosts; 0 if unknown
    agents:        the ranks of each agent
    straggler:     the rank or host that slowed the others down, as far as it was known
    preloaded:     what was imported before the ranks were forked, and what was not; with several hosts, for each
    last:          the last event
    spent:         how its time was spent, at several times; the last one counts
    saved_at:      when the program last said that a step was saved; None if it never did
    has_ended:     whether a rank has ended
    reported_at:   when the last agent had reported from its host; for a job on this machine, when the attempt began;
                   None if none has
    """

    number: int
    start: float
    end: float
    outcome: str = ""
    ended_with: str = ""
    log: str = ""
    details: tuple[str, ...] = ()
    size: int = 0
    agents: Mapping[AgentId, tuple[int, ...]] = field(default_factory=dict)
    ranks: dict[int, RankLog] = field(default_factory=dict)
    marks: list[Moment] = field(default_factory=list)
    stopped: set[int] = field(default_factory=set)
    straggler: Straggler | None = None
    preloaded: list[Preloaded] = field(default_factory=list)
    last: LoggedEvent | None = None
    spent: list[RecordTime] = field(default_factory=list)
    saved_at: float | None = None
    has_ended: bool = False
    reported_at: float | None = None

    @property
    def hosts(self) -> dict[int, str]:
        """The host of each rank that has reported it."""
        return {rank: log.host for rank, log in self.ranks.items() if log.host}

    @property
    def run_at(self) -> float | None:
        """When the program started: once all ranks had reported their devices."""
        times = [rank.at.get(DeviceReport) for rank in self.ranks.values()]
        known = [time for time in times if time is not None]
        return max(known) if known and len(known) == len(times) else None


def read_attempts(events: Iterable[LoggedEvent], *, marks_saves: bool = False) -> list[AttemptLog]:
    """Sort the events by attempt and rank; those with values that no process has are left out.

    No event is kept, except those with times of a rank's own clock: the last message about that clock applies to all,
    until a spare host takes the place of the rank's.
    `marks_saves`: each saved step becomes a mark of its rank; there may be a million.
    """
    attempts: dict[int, AttemptLog] = {}
    own_times: list[tuple[RankLog, LoggedEvent]] = []
    for event in events:
        log = attempts.get(event.attempt)
        if log is None:
            log = attempts[event.attempt] = AttemptLog(event.attempt, event.time, event.time)
        log.start, log.end = min(log.start, event.time), max(log.end, event.time)
        if isinstance(event.message, CheckpointSaved):  # nearly all lines of a long job
            _add_save(log, event, event.message, marks_saves)
            continue
        if not isinstance(event.message, RecordClock):
            log.last = event
        try:
            ranks = _ranks_of(event, log)
            for number in ranks:
                rank = _rank_of(log, number)
                if isinstance(event.message, _HAVE_OWN_TIMES):
                    own_times.append((rank, event))
                _add_to_rank(rank, event, number in log.stopped)
                log.has_ended |= isinstance(event.message, _ENDS)
            if not ranks:
                _add(log, event)
            if isinstance(event.message, RecordReplacement):
                own_times = _add_own_times(own_times, [log.ranks.get(rank) for rank in event.message.ranks])
        except (ArithmeticError, ValueError):
            continue
    _add_own_times(own_times, [rank for rank, _ in own_times])
    for log in attempts.values():
        for rank in log.ranks.values():
            rank.marks.sort(key=lambda mark: mark.time)
    return [attempts[number] for number in sorted(attempts)]


def _add_own_times(
    events: Iterable[tuple[RankLog, LoggedEvent]], ranks: Iterable[RankLog | None]
) -> list[tuple[RankLog, LoggedEvent]]:
    """Add what the events of these ranks say by their own clocks; returns the others."""
    known, rest = {id(rank) for rank in ranks}, []
    for rank, event in events:
        if id(rank) not in known:
            rest.append((rank, event))
            continue
        with contextlib.suppress(ArithmeticError, ValueError):
            _add_own_time(rank, event)
    return rest


def _add_save(log: AttemptLog, event: LoggedEvent, message: CheckpointSaved, marks_saves: bool) -> None:
    log.last = event
    if event.rank is not None:
        rank = _rank_of(log, event.rank)
        rank.at.setdefault(CheckpointSaved, event.time)
        log.saved_at = event.time
        if marks_saves:
            rank.marks.append(Moment(event.time, f"saved step {message.step}"))


def _rank_of(log: AttemptLog, number: int) -> RankLog:
    rank = log.ranks.get(number)
    if rank is None:
        rank = log.ranks[number] = RankLog()
    return rank


def _ranks_of(event: LoggedEvent, log: AttemptLog) -> tuple[int, ...]:
    """Return the ranks of an event; empty if it is about the attempt."""
    if isinstance(event.message, AgentLost):
        return log.agents.get(event.message.agent, ())
    rank = event.rank
    return () if rank is None or isinstance(event.message, LauncherNote) else (rank,)


def describe_sizes(attempts: Sequence[AttemptLog]) -> str:
    """Write on how many hosts an unfinished job has run over time; empty if the number never changed."""
    ends = [*(log.start for log in attempts[1:]), *(log.end for log in attempts[-1:])]
    return format_sizes([(log.size, end - log.start) for log, end in zip(attempts, ends, strict=True)], is_over=False)


def rank_phases(log: RankLog, attempt: AttemptLog) -> tuple[Span, ...]:
    """Return a rank's consecutive phases, up to the attempt's end if it has not ended, and profiles inside them."""
    steps: Sequence[tuple[str, float | None]] = (
        ("before its process", attempt.start),
        ("start Python and import jax", log.process_started),
        ("meet the other ranks, join", log.at.get(Hello)),
        ("find the devices", log.joined),
        ("wait for the other ranks", log.at.get(DeviceReport)),
        ("program", attempt.run_at if DeviceReport in log.at else None),
        ("end", log.at.get(Failed, log.at.get(Done))),
    )
    known = [(name, time) for name, time in steps if time is not None]
    ends = [*(time for _, time in known[1:]), log.end or attempt.end]
    phases = [Span(name, start, stop) for (name, start), stop in zip(known, ends, strict=True) if start < stop]
    return (*_leave_out(phases, log.absences), *log.profiles)


def _leave_out(phases: Sequence[Span], absences: Sequence[Span]) -> list[Span]:
    """Return the parts of phases outside of absences, which take their place, in order."""
    for absence in absences:
        before = [phase._replace(end=min(phase.end, absence.start)) for phase in phases]
        after = [phase._replace(start=max(phase.start, absence.end)) for phase in phases]
        phases = [part for part in (*before, *after) if part.start < part.end]
    return sorted((*phases, *absences), key=lambda part: part.start)


def _add(log: AttemptLog, event: LoggedEvent) -> None:
    message, time = event.message, event.time
    match message:
        case StallNotice():
            log.marks.append(Moment(time, f"no progress for {_seconds(message.idle_s):.0f} s"))
        case AttemptStarted():
            log.size, log.agents = message.hosts, message.agents
            log.reported_at = log.reported_at if message.listening else time
            if event.attempt > 1:
                log.marks.append(Moment(time, f"attempt {event.attempt}", message.reason))
        case RecordReplacement():
            log.agents = {**log.agents, **message.agents}
            log.marks.append(Moment(time, f"{message.spare} takes the place of {message.lost}"))
        case AttemptEnded():
            log.outcome, log.ended_with, log.log = message.headline, message.outcome, message.log
            log.details = tuple(filter(None, (message.divergence, *message.details)))
        case Straggler():
            log.straggler = message
        case AgentReport():
            log.reported_at = time
        case RecordTime():
            log.spent.append(message)
        case Preloaded():
            log.preloaded.append(message)
        case StartFailed():
            log.marks.append(Moment(time, "cannot be started", message.sentence, is_failure=True))
        case LauncherSignalled():
            log.marks.append(Moment(time, f"{format_signal(message.signum)} to jaxrun"))
        case SignalRanks():
            log.stopped |= set(message.ranks) if message.signum == signal.SIGKILL else set()
            log.marks.append(Moment(time, f"{format_signal(message.signum)} to {format_ranks(message.ranks)}"))
        case InjectFault():
            log.marks.append(Moment(time, f"--chaos: {message.kind} {format_ranks(event.to)}", is_failure=True))
        case StopRequested():
            log.marks.append(Moment(time, "asked to stop", message.reason))


def _add_to_rank(rank: RankLog, event: LoggedEvent, stopped: bool) -> None:
    message, time = event.message, event.time
    if isinstance(message, RecordClock):
        rank.offset, rank.clock_error = _seconds(message.offset_s), _seconds(message.error_s)
        return
    rank.at.setdefault(type(message), time)
    match message:
        case WorkerSpawned():
            rank.pid = message.pid
            rank.process_started = min(time, rank.process_started or time)
        case Hello():
            # Inside a wrapper, this is not the pid of the spawned process.
            rank.host, rank.pid = message.host, message.pid
        case DeviceReport():
            rank.cores = message.cores
        case AgentLost():
            rank.marks.append(Moment(time, "lost", message.reason, is_failure=True))
        case PoolWorkerDied():
            rank.marks.append(Moment(time, "pool worker died", format_status(message.status, "was ")))
        case ThreadFailed():
            rank.marks.append(Moment(time, f"thread {message.thread} died", message.error))
        case RecordLoss():
            rank.losses += 1
        case RecordReturn():
            away = _seconds(message.seconds)
            rank.marks.append(Moment(time, "takes part again", f"{away:.1f} s after it was lost"))
            rank.absences.append(Span("lost, and started again", time - away, time))
            for kind in _ENDS:  # of the process before
                rank.at.pop(kind, None)
        case WorkerExited(status=status):
            rank.status, rank.peak_memory_bytes = status, message.peak_memory_bytes
            if status and not stopped and Failed not in rank.at:
                rank.marks.append(Moment(time, format_status(status), is_failure=True))


def _add_own_time(rank: RankLog, event: LoggedEvent) -> None:
    """Add what an event says by the clock of its rank, once all is known of that clock."""
    message, time = event.message, event.time
    match message:
        case Hello():
            # It may be heard before what has forked it says so.
            rank.process_started = min(_seconds(message.started_at) + rank.offset, rank.process_started or time)
        case DeviceReport():
            if rank.joined is None:  # or another process joins, while the others run
                rank.joined = _seconds(message.joined_at) + rank.offset
        case Failed():
            time = min(time, _seconds(message.time) + rank.offset)  # two may be heard in the other order
            choice = choose_error(message.chain)
            error, text = (choice.chosen.error, choice.chosen.message) if choice else (message.error, message.message)
            rank.marks.append(Moment(time, error or "failed", text, is_failure=True))
        case ProfileEnded() if message.started_at:
            start, stop = _seconds(message.started_at) + rank.offset, _seconds(message.time) + rank.offset
            rank.profiles.append(Span("JAX profile", start, max(start, stop), message.file or message.error))


def _seconds(value: float) -> float:
    """Return a time. Raises ValueError if the value is neither a time nor a difference of times."""
    if not abs(value) <= _MAX_S:
        raise ValueError(f"no time: {value!r:.40}")
    return value
