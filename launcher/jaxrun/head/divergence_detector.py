"""Keeps the ranks of a job in step, or says how they fell out of it: a state machine without I/O.

Two sources: the Calls that ranks send before the first run of each program (in strict mode: before every call), which
agreement.py holds against each other; and the flight recorders, at which the head looks now and then, and at the end.
Chains that differ are only a reason to read more: what is reported is a call whose programs differ. Before it is, one
rank of each party is asked what the program was, which its agent can tell even if the rank itself cannot any more.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from jaxrun.head.actions import Action, PrintLine, Send, TakeSnapshot
from jaxrun.head.call_matcher import CallMatcher, CallSlot
from jaxrun.lockstep import compare, report
from jaxrun.lockstep.compare import Candidate, Lag
from jaxrun.lockstep.divergence import (
    CallGroup,
    Divergence,
    absent_groups,
    divergence_of_calls,
    format_absent_state,
    largest_first,
)
from jaxrun.protocol.agent_messages import (
    ProgramDetails,
    ProgramDetailsRequest,
    RecorderSnapshot,
    SnapshotPurpose,
    SnapshotReply,
)
from jaxrun.protocol.flight import Flight
from jaxrun.protocol.flight_file import LOCKSTEP_OFF
from jaxrun.protocol.worker_messages import Call

_FIRST_READ_S, _READ_INTERVAL_GROWTH, _MAX_READ_INTERVAL_S = 1.0, 1.5, 30.0  # seconds between looks at the recorders
_DETAILS_TIMEOUT_S = 0.3  # seconds for the descriptions that a report wants


@dataclass(frozen=True, slots=True)
class _Question:
    """What histories are wanted for; if they show nothing, what was known before."""

    suspicion: Candidate
    known: Divergence | None = None
    meeting: CallSlot | None = None


@dataclass(slots=True)
class _Case:
    """A divergence that waits for its descriptions, and the ranks that wait for it."""

    divergence: Divergence
    meeting: CallSlot | None
    due: float
    asked: set[tuple[int, int]]  # rank, program
    texts: dict[int, str] = field(default_factory=dict)


class DivergenceDetector:
    """What the calls of one job say. Times are seconds since the epoch."""

    def __init__(self, mode: str, hosts: Mapping[int, str]) -> None:
        """`hosts` may still be filled in."""
        self._hosts = hosts
        self.divergence: Divergence | None = None
        self._pause = None if mode == LOCKSTEP_OFF else _FIRST_READ_S
        self._matcher = CallMatcher()
        self.flights: dict[int, Flight] = {}  # what the recorders held when they were last read
        self._all_wait = False
        self._told: set[int] = set()
        self._concluding = False
        self._cases: list[_Case] = []
        self._questions: list[_Question] = []

    @property
    def is_enabled(self) -> bool:
        return self._pause is not None

    def was_told(self, rank: int) -> bool:
        """Whether this rank was told that it is out of step, which it then raises."""
        return rank in self._told

    @property
    def busy(self) -> bool:
        """Whether an answer is awaited."""
        return bool(self._cases or self._questions)

    def next_read_s(self) -> float | None:
        """Seconds until the recorders are to be read again; None for never."""
        if self._pause is None or self.divergence is not None:
            return None
        pause, self._pause = self._pause, min(self._pause * _READ_INTERVAL_GROWTH, _MAX_READ_INTERVAL_S)
        return pause

    # ---- what is heard

    def on_call(self, call: Call, working: int, now: float) -> list[Action]:
        """`working`: the number of ranks whose program has not ended."""
        actions = self._matcher.add(call, now)
        self._all_wait = len(self._matcher.waiting) >= working
        if call.waits_for_answer and self._all_wait:
            self._matcher.mark_all_waiting(now)
        return actions

    def on_flown(self, flown: RecorderSnapshot) -> None:
        self.flights[flown.rank] = flown.flight

    def remove_rank(self, rank: int, now: float) -> None:
        """This rank makes no more calls."""
        flight = self.flights.get(rank, Flight())
        self._matcher.remove_rank(rank, flight.call_counts if flight.complete else None, now)

    def handle_recorders(self, taken: SnapshotReply, now: float) -> list[Action]:
        """Recorders have been read. Where ranks seem out of step, histories are wanted."""
        if taken.purpose is SnapshotPurpose.HISTORY:
            return self._judge(taken.flights, now)
        self.flights.update(taken.flights)
        return self._suspect() if taken.purpose in (SnapshotPurpose.LOCKSTEP, SnapshotPurpose.KEEP) else []

    def on_described(self, described: ProgramDetails) -> list[Action]:
        actions: list[Action] = []
        for case in self._cases:
            if (described.rank, described.program) in case.asked:
                case.asked.discard((described.rank, described.program))
                case.texts[described.rank] = described.details
        for case in [case for case in self._cases if not case.asked]:
            actions += self._close(case)
        return actions

    # ---- what is due

    def deadline(self) -> float | None:
        dues = [case.due for case in self._cases]
        conflict = self._matcher.deadline()
        return min([*dues, conflict] if conflict is not None else dues, default=None)

    def handle_timeouts(self, now: float) -> list[Action]:
        """What is to be done because time has passed."""
        actions: list[Action] = []
        for meeting in self._matcher.pop_expired(now):
            actions += self._on_conflict(meeting, now)
        for case in [case for case in self._cases if case.due <= now]:
            actions += self._close(case)
        return actions

    def conclude(self, now: float, *, well: bool) -> list[Action]:
        """The last questions, when all ranks have ended; `well`: with status 0, so that they should be level."""
        self._concluding = True
        self._matcher.expire_all()
        actions = self.handle_timeouts(now)
        if self.busy:
            return actions
        if self.divergence is not None or not self.is_enabled:
            return []
        actions = self._suspect()
        lag = next(iter(compare.find_lags(self.flights)), None) if well and not actions else None
        return self._open(self._of_lag(lag), None, now) if lag is not None else actions

    def give_up_waiting(self) -> None:
        """No more answers will come: what is known must do."""
        for question in self._questions:
            if question.known is not None:
                self._open(question.known, question.meeting, 0.0)
        self._questions.clear()
        for case in list(self._cases):
            self._close(case)

    def left_behind(self, finished: Collection[int]) -> Lag | None:
        """The call that others have made or entered and a finished rank of their group has not."""
        lags = compare.find_lags(self.flights) if self.is_enabled else ()
        return next((lag for lag in lags if not set(finished).isdisjoint(lag.behind)), None)

    # ---- how

    def _suspect(self) -> list[Action]:
        if self.divergence is not None or self.busy:
            return []
        return self._ask(*(_Question(suspicion) for suspicion in compare.find_candidates(self.flights)))

    def _ask(self, *questions: _Question) -> list[Action]:
        """One after the other."""
        first = not self._questions
        self._questions += questions
        return self._ask_next() if first else []

    def _ask_next(self) -> list[Action]:
        return [
            TakeSnapshot(question.suspicion.representatives, SnapshotPurpose.HISTORY)
            for question in self._questions[:1]
        ]

    def _judge(self, histories: Mapping[int, Flight], now: float) -> list[Action]:
        if not self._questions:
            return []
        question = self._questions.pop(0)
        found = compare.find_divergence(question.suspicion, histories) or question.known
        opened = self._open(found, question.meeting, now) if found is not None else []
        return [*opened, *self._ask_next()]

    def _on_conflict(self, meeting: CallSlot, now: float) -> list[Action]:
        absent = meeting.members - meeting.calls.keys()
        states = {rank: self._state(rank, *meeting.key) for rank in sorted(absent)}
        divergence = divergence_of_calls(meeting.calls, {rank: text for rank, text in states.items() if text})
        if divergence is None:
            return []
        if meeting.waiting:
            return self._open(divergence, meeting, now)
        # Only first calls are told: they may have been out of step before.
        parties = tuple(party.ranks for party in divergence.call_groups)
        return self._ask(_Question(Candidate(*meeting.key, parties), divergence, meeting))

    def _state(self, rank: int, group: str, number: int) -> str:
        """What a rank does instead of this call, if that is known: it has gone, or waits as all the others do."""
        if self._matcher.is_gone(rank):
            return format_absent_state(self._matcher.calls_made(rank, group), "is finished")
        call = self._matcher.waiting.get(rank) if self._all_wait else None
        return f"waits in call #{call.number} of ranks {call.group}, {call.name} at {call.source_line}" if call else ""

    def _of_lag(self, lag: Lag) -> Divergence:
        """All ranks have ended well, and some had made this call."""
        flight = self.flights[lag.ahead[0]]
        calls = (call for call in flight.calls_of(lag.group) if call.number == lag.number)
        program = next((call.program for call in calls), 0)
        ahead = CallGroup(lag.ahead, lag.name or "a call", place=lag.place, recorded_by=lag.ahead[0], program=program)
        behind = absent_groups({rank: format_absent_state(lag.reached[rank], "is finished") for rank in lag.behind})
        return Divergence(lag.group, lag.number, largest_first([ahead, *behind]))

    def _open(self, divergence: Divergence, meeting: CallSlot | None, now: float) -> list[Action]:
        asked = {(party.recorded_by, party.program) for party in divergence.call_groups if party.name}
        case = _Case(divergence, meeting, now + _DETAILS_TIMEOUT_S, asked)
        self._cases.append(case)
        return (
            [Send((rank,), ProgramDetailsRequest(program)) for rank, program in sorted(asked)]
            if asked
            else self._close(case)
        )

    def _close(self, case: _Case) -> list[Action]:
        if case not in self._cases:
            return []
        self._cases.remove(case)
        divergence = case.divergence.with_program_details(case.texts)
        text = report.format_divergence(divergence, self._hosts)
        waiting = case.meeting.waiting if case.meeting is not None else ()
        self._told |= set(waiting)
        actions = self._matcher.resolve(case.meeting, text) if case.meeting is not None else []
        first, self.divergence = self.divergence is None, self.divergence or divergence
        # Those that wait will say it themselves, and the verdict says it at the end.
        return [*actions, PrintLine(text)] if first and not waiting and not self._concluding else actions
