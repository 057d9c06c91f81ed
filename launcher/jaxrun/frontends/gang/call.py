"""One function that runs on all ranks of a gang, and the values that ranks and caller exchange meanwhile.

with gang.start_call(fn, *args) as call:
    call.send("more", ranks=[1])
    while event := call.receive():
        ...                             # RankMessage, Printed, Returned, Disconnected or LauncherOutput

call = gang.start_call(fn, *args)       # or as a future
results = call.results()
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, Self

from jaxrun.errors import UsageError, add_note
from jaxrun.frontends.gang.call_events import (
    CallEvent,
    Disconnected,
    Display,
    LauncherOutput,
    Printed,
    RankMessage,
    Returned,
)
from jaxrun.frontends.gang.gang_errors import CallTimeout, GangError, RemoteFailure, WorkerDied, combined_exception
from jaxrun.frontends.gang.gang_job import GangJob
from jaxrun.protocol.flight import parse_group
from jaxrun.protocol.gang_messages import GangMessage, GangMessageKind, pack
from jaxrun.protocol.payload import OwnedDescriptor
from jaxrun.text import agree, format_ranks, group_alike

INTERRUPT_TIMEOUT_S = 1.0  # for ranks to end their work when they are interrupted
FAILURE_GRACE_S = 1.5  # for the other ranks to return after one has raised
_UNUSED_POLL_S = 0.2  # between two checks whether another thread wants to use a call that nobody uses
_UNUSED_NOTICE_S = 2.0  # after which we print that a gang waits for such a call to end
RESULT_TIMEOUT_S = 30.0  # without a byte of a result that is arriving, unless the user has interrupted the call
_VERDICT_TIMEOUT_S = 5.0


class _GrowthWatch:
    """Whether a number has grown within the last `timeout` seconds."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._number, self._changed_at = -1, 0.0

    def made(self, number: int) -> bool:
        now = time.monotonic()
        if number != self._number:
            self._number, self._changed_at = number, now
        return now - self._changed_at < self._timeout


class Results(tuple[Any, ...]):
    """The return value of each rank, by rank; `main` is rank 0's.

    >>> results = jaxrun.launch(max, 1, 2, processes=2)
    >>> results, results.main
    ((2, 2), 2)
    """

    __slots__ = ()

    @property
    def main(self) -> Any:
        return self[0]


