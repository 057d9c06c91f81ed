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

from jaxrun.gang.exceptions import RemoteFailure, WorkerDied
from jaxrun.protocol.flight import parse_group
from jaxrun.protocol.payload import GangMessage, GangMessageKind, pack
from jaxrun.text import format_ranks

if TYPE_CHECKING:
    from jaxrun.gang.rank_connections import RankConnections

INTERRUPT_TIMEOUT_S = 1.0  # seconds for ranks to end what they do when they are interrupted
_VERDICT_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class RankMessage:
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
    error: RemoteFailure | None
    parcel: GangMessage
    time: float

    def value(self) -> Any:
        """What it has returned; taken twice, both may share memory. Whatever unpickling raises."""
        return self.parcel.load()


@dataclass(frozen=True, slots=True)
class Disconnected:
    """A rank's connection has ended: it has died, or its job was stopped."""

    rank: int


@dataclass(frozen=True, slots=True)
class LauncherOutput:
    """The launcher has something to say of the job, in whole lines: that its ranks are out of step, above all."""

    text: str


CallEvent = RankMessage | Printed | Returned | Disconnected | LauncherOutput


class Display(Protocol):
    """Where to show what ranks print."""

    def show(self, printed: Printed) -> None: ...

    def refresh(self, talk: GangCall) -> float | None:
        """Show what is due; seconds until there may be more to show."""

    def end_call(self, talk: GangCall, error: BaseException | None, *, healthy: bool) -> None:
        """The call is over, by an `error` maybe."""


class CellSources(Protocol):
    """The lines of functions that stand in no file: `lines` by file name, of those that `reduce` has met."""

    @property
    def lines(self) -> Mapping[str, str]: ...

    def reduce(self, obj: Any) -> Any: ...


class CallOwner(Protocol):
    """The gang, as its conversation sees it."""

    display: Display
    show_printed: Callable[[Printed], None]

    @property
    def switchboard(self) -> RankConnections: ...

    @property
    def shares_memory(self) -> bool: ...

    def host(self, rank: int) -> str: ...

    def interrupt(self) -> None: ...

    def mark_broken(self, reason: str) -> None: ...

    def stop(self) -> None: ...

    def explain_death(self, patience: float, gone: Collection[int]) -> WorkerDied: ...

    def show_launcher_output(self, told: LauncherOutput) -> None: ...

    def end_call(self, talk: GangCall, error: BaseException | None) -> None: ...


