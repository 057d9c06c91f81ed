"""One function that runs on all ranks of a gang, and what the ranks and the caller send each other meanwhile.

with gang.start_call(fn, *args) as call:
    call.send("more", ranks=[1])
    while event := call.receive():
        ...                             # RankMessage, Printed, Returned, Disconnected or LauncherOutput
"""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, Self

from jaxrun.frontends.gang.call_events import (
    CallEvent,
    Disconnected,
    Display,
    LauncherOutput,
    Printed,
    RankMessage,
    Returned,
)
from jaxrun.frontends.gang.exceptions import CallTimeout, RemoteFailure, WorkerDied, combined_exception
from jaxrun.frontends.gang.gang_job import GangJob
from jaxrun.protocol.flight import parse_group
from jaxrun.protocol.gang_messages import GangMessage, GangMessageKind, pack
from jaxrun.protocol.payload import OwnedDescriptor
from jaxrun.text import agree, format_ranks, group_alike

INTERRUPT_TIMEOUT_S = 1.0  # for ranks to end what they do when they are interrupted
FAILURE_GRACE_S = 1.5  # for the other ranks to return after one has raised
_VERDICT_TIMEOUT_S = 5.0


class Results(tuple[Any, ...]):
    """A tuple of what each rank has returned, by rank; `main` is the result of rank 0."""

    __slots__ = ()

    @property
    def main(self) -> Any:
        return self[0]