class GangCall:
    """A function that runs on the ranks, made by `Gang.start_call`; a gang has one at a time.

    A `with` interrupts at its end the ranks that still run the function. Without one, `results` waits for the end. If
    nobody waits, the gang's next call does: it shows what the ranks print, and warns of an error.

    interrupted: the ranks that still ran the function when the call was ended
    main_rank:  the rank whose output a notebook shows first
    waiting:    where the ranks are that have not returned, after some have failed
    lost_state: says that the ranks lose their state, and why, if the gang starts again because of this call
    """

    def __init__(
        self,
        job: GangJob,
        number: int,
        task: GangMessage,
        display: Display,
        on_end: Callable[[], None],
        *,
        name: str = "",
        lock: threading.RLock | None = None,
    ) -> None:
        """`on_end` is called after the end; `name` is the function's; the thread that uses the call holds `lock`."""
        self._job = job
        self._number = number
        self._display = display
        self._on_end = on_end
        self._name = name
        self._lock = lock or threading.RLock()
        self._wanted_by: set[int] = set()  # threads that wait for the lock
        self._uses = 0  # nested ones, by the thread that holds the lock
        self._error: BaseException | None = None  # the error that ended the call
        self._owner = os.getpid()
        self._is_entered = self._is_over = False
        self.interrupted: tuple[int, ...] = ()
        self._events: deque[CallEvent] = deque()
        self._is_last_poll = False  # whether the latest poll was one at the end of a wait
        self._ranks = job.connections.ranks
        self.outcomes: dict[int, Returned] = {}
        self._ended: set[int] = set()
        self.disconnected: set[int] = set()
        self.main_rank = 0
        self.shares_memory = job.shares_memory
        self.waiting = self.lost_state = ""
        job.connections.send(task.with_copied_buffers(), self._ranks)

    def __repr__(self) -> str:
        running = self.running
        state = f"runs on {format_ranks(running)}" if running and not self._is_over else "has ended"
        return f"<call of {self._name or 'a function'}: {state}>"

    @property
    def running(self) -> tuple[int, ...]:
        """The ranks on which the function still runs."""
        return tuple(rank for rank in self._ranks if rank not in self.outcomes and rank not in self.disconnected)

    @property
    def returned(self) -> Collection[int]:
        """The ranks on which the function has ended."""
        return self.outcomes.keys()

    @property
    def failures(self) -> list[RemoteFailure]:
        return [outcome.error for outcome in self.outcomes.values() if outcome.error is not None]

    def send(self, value: Any, ranks: Iterable[int] | None = None, file: OwnedDescriptor | None = None) -> None:
        """Send a value to the function on all ranks, or on these; it is pickled once. `file`: see payload.dump."""
        message = pack(GangMessageKind.VALUE, self._number, value, share=self.shares_memory, file=file)
        self._job.connections.send(message.with_copied_buffers(), self._ranks if ranks is None else ranks)

    @property
    def in_use(self) -> bool:
        """Whether the thread that holds the lock is in a `with` of the call, or waits for its results or events."""
        return self._uses > 0

    @property
    def is_wanted(self) -> bool:
        """Whether another thread waits to use the call."""
        return bool(self._wanted_by)

    def receive(self, timeout: float | None = None) -> CallEvent | None:
        """The next event of any rank; None if none comes within `timeout` seconds, or none can come any more.

        With a timeout of 0 or less, it returns the events that have arrived, and then None.
        """
        if self._is_entered:
            return self._receive(timeout)
        with self._use():
            return self._receive(timeout)

    def _receive(self, timeout: float | None) -> CallEvent | None:
        """See `receive`. Each wait ends with a poll: events may have arrived while this process printed or did not run.

        After the events of that poll comes None, even if more have arrived meanwhile: a rank that prints all the time
        must not put off a caller's time limit.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._events:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            was_last, self._is_last_poll = self._is_last_poll, left == 0
            if self._is_over or not self.running or (was_last and left == 0):
                self._is_last_poll = False
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
        """Wait until the function has returned on all ranks, and show their output. Raises the exceptions of Gang.run.

        You may call it again, also after a CallTimeout; a `with` ends after a CallTimeout.
        """
        __tracebackhide__ = True
        check_timeout(timeout)
        if self._is_entered:  # the `with` ends the call
            return self._wait_for_results(timeout)
        with self._use():
            if self._is_over and self._error is not None:
                raise self._error
            if self._is_over:
                return self._wait_for_results(timeout)
            try:
                found = self._wait_for_results(timeout)
            except CallTimeout:
                raise
            except BaseException as error:
                self.end(error)
                raise
            self.end()
            return found

    def _wait_for_results(self, timeout: float | None) -> Results:
        __tracebackhide__ = True
        if self._is_over and self.interrupted:
            raise GangError(f"this call was ended while {format_ranks(self.interrupted)} still ran")
        self._is_last_poll = False  # even a timeout of 0 has a poll of its own
        deadline = None if timeout is None else time.monotonic() + timeout
        failed_at: float | None = None
        while True:
            limits = [at for at in (deadline, failed_at and failed_at + FAILURE_GRACE_S) if at is not None]
            match self._receive(min(limits) - time.monotonic() if limits else None):
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
        """Raise KeyboardInterrupt in the function, on the ranks where it runs; a wait in C++ continues."""
        self._job.interrupt()

    def explain_death(self) -> WorkerDied:
        """After a Disconnected, return who died, how, and why, as soon as the launcher knows."""
        return self._job.explain_death(_VERDICT_TIMEOUT_S, self.disconnected)

    def __enter__(self) -> Self:
        self._acquire()
        self._is_entered = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            self.end(error)
        finally:
            self._is_entered = False
            self._release()

    def end(self, error: BaseException | None = None) -> None:
        """Interrupt ranks that still run the function; mark the gang as broken if the ranks are not in step then.

        error: the exception that ends the call early, if any; a KeyboardInterrupt comes from the user
        """
        if self._is_over or self._owner != os.getpid():  # in a fork, the call and its ranks belong to another process
            return
        self.interrupted = self.running
        first: KeyboardInterrupt | None = None
        try:
            try:
                self._end_function()
                self._wait_for_ranks(is_interrupted=isinstance(error, KeyboardInterrupt))
            except KeyboardInterrupt as interrupt:
                if isinstance(error, KeyboardInterrupt):
                    raise
                error = first = interrupt  # the user's first interrupt: the ranks were interrupted for another reason
                self._wait_for_ranks(is_interrupted=True)
            self._check_ranks()
            if self.lost_state and error is not None and not isinstance(error, KeyboardInterrupt):
                add_note(error, self.lost_state)
        except KeyboardInterrupt as again:
            error = again
            self._job.mark_broken(f"{format_ranks(self.running)} did not end when interrupted twice")
            self._job.stop()
            raise
        finally:
            self._is_over, self._error = True, error
            try:
                self._show_output()
                self._display.end_call(self, error, healthy=self._job.usable)
            finally:
                self._on_end()
        if first is not None:
            raise first

    def finish(self) -> None:
        """End a call that nobody uses once its function has ended; show the ranks' output, and warn about an error.

        Returns before that if another thread wants to use the call. A Ctrl-C interrupts the ranks.
        """
        error: BaseException | None = None
        try:
            self._wait_for_end()
            if self.is_wanted:
                return
            if self.disconnected:
                error = self.explain_death()
            elif self.failures:
                error = combined_exception(self.failures)
        except KeyboardInterrupt as interrupt:
            self.end(interrupt)
            raise
        self.end(error)
        if error is not None:
            what = f"an earlier call of {self._name}, whose results nobody waited for, raised:"
            print(f"jaxrun: {what}\n{''.join(traceback.format_exception(error)).strip()}", file=sys.stderr)

    def _wait_for_end(self) -> None:
        """Wait until the function has ended, or cannot any more, on all ranks, unless another thread wants the call."""
        began, failed_at = time.monotonic(), 0.0
        steps = [(INTERRUPT_TIMEOUT_S, self._send_end), (_UNUSED_NOTICE_S, self._tell_of_wait)]
        self._poll(0)  # if the function ended long ago, the display need not show that ranks run it
        while self.running and not self.disconnected and not self.is_wanted:
            self._poll(min(_UNUSED_POLL_S, self._display.refresh(self) or _UNUSED_POLL_S))
            self._show_output()
            now = time.monotonic()
            failed_at = failed_at or (now if self.failures else 0.0)
            if failed_at and now - failed_at > FAILURE_GRACE_S:
                return
            while steps and now - began > steps[0][0]:
                steps.pop(0)[1]()

    def _send_end(self) -> None:
        """Tell functions that wait for a value that no more will come."""
        self._job.connections.send(GangMessage(GangMessageKind.END_CALL, self._number), self._computing)

    def _tell_of_wait(self) -> None:
        who = f"{format_ranks(self.running)}, which {agree('run', len(self.running))} an earlier call of {self._name}"
        print(f"jaxrun: waiting for {who}; Ctrl-C interrupts it", file=sys.stderr)

    def _show_output(self) -> None:
        """Show output of the ranks that nobody has received; other events are kept."""
        events, self._events = self._events, deque()
        for event in events:
            if isinstance(event, (Printed, LauncherOutput)):
                self.show(event)
            else:
                self._events.append(event)

    @contextlib.contextmanager
    def _use(self) -> Iterator[None]:
        self._acquire()
        try:
            yield
        finally:
            self._release()

    def _acquire(self) -> None:
        """Wait until no other thread uses the gang. Raises GangError in a fork."""
        if self._owner != os.getpid():
            raise GangError(f"this call belongs to process {self._owner}, but this process is a fork of it")
        me = threading.get_ident()
        self._wanted_by.add(me)
        try:
            self._lock.acquire()
        finally:
            self._wanted_by.discard(me)
        self._uses += 1

    def _release(self) -> None:
        self._uses -= 1
        self._lock.release()

    def _raise_timeout(self, timeout: float | None) -> None:
        stacks = self._job.stacks(raised={failure.rank: failure.error for failure in self.failures})
        running = self.running
        if self.failures:
            self.waiting = f"{format_ranks(running)} did not return: {stacks}"
            raise combined_exception(self.failures, self.waiting)
        raise CallTimeout(f"{format_ranks(running)} did not return within {timeout:g} s · {stacks}", running)

    def _end_function(self) -> None:
        """Interrupt the ranks that still run the function."""
        if computing := self._computing:
            self.interrupt()
            self._job.connections.send(GangMessage(GangMessageKind.END_CALL, self._number), computing)

    def _wait_for_ranks(self, *, is_interrupted: bool) -> None:
        """Wait a moment for ranks that have not returned; longer while a result arrives, or if the user must wait.

        A result must arrive completely, even if it is no longer wanted, before the rank can be called again.
        """
        self._wait(INTERRUPT_TIMEOUT_S)
        is_told, progress = False, _GrowthWatch(RESULT_TIMEOUT_S)
        while self.running and (what := self._find_worth_waiting(is_interrupted, progress)):
            if not is_told:
                is_told = True
                again = "another Ctrl-C" if is_interrupted else "Ctrl-C, typed twice,"
                print(f"jaxrun: waiting for {what}; {again} stops the gang", file=sys.stderr)
            self._wait(INTERRUPT_TIMEOUT_S)

    def _find_worth_waiting(self, is_interrupted: bool, progress: _GrowthWatch) -> str:
        """Describe what ranks that have not returned do, if it will end by itself; else return an empty text."""
        computing = self._computing
        if computing and not (is_interrupted and (compiling := self._job.find_compiling(computing))):
            return ""  # possibly forever
        if computing:
            return f"{format_ranks(compiling)}, which {agree('is', len(compiling))} compiling"
        if is_interrupted or progress.made(self._job.connections.count_received_bytes(self.running)):
            return f"the result of {format_ranks(self.running)}"
        return ""

    @property
    def _computing(self) -> tuple[int, ...]:
        """The ranks whose function has not ended; the other running ranks are sending their results."""
        return tuple(rank for rank in self.running if rank not in self._ended)

    def _wait(self, seconds: float) -> None:
        """Wait at most `seconds` seconds for the function to end on all ranks."""
        deadline = time.monotonic() + seconds
        while self.running:
            left = deadline - time.monotonic()
            self._poll(max(0.0, left))
            if left <= 0:  # what has come counts, even after a pause of this process
                return

    def _check_ranks(self) -> None:
        """Mark the gang as broken if its ranks are not in step."""
        if self.disconnected:
            reason = f"{format_ranks(self.disconnected)} ended"
        elif self.running:
            reason = f"{format_ranks(self.running)} did not come back from the last call"
        elif unconnected := [failure.rank for failure in self.failures if failure.is_consequence]:
            reason = f"{format_ranks(unconnected)} lost a connection to another rank"
        else:
            reason = step_difference({rank: outcome.message.note for rank, outcome in self.outcomes.items()})
        if reason:
            self._job.mark_broken(reason)
            self.lost_state = (
                f"the gang starts again at its next use, and its ranks' state is lost, with all variables: {reason}"
            )

    def _poll(self, timeout: float | None) -> None:
        """Wait at most `timeout` seconds for messages and output, and turn them into events."""
        if self._job.stopped:
            self._events += map(Disconnected, self.running)
            self.disconnected.update(self.running)
            return
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
        if text and not self.disconnected:  # the launcher's verdict explains a death better than its output
            self._events.append(LauncherOutput(text))

    def _handle_message(self, rank: int, message: GangMessage) -> None:
        match message.kind:
            case GangMessageKind.VALUE:
                self._events.append(RankMessage(rank, message.load()))
            case GangMessageKind.STDOUT | GangMessageKind.STDERR:
                stream = "out" if message.kind is GangMessageKind.STDOUT else "err"
                self._events.append(Printed(rank, stream, bytes(message.payload.body)))
            case GangMessageKind.ENDED:
                self._ended.add(rank)
            case GangMessageKind.RESULT | GangMessageKind.EXCEPTION:
                failed = message.kind is GangMessageKind.EXCEPTION
                host = self._job.workers[rank].host
                error = RemoteFailure.from_rank(rank, host, message.load()) if failed else None
                self.outcomes[rank] = Returned(rank, error, message)
                self._events.append(self.outcomes[rank])


def check_timeout(timeout: Any) -> None:
    """Raise UsageError unless `timeout` is a number of seconds."""
    is_number = isinstance(timeout, (int, float)) and not isinstance(timeout, bool)
    if timeout is not None and not (is_number and timeout >= 0 and not math.isnan(timeout)):
        raise UsageError(f"timeout must be a number of seconds from 0, not {timeout!r}")


def step_difference(notes: Mapping[int, bytes]) -> str:
    """Describe how the ranks differ in the cross-process calls that they have made; empty if they do not.

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
