"""One function on all ranks of a gang, and what is said while it runs.

with gang.converse(fn, *args) as talk:
    talk.send("more", ranks=[1])
    while event := talk.receive():
        ...                             # Said, Printed, Returned, Gone or Told
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

from jaxrun.contract.parcel import Kind, Parcel, pack
from jaxrun.gang.remote import Remote, WorkerDied
from jaxrun.lockstep.flight import members
from jaxrun.ranks import spell

if TYPE_CHECKING:
    from jaxrun.gang.switchboard import Switchboard

INTERRUPT_PATIENCE = 1.0  # seconds for ranks to end what they do when they are interrupted
_VERDICT_PATIENCE = 5.0


@dataclass(frozen=True, slots=True)
class Said:
    """A rank has sent a value."""

    rank: int
    value: Any


@dataclass(frozen=True, slots=True)
class Printed:
    """A rank's Python code has printed: `stream` is "out" or "err"."""

    rank: int
    stream: str
    data: bytes


@dataclass(frozen=True, slots=True)
class Returned:
    """The function is over on a rank. `error` is None where it has returned."""

    rank: int
    error: Remote | None
    parcel: Parcel
    time: float

    def value(self) -> Any:
        """What it has returned; taken twice, both may share memory. Whatever unpickling raises."""
        return self.parcel.open()


@dataclass(frozen=True, slots=True)
class Gone:
    """A rank's connection has ended: it has died, or its job was stopped."""

    rank: int


@dataclass(frozen=True, slots=True)
class Told:
    """The launcher has something to say of the job, in whole lines: that its ranks are out of step, above all."""

    text: str


Event = Said | Printed | Returned | Gone | Told


class Screen(Protocol):
    """Where to show what ranks print."""

    def show(self, printed: Printed) -> None: ...

    def wait(self, talk: Conversation) -> float | None:
        """Show what is due; seconds until there may be more to show."""

    def over(self, talk: Conversation, error: BaseException | None, *, healthy: bool) -> None:
        """The call is over, by an `error` maybe."""


class Sources(Protocol):
    """The lines of functions that stand in no file: `lines` by file name, of those that `reduce` has met."""

    @property
    def lines(self) -> Mapping[str, str]: ...

    def reduce(self, obj: Any) -> Any: ...


class Host(Protocol):
    """The gang, as its conversation sees it."""

    screen: Screen
    on_printed: Callable[[Printed], None]

    @property
    def switchboard(self) -> Switchboard: ...

    @property
    def shares_memory(self) -> bool: ...

    def host(self, rank: int) -> str: ...

    def interrupt(self) -> None: ...

    def sicken(self, reason: str) -> None: ...

    def stop(self) -> None: ...

    def post_mortem(self, patience: float, gone: Collection[int]) -> WorkerDied: ...

    def on_told(self, told: Told) -> None: ...

    def conversation_over(self, talk: Conversation, error: BaseException | None) -> None: ...


