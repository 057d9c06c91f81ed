"""One test on a session: what the ranks do is told to its course, and what that orders is done."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from jaxrun.contract.testing import RunTest, Typed, Warned
from jaxrun.gang.conversation import Gone, Printed, Returned, Said, Told
from jaxrun.gang.remote import WorkerDied
from jaxrun.lockstep import compare, report
from jaxrun.lockstep.flight import Flight
from jaxrun.pytest_plugin.course import Course
from jaxrun.pytest_plugin.debugging import Terminal
from jaxrun.pytest_plugin.orders import Inflict, Order, Read, Record, Show, Tell
from jaxrun.pytest_plugin.parts import Part, State
from jaxrun.pytest_plugin.patience import Due, Patience
from jaxrun.pytest_plugin.session import Session, ending
from jaxrun.ranks import spell
from jaxrun.verdict.look import Look
from jaxrun.verdict.stacks import main_stack
from jaxrun.wording import seconds, signal_name

_REPORT = 1.0  # seconds that the launcher has to say how the ranks came apart


@dataclass(frozen=True, slots=True)
class Ended:
    """How a test went.

    limit:  the time limit that it reached; None if it reached none
    whole:  whether the session can run another test
    notes:  what else there is to say of it
    apart:  how the ranks fell out of step, in several lines; empty if they did not
    """

    parts: dict[int, Part]
    limit: float | None = None
    whole: bool = True
    notes: list[str] = field(default_factory=list)
    apart: str = ""


class Conduct:
    """`record` is told of the ranks' warnings; for `debug` see Course."""

    def __init__(
        self, session: Session, terminal: Terminal, record: Callable[[Warned], None], debug: int | None = None
    ) -> None:
        self._session = session
        self._talk = session.talk
        self._terminal = terminal
        self._record = record
        self._course = Course(len(session.gang.workers), debug)
        self._closed: dict[int, str] = {}  # by rank, why its session has ended
        self._notes: list[str] = []
        self._words = ""  # the launcher's

    def run(self, order: RunTest, timeout: float, grace: float) -> Ended:
        """Run one test to its end, or until it is clear that it will have none."""
        self._talk.send(order)
        began = time.monotonic()
        patience = Patience(began, timeout, grace)
        why = None
        while why is None and not self._course.over:
            why = self._step(patience)
        self._terminal.over()
        return self._ended(began, timeout if why is Due.LIMIT else None)

    def _step(self, patience: Patience) -> Due | None:
        """Wait for an event; why there is no point in waiting for another, if so."""
        began = time.monotonic()
        debugging = self._course.debugging is not None
        at, why = patience.due(self._course)
        event = self._talk.receive(None if debugging else max(0.0, at - began))
        now = time.monotonic()
        if debugging:
            patience.paused(began, now)
        elif event is None and now >= at:
            if why is not Due.LOOK or self._is_deserted():
                return why
            patience.looked(now)
        self._hear(event, now)
        return None

    def _is_deserted(self) -> bool:
        _, look = self._session.look()
        deserted = self._course.deserted(_flights(look))
        self._notes += [deserted] if deserted else []
        return bool(deserted)

    def _hear(self, event: Any, now: float) -> None:
        match event:
            case Said(rank, message):
                self._carry_out(self._course.said(rank, message, now))
            case Printed():
                self._session.gang.on_printed(event)
            case Told(words):
                self._words += words
            case Gone(rank):
                self._carry_out(self._course.gone(rank, now))
            case Returned(rank):
                self._closed[rank] = ending(event) or "its pytest session has ended"
                self._carry_out(self._course.gone(rank, now))

    def _carry_out(self, orders: Iterable[Order]) -> None:
        for order in orders:
            match order:
                case Tell(message, ranks):
                    self._talk.send(message, ranks)
                case Inflict(fault):
                    self._session.gang.fault(fault.kind, fault.rank)
                case Show(rank, text):
                    self._terminal.show(rank, text)
                case Read(rank):
                    self._talk.send(Typed(self._terminal.read(rank)), (rank,))
                case Record(warning):
                    self._record(warning)

    # ---- the end

    def _ended(self, began: float, limit: float | None) -> Ended:
        course, notes = self._course, self._notes
        apart = self._apart()
        died = self._talk.died()
        words, look = self._session.look() if course.missing and died is None else ("", None)
        parts = {rank: self._part(rank, began, died, look) for rank in course.ranks}
        notes += [words] if limit is not None and words else []
        notes += (self._words.replace(f"jaxrun: {apart}\n", "") if died is None else str(died)).splitlines()
        if course.missing and died is None:
            after = f" {seconds(time.monotonic() - course.failed)} after the first failure" if course.failed else ""
            notes.append(f"{spell(course.missing)} ended{after}; the next test gets a new gang")
        whole = course.over and not (self._talk.gone or self._closed or apart or course.is_doubtful) and course.in_step
        return Ended(parts, limit, whole, notes, apart)

    def _apart(self) -> str:
        """How the ranks fell out of step, as far as that is known; where it only seems so, the launcher is asked."""
        if not self._course.is_doubtful or report.find(self._words):
            return report.find(self._words)
        _, look = self._session.look()  # in which the launcher compares what the ranks have done
        until = time.monotonic() + _REPORT
        while not report.find(self._words) and (event := self._talk.receive(until - time.monotonic())) is not None:
            self._hear(event, time.monotonic())
        lag = next(iter(compare.lags(_flights(look))), None)
        return report.find(self._words) or (report.lagging(lag, self._session.hosts) if lag is not None else "")

    def _part(self, rank: int, began: float, died: WorkerDied | None, look: Look | None) -> Part:
        progress = self._course.ranks[rank]
        times = [time - began for time in (progress.failed, progress.gone) if time is not None]
        part = Part(progress.reports, at=min(times, default=None))
        if progress.calls is not None:
            return part
        end, what = self._cut_off(rank, died, look)
        return Part(progress.reports, end, what, part.at, self._session.printed(rank))

    def _cut_off(self, rank: int, died: WorkerDied | None, look: Look | None) -> tuple[State, str]:
        if rank in self._closed:
            return State.DIED, self._closed[rank]
        if died is not None:
            return (State.DIED, _death(died)) if rank in died.ranks else (State.STOPPED, "with the others")
        dump = look.dumps.get(rank, "") if look is not None else ""
        asleep = look is None or bool(look.waits.get(rank))
        return State.STUCK if asleep else State.BUSY, main_stack(dump).place()


def _flights(look: Look | None) -> dict[int, Flight]:
    return {rank: Flight.from_json(text) for rank, text in look.flights.items()} if look is not None else {}


def _death(died: WorkerDied) -> str:
    return f"of {signal_name(died.signal)}" if died.signal is not None else f"with exit status {died.status}"