class GangCall:
    """Made by `Gang.converse`; one at a time in each gang."""

    def __init__(self, gang: CallOwner, number: int, task: GangMessage) -> None:
        self._gang = gang
        self._number = number
        self._events: deque[CallEvent] = deque()
        self._ranks = gang.switchboard.ranks
        self.outcomes: dict[int, Returned] = {}
        self.disconnected: set[int] = set()
        self.shares_memory = gang.shares_memory
        gang.switchboard.send(task.with_copied_buffers(), self._ranks)

    @property
    def running(self) -> tuple[int, ...]:
        """The ranks on which the function still runs."""
        return tuple(rank for rank in self._ranks if rank not in self.outcomes and rank not in self.disconnected)

    @property
    def failures(self) -> list[RemoteFailure]:
        return [outcome.error for outcome in self.outcomes.values() if outcome.error is not None]

    def send(self, value: Any, ranks: Iterable[int] | None = None) -> None:
        """Send a value to the function on all ranks, or on these; it is pickled once."""
        parcel = pack(GangMessageKind.VALUE, self._number, value, share=self.shares_memory)
        self._gang.switchboard.send(parcel.with_copied_buffers(), self._ranks if ranks is None else ranks)

    def receive(self, timeout: float | None = None) -> CallEvent | None:
        """The next event of any rank; None if none comes within `timeout` seconds, or none can come any more."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._events:
            left = None if deadline is None else deadline - time.monotonic()
            if not self.running or (left is not None and left < 0):
                return None
            due = self._gang.display.refresh(self)
            self._poll(min((limit for limit in (left, due) if limit is not None), default=None))
        return self._events.popleft()

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt in the function, on the ranks where it runs; a wait in C++ goes on."""
        self._gang.interrupt()

    def explain_death(self) -> WorkerDied | None:
        """After a Gone: who has died, how, and why, as soon as the launcher knows it; None if none is gone."""
        return self._gang.explain_death(_VERDICT_TIMEOUT_S, self.disconnected) if self.disconnected else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Ranks that are still at it are interrupted; what cannot be got into step again makes the gang sick."""
        try:
            self._finish()
        except KeyboardInterrupt as again:
            error = again
            self._gang.mark_broken(f"{format_ranks(self.running)} did not end when interrupted twice")
            self._gang.stop()
            raise
        finally:
            for event in self._events:  # nobody has received them
                if isinstance(event, Printed):
                    self._gang.show_printed(event)
                elif isinstance(event, LauncherOutput):
                    self._gang.show_launcher_output(event)
            self._gang.end_call(self, error)

    def _finish(self) -> None:
        if self.running:
            self.interrupt()
            self._gang.switchboard.send(GangMessage(GangMessageKind.END_CALL, self._number), self.running)
            deadline = time.monotonic() + INTERRUPT_TIMEOUT_S
            while self.running and time.monotonic() < deadline:
                self._poll(deadline - time.monotonic())
        if self.disconnected:
            self._gang.mark_broken(f"{format_ranks(self.disconnected)} ended")
        elif self.running:
            self._gang.mark_broken(f"{format_ranks(self.running)} did not come back from the last call")
        elif broken := [failure.rank for failure in self.failures if failure.is_consequence]:
            self._gang.mark_broken(f"{format_ranks(broken)} lost a connection to another")
        else:
            difference = step_difference({rank: outcome.parcel.note for rank, outcome in self.outcomes.items()})
            if difference:
                self._gang.mark_broken(difference)

    def _poll(self, timeout: float | None) -> None:
        for rank, parcel in self._gang.switchboard.poll(timeout):
            if parcel is None:
                if rank not in self.outcomes:
                    self.disconnected.add(rank)
                    self._events.append(Disconnected(rank))
                else:
                    self._gang.mark_broken(f"rank {rank} ended")
            elif parcel.call == self._number:
                self._handle_parcel(rank, parcel)
        words = self._gang.switchboard.read_launcher_output()
        if words and not self.disconnected:  # what it says of a death, its verdict says better
            self._events.append(LauncherOutput(words))

    def _handle_parcel(self, rank: int, parcel: GangMessage) -> None:
        match parcel.kind:
            case GangMessageKind.VALUE:
                self._events.append(RankMessage(rank, parcel.load()))
            case GangMessageKind.STDOUT | GangMessageKind.STDERR:
                stream = "out" if parcel.kind is GangMessageKind.STDOUT else "err"
                self._events.append(Printed(rank, stream, bytes(parcel.body)))
            case GangMessageKind.RESULT | GangMessageKind.EXCEPTION:
                failed = parcel.kind is GangMessageKind.EXCEPTION
                error = RemoteFailure.from_rank(rank, self._gang.host(rank), parcel.load()) if failed else None
                self.outcomes[rank] = Returned(rank, error, parcel, time.monotonic())
                self._events.append(self.outcomes[rank])


def step_difference(notes: Mapping[int, bytes]) -> str:
    """How the ranks differ in the cross-process calls they have made, by group as JSON; empty if they do not."""
    counts = {rank: json.loads(note or b"{}") for rank, note in notes.items()}
    for group in sorted({name for made in counts.values() for name in made}):
        made = {rank: counts[rank].get(group, 0) for rank in parse_group(group) if rank in counts}
        if len(set(made.values())) > 1:
            alike = {
                count: format_ranks(rank for rank in made if made[rank] == count)
                for count in sorted(set(made.values()))
            }
            each = ", ".join(f"{ranks} {count}" for count, ranks in alike.items())
            return f"ranks {group} are out of step, having made different numbers of cross-process calls ({each})"
    return ""
