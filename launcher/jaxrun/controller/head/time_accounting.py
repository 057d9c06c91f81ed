"""Accounts for the time of an attempt while its program runs: reads what flight recorders say, and logs the sums."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from msgspec import Struct, field

from jaxrun.analysis.lockstep.call_waits import CallWait
from jaxrun.analysis.lockstep.profile_plan import steps_in
from jaxrun.analysis.lockstep.time_spent import (
    SET_UP,
    STEPS,
    UNKNOWN,
    TimeLedger,
    TimeReading,
    late_share,
)
from jaxrun.controller.head.head_state import HeadState
from jaxrun.job_events.actions import Action, RecordTime
from jaxrun.protocol.flight import Flight, TimeTotals
from jaxrun.protocol.stop_messages import NO_STEP

_MIN_INTERVAL_S = 10.0  # between two records
_INTERVAL_SHARE = 0.01  # of the time since the program's start: so there are few even for a job of weeks
_OWN_REASON_S = 0.05  # a rank that compiles or saves for longer comes late for that reason
_OWN_REASON_SHARE = 0.3

Waits = Mapping[str, Iterable[CallWait]]


class TimeAccounting(Struct):
    """Times are seconds since the epoch on the head's clock."""

    _state: HeadState
    _ledger: TimeLedger | None = None
    _ended_at: float | None = None
    _recorded_at: float = 0.0
    _totals: dict[tuple[int, int], TimeTotals] = field(default_factory=dict)  # by rank and incarnation
    _waited: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    _read_at: float = 0.0
    _calls_per_step: int = 0

    def start(self, now: float) -> None:
        """The program starts on all ranks."""
        self._ledger = TimeLedger(now)
        self._recorded_at = self._read_at = now

    def close(self, now: float) -> None:
        """The program has ended, or the job has begun to end it. The last reading follows in `conclude`."""
        if self._ended_at is None:
            self._ended_at = now

    def suspend(self, seconds: float) -> None:
        if self._ledger is not None and self._ended_at is None:
            self._ledger.suspend(seconds)

    def note_stall(self, idle_s: float) -> None:
        if self._ledger is not None:
            self._ledger.stall(idle_s, _calls_made(self._state.flights))

    def add(self, flights: Mapping[int, Flight], waits: Waits, offset_s: float, now: float) -> list[Action]:
        """Add what the recorders say, all at about the same time; `offset_s` leads to the head's clock."""
        if self._ledger is None or self._ended_at is not None:
            return []
        self._ledger.add(self._read(flights, waits, offset_s), now)
        self._read_at = now
        pause = max(_MIN_INTERVAL_S, _INTERVAL_SHARE * (now - (self._state.run_at or now)))
        if now < self._recorded_at + pause:
            return []
        self._recorded_at = now
        return [self._record()]

    def conclude(self, waits: Waits, offset_s: float, now: float, *, well: bool) -> list[Action]:
        """Add the last reading, and log all; `well`: the program ended well, so it was not in its set-up."""
        if self._ledger is None:
            return []
        ended_at = self._ended_at if self._ended_at is not None else now
        self._ledger.add(self._read(self._state.flights, waits, offset_s), ended_at)
        parts = self._ledger.parts
        if well and not parts[STEPS]:
            parts[UNKNOWN] += parts[SET_UP]
            parts[SET_UP] = 0
        return [self._record()]

    def _read(self, flights: Mapping[int, Flight], waits: Waits, offset_s: float) -> TimeReading:
        spent = [self._since_last(rank, flight) for rank, flight in flights.items()]
        own_s = max((one.compiling + one.saving + one.restoring for one in spent), default=0.0)
        data, slowest = self._shares(waits, own_s)
        lost = self._state.workers.lost
        complete = [
            one
            for one, (rank, flight) in zip(spent, flights.items(), strict=True)
            if flight.complete and rank not in lost
        ]
        told = [flight.told_step for flight in flights.values() if flight.told_step is not None]
        self._calls_per_step = steps_in(flights) or self._calls_per_step
        began = [one.began for one in told]
        if not told:
            began = [since for flight in flights.values() if flight.complete and (since := flight.repeating_since)]
        return TimeReading(
            compiling=max((one.compiling for one in spent), default=0.0),
            saving=max((one.saving for one in spent), default=0.0),
            restoring=max((one.restoring for one in spent), default=0.0),
            pausing=min((one.pausing for one in complete), default=0.0),
            data_share=data,
            slowest_share=slowest,
            steps_since=min(began) + offset_s if began else None,
            has_steps=bool(told) or (len(self._state.workers.hosts) > 1 and bool(complete)),
            calls=_calls_made(flights),
            first_new_call=self._first_new_call(flights, offset_s),
            is_held=bool(self._state.debugged),
        )

    def _since_last(self, rank: int, flight: Flight) -> TimeTotals:
        process = (rank, self._state.workers.incarnation(rank))
        before, self._totals[process] = self._totals.get(process, TimeTotals()), flight.totals
        return TimeTotals(*(max(0.0, new - old) for new, old in zip(flight.totals, before, strict=True)))

    def _shares(self, waits: Waits, own_s: float) -> tuple[float, float]:
        """Return the shares of the time in which the others waited for a rank: at its host's work, and for its calls.

        own_s:  how long one rank compiled, saved or restored meanwhile
        """
        chosen = max((list(calls) for calls in waits.values()), key=_period, default=[])
        if own_s > _OWN_REASON_S:
            chosen = [wait for wait in chosen if wait.late_s + wait.inherited_s < _OWN_REASON_SHARE * own_s]
        seconds = _period(chosen)
        certain = self._state.platform != "cpu"  # whose devices compute while the ranks prepare further calls
        data = [wait.blocked_s if certain else wait.waited_s for wait in chosen]
        slowest = [0.0 if certain else wait.inherited_s for wait in chosen]
        for wait, waited_s in zip(chosen, data, strict=True):
            self._waited[wait.last_rank] += waited_s
        return (sum(data) / seconds, sum(slowest) / seconds) if seconds > 0.0 else (0.0, 0.0)

    def _first_new_call(self, flights: Mapping[int, Flight], offset_s: float) -> float | None:
        new = (
            timing.entered + offset_s
            for flight in flights.values()
            for timing in flight.timings
            if timing.dispatched + offset_s > self._read_at
        )
        return min(new, default=None)

    def _record(self) -> RecordTime:
        assert self._ledger is not None
        late = late_share(self._waited)
        steps = [flight.told_step for flight in self._state.flights.values() if flight.told_step is not None]
        last = max((one.step for one in steps), default=NO_STEP)
        first = min((one.first for one in steps), default=NO_STEP)
        return RecordTime(
            since=self._ledger.since_us / 1e6,
            until=self._ledger.until_us / 1e6,
            parts={part: spent for part, spent in self._ledger.parts.items() if spent},
            steps=last - first + 1 if steps else self._steps_of_calls(),
            first_step=first,
            last_step=last,
            total_steps=max((one.total for one in steps), default=0),
            late_rank=late[0] if late is not None else -1,
        )

    def _steps_of_calls(self) -> int:
        made = sorted(sum(flight.call_counts.values()) for flight in self._state.flights.values() if flight.complete)
        return made[len(made) // 2] // self._calls_per_step if made and self._calls_per_step else 0


def _calls_made(flights: Mapping[int, Flight]) -> int:
    return sum(sum(flight.call_counts.values()) for flight in flights.values())


def _period(waits: Iterable[CallWait]) -> float:
    return sum(wait.period_s for wait in waits)