class Conversation:
    """Made by `Gang.converse`; one at a time in each gang."""

    def __init__(self, gang: Host, number: int, task: Parcel) -> None:
        self._gang = gang
        self._number = number
        self._events: deque[Event] = deque()
        self._ranks = gang.switchboard.ranks
        self.outcomes: dict[int, Returned] = {}
        self.gone: set[int] = set()
        self.shares_memory = gang.shares_memory
        gang.switchboard.send(task.own(), self._ranks)

    @property
    def missing(self) -> tuple[int, ...]:
        """The ranks on which the function still runs."""
        return tuple(rank for rank in self._ranks if rank not in self.outcomes and rank not in self.gone)

    @property
    def failures(self) -> list[Remote]:
        return [outcome.error for outcome in self.outcomes.values() if outcome.error is not None]

    def send(self, value: Any, ranks: Iterable[int] | None = None) -> None:
        """Send a value to the function on all ranks, or on these; it is pickled once."""
        parcel = pack(Kind.SAY, self._number, value, share=self.shares_memory)
        self._gang.switchboard.send(parcel.own(), self._ranks if ranks is None else ranks)

    def receive(self, timeout: float | None = None) -> Event | None:
        """The next event of any rank; None if none comes within `timeout` seconds, or none can come any more."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._events:
            left = None if deadline is None else deadline - time.monotonic()
            if not self.missing or (left is not None and left < 0):
                return None
            due = self._gang.screen.wait(self)
            self._take(min((limit for limit in (left, due) if limit is not None), default=None))
        return self._events.popleft()

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt in the function, on the ranks where it runs; a wait in C++ goes on."""
        self._gang.interrupt()

    def died(self) -> WorkerDied | None:
        """After a Gone: who has died, how, and why, as soon as the launcher knows it; None if none is gone."""
        return self._gang.post_mortem(_VERDICT_PATIENCE, self.gone) if self.gone else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Ranks that are still at it are interrupted; what cannot be got into step again makes the gang sick."""
        try:
            self._end()
        except KeyboardInterrupt as again:
            error = again
            self._gang.sicken(f"{spell(self.missing)} did not end when interrupted twice")
            self._gang.stop()
            raise
        finally:
            for event in self._events:  # nobody has received them
                if isinstance(event, Printed):
                    self._gang.on_printed(event)
                elif isinstance(event, Told):
                    self._gang.on_told(event)
            self._gang.conversation_over(self, error)

    def _end(self) -> None:
        if self.missing:
            self.interrupt()
            self._gang.switchboard.send(Parcel(Kind.OVER, self._number), self.missing)
            deadline = time.monotonic() + INTERRUPT_PATIENCE
            while self.missing and time.monotonic() < deadline:
                self._take(deadline - time.monotonic())
        if self.gone:
            self._gang.sicken(f"{spell(self.gone)} ended")
        elif self.missing:
            self._gang.sicken(f"{spell(self.missing)} did not come back from the last call")
        elif broken := [failure.rank for failure in self.failures if failure.is_consequence]:
            self._gang.sicken(f"{spell(broken)} lost a connection to another")
        else:
            difference = out_of_step({rank: outcome.parcel.note for rank, outcome in self.outcomes.items()})
            if difference:
                self._gang.sicken(difference)

    def _take(self, timeout: float | None) -> None:
        for rank, parcel in self._gang.switchboard.poll(timeout):
            if parcel is None:
                if rank not in self.outcomes:
                    self.gone.add(rank)
                    self._events.append(Gone(rank))
                else:
                    self._gang.sicken(f"rank {rank} ended")
            elif parcel.conversation == self._number:
                self._on_parcel(rank, parcel)
        words = self._gang.switchboard.take_words()
        if words and not self.gone:  # what it says of a death, its verdict says better
            self._events.append(Told(words))

    def _on_parcel(self, rank: int, parcel: Parcel) -> None:
        match parcel.kind:
            case Kind.SAY:
                self._events.append(Said(rank, parcel.open()))
            case Kind.OUT | Kind.ERR:
                stream = "out" if parcel.kind is Kind.OUT else "err"
                self._events.append(Printed(rank, stream, bytes(parcel.body)))
            case Kind.RETURN | Kind.FAIL:
                failed = parcel.kind is Kind.FAIL
                error = Remote.of(rank, self._gang.host(rank), parcel.open()) if failed else None
                self.outcomes[rank] = Returned(rank, error, parcel, time.monotonic())
                self._events.append(self.outcomes[rank])


def out_of_step(notes: Mapping[int, bytes]) -> str:
    """How the ranks differ in the cross-process calls they have made, by group as JSON; empty if they do not."""
    counts = {rank: json.loads(note or b"{}") for rank, note in notes.items()}
    for group in sorted({name for made in counts.values() for name in made}):
        made = {rank: counts[rank].get(group, 0) for rank in members(group) if rank in counts}
        if len(set(made.values())) > 1:
            alike = {count: spell(rank for rank in made if made[rank] == count) for count in sorted(set(made.values()))}
            each = ", ".join(f"{ranks} {count}" for count, ranks in alike.items())
            return f"ranks {group} are out of step, having made different numbers of cross-process calls ({each})"
    return ""