class GangCall:
    """Made by `Gang.start_call`, for use in a `with`; a gang has one at a time. `on_end` is called after its end.

    main_rank:  the rank whose output a notebook shows first
    waiting:    where the others are that have not returned, after some have failed
    """

    def __init__(
        self, job: GangJob, number: int, task: GangMessage, display: Display, on_end: Callable[[], None]
    ) -> None:
        self._job = job
        self._number = number
        self._display = display
        self._on_end = on_end
        self._events: deque[CallEvent] = deque()
        self._ranks = job.connections.ranks
        self.outcomes: dict[int, Returned] = {}
        self.disconnected: set[int] = set()
        self.main_rank = 0
        self.shares_memory = job.shares_memory
        self.waiting = ""
        job.connections.send(task.with_copied_buffers(), self._ranks)

    @property
    def running(self) -> tuple[int, ...]:
        """The ranks on which the function still runs."""
        return tuple(rank for rank in self._ranks if rank not in self.outcomes and rank not in self.disconnected)

    @property
    def failures(self) -> list[RemoteFailure]:
        return [outcome.error for outcome in self.outcomes.values() if outcome.error is not None]

    def send(self, value: Any, ranks: Iterable[int] | None = None, file: OwnedDescriptor | None = None) -> None:
        """Send a value to the function on all ranks, or on these; it is pickled once. `file`: see payload.dump."""
        message = pack(GangMessageKind.VALUE, self._number, value, share=self.shares_memory, file=file)
        self._job.connections.send(message.with_copied_buffers(), self._ranks if ranks is None else ranks)

    def receive(self, timeout: float | None = None) -> CallEvent | None:
        """The next event of any rank; None if none comes within `timeout` seconds, or none can come any more."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._events:
            left = None if deadline is None else deadline - time.monotonic()
            if not self.running or (left is not None and left < 0):
                return None
            until_refresh = self._display.refresh(self)
            self._poll(min((limit for limit in (left, until_refresh) if limit is not None), default=None))
        return self._events.popleft()

    def show(self, event: Printed | LauncherOutput) -> None:
        if isinstance(event, Printed):
            self._display.show(event)
        else:
            print(event.text, end="", file=sys.stderr)

    def results(self, timeout: float | None = None) -> Results:
        """Wait until the function has returned on all ranks, and show what they print. Raises what Gang.run raises."""
        __tracebackhide__ = True
        deadline = None if timeout is None else time.monotonic() + timeout
        failed_at: float | None = None
        while True:
            limits = [at for at in (deadline, failed_at and failed_at + FAILURE_GRACE_S) if at is not None]
            match self.receive(min(limits) - time.monotonic() if limits else None):
                case Printed() | LauncherOutput() as event:
                    self.show(event)
                case Returned(error=error) if error is not None:
                    failed_at = failed_at or time.monotonic()
                case Disconnected():
                    raise self.explain_death() from (combined_exception(self.failures) if self.failures else None)
                case None if self.running:
                    self._raise_timeout(timeout)
                case None:
                    break
        if self.failures:
            raise combined_exception(self.failures)
        return Results(self.outcomes[rank].value() for rank in sorted(self.outcomes))

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt in the function, on the ranks where it runs; a wait in C++ goes on."""
        self._job.interrupt()

    def explain_death(self) -> WorkerDied:
        """After a Disconnected: who has died, how, and why, as soon as the launcher knows."""
        return self._job.explain_death(_VERDICT_TIMEOUT_S, self.disconnected)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Interrupt ranks that still run the function; mark the gang as broken if the ranks are not in step then."""
        try:
            self._end_function(is_interrupted=isinstance(error, KeyboardInterrupt))
            self._check_ranks()
        except KeyboardInterrupt as again:
            error = again
            self._job.mark_broken(f"{format_ranks(self.running)} did not end when interrupted twice")
            self._job.stop()
            raise
        finally:
            try:
                for event in self._events:  # that nobody has received
                    if isinstance(event, (Printed, LauncherOutput)):
                        self.show(event)
                self._display.end_call(self, error, healthy=self._job.usable)
            finally:
                self._on_end()

    def _raise_timeout(self, timeout: float | None) -> None:
        stacks, running = self._job.stacks(), self.running
        if self.failures:
            self.waiting = f"{format_ranks(running)} did not return: {stacks}"
            raise combined_exception(self.failures, self.waiting)
        raise CallTimeout(f"{format_ranks(running)} did not return within {timeout:g} s · {stacks}", running)

    def _end_function(self, *, is_interrupted: bool) -> None:
        """Wait a moment for ranks that still run it; where the user has interrupted them, as long as they compile."""
        if not self.running:
            return
        self.interrupt()
        self._job.connections.send(GangMessage(GangMessageKind.END_CALL, self._number), self.running)
        self._wait(INTERRUPT_TIMEOUT_S)
        is_told = False
        while is_interrupted and self.running and (compiling := self._job.find_compiling(self.running)):
            if not is_told:
                is_told = True
                who = f"{format_ranks(compiling)}, which {agree('is', len(compiling))} compiling"
                print(f"jaxrun: waiting for {who}; another Ctrl-C stops the gang", file=sys.stderr)
            self._wait(INTERRUPT_TIMEOUT_S)

    def _wait(self, seconds: float) -> None:
        """Wait for the function to end on all ranks, at most so many seconds."""
        deadline = time.monotonic() + seconds
        while self.running and time.monotonic() < deadline:
            self._poll(deadline - time.monotonic())

    def _check_ranks(self) -> None:
        """Mark the gang as broken if its ranks are not in step."""
        if self.disconnected:
            reason = f"{format_ranks(self.disconnected)} ended"
        elif self.running:
            reason = f"{format_ranks(self.running)} did not come back from the last call"
        elif unconnected := [failure.rank for failure in self.failures if failure.is_consequence]:
            reason = f"{format_ranks(unconnected)} lost a connection to another"
        else:
            reason = step_difference({rank: outcome.message.note for rank, outcome in self.outcomes.items()})
        if reason:
            self._job.mark_broken(reason)

    def _poll(self, timeout: float | None) -> None:
        """Wait at most `timeout` seconds for messages and output, and make events of them."""
        for rank, message in self._job.connections.poll(timeout):
            if message is None:
                if rank not in self.outcomes:
                    self.disconnected.add(rank)
                    self._events.append(Disconnected(rank))
                else:
                    self._job.mark_broken(f"rank {rank} ended")
            elif message.call == self._number:
                self._handle_message(rank, message)
        text = self._job.connections.read_launcher_output()
        if text and not self.disconnected:  # what the launcher prints about a death, its verdict says better
            self._events.append(LauncherOutput(text))

    def _handle_message(self, rank: int, message: GangMessage) -> None:
        match message.kind:
            case GangMessageKind.VALUE:
                self._events.append(RankMessage(rank, message.load()))
            case GangMessageKind.STDOUT | GangMessageKind.STDERR:
                stream = "out" if message.kind is GangMessageKind.STDOUT else "err"
                self._events.append(Printed(rank, stream, bytes(message.payload.body)))
            case GangMessageKind.RESULT | GangMessageKind.EXCEPTION:
                failed = message.kind is GangMessageKind.EXCEPTION
                host = self._job.workers[rank].host
                error = RemoteFailure.from_rank(rank, host, message.load()) if failed else None
                self.outcomes[rank] = Returned(rank, error, message)
                self._events.append(self.outcomes[rank])


def step_difference(notes: Mapping[int, bytes]) -> str:
    """How the ranks differ in the cross-process calls they have made; empty if they do not.

    notes: for each rank, its number of calls by group, as JSON
    """
    counts = {rank: json.loads(note or b"{}") for rank, note in notes.items()}
    size = max(counts, default=-1) + 1
    for group in sorted({name for made in counts.values() for name in made}):
        made = {rank: counts[rank].get(group, 0) for rank in parse_group(group, size) if rank in counts}
        if len(set(made.values())) > 1:
            each = ", ".join(f"{format_ranks(ranks)} {count}" for count, ranks in sorted(group_alike(made)))
            return f"ranks {group} are out of step, having made different numbers of cross-process calls ({each})"
    return ""
