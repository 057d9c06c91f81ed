"""The head's one table of timers: which ones run, when each is due, and what happens then.

A part of the head sets a timer with a callback; the head asks for the next time, and fires the timers that are due.
"""

from __future__ import annotations

import enum
import heapq
import itertools
from collections.abc import Callable, Hashable, Iterator
from typing import NamedTuple

from jaxrun.job_events.actions import Action

Then = Callable[[float], list[Action]]  # called with the time at which the timer is fired


class Timer(enum.IntEnum):
    """The kinds of timers. Timers that are due at the same time fire in this order."""

    STARTUP = enum.auto()  # --init-timeout: not all ranks have joined
    PROGRESS = enum.auto()  # the start-up, or the end, takes long: print which ranks it waits for
    SETTLE = enum.auto()  # after a failure: the failures that came with it have arrived
    ROOT_CAUSE = enum.auto()  # after a failure: there are only consequences, and their cause has not arrived
    INTERRUPT = enum.auto()  # after Ctrl-C: KeyboardInterrupt should have been raised in all ranks
    TEARDOWN = enum.auto()  # ranks that were sent SIGTERM after the failure of another have had their time
    GRACE = enum.auto()  # --grace: workers that were asked to end have not
    KILL = enum.auto()  # workers that are late have been sent SIGTERM
    UNANSWERED = enum.auto()  # workers were killed, but their end was not reported
    CONCLUDE = enum.auto()  # all workers have ended, but the content of their flight recorders has not arrived
    JOB = enum.auto()  # --timeout
    TIME_LIMIT_NEAR = enum.auto()  # --save-time before the end of --timeout: ask the program to stop
    ALLOCATION_NEAR = enum.auto()  # --save-time before a scheduler ends the job: the same
    STALL_CHECK = enum.auto()  # --stall-timeout, --stall-notice: is there any progress?
    EARLY_EXIT_CHECK = enum.auto()  # some ranks have finished: do the others wait for them?
    DIVERGENCE_CHECK = enum.auto()  # do the flight recorders agree?
    STANDSTILL_CHECK = enum.auto()  # the ranks are out of step: do they still make calls?
    HOST_WAIT = enum.auto()  # --wait-hosts: a lost host is not back; say so, or give it up
    HOST_LOOK = enum.auto()  # --wait-hosts: look for lost hosts again
    GROW = enum.auto()  # --grow: are there more hosts again?
    FAULT = enum.auto()  # --chaos: inject this fault
    QUERY = enum.auto()  # not all ranks have replied to this query
    SAMPLE = enum.auto()  # take a sample of where the straggler is
    HANDOVER = enum.auto()  # the rank that has the terminal has not come back from a step, and others wait
    MISMATCH = enum.auto()  # the ranks differ in this call: report it
    COMPILATION_CHECK = enum.auto()  # some ranks compile for a call: what do the others do?
    ENTERED_CHECK = enum.auto()  # no rank has left the call that it has entered: which one is it?
    MEMORY = enum.auto()  # a host's memory will soon be full: its agents have had time to report
    DEBUGGER_START = enum.auto()  # this rank has not connected its debugger, or not let go of it
    DETAILS = enum.auto()  # the details of the programs in this divergence have not arrived
    CALL_ORDER = enum.auto()  # the ranks' next calls may show how they came to differ, or a NaN may end the job
    LEFT = enum.auto()  # a rank has ended well while others work (--keep-survivors): do they wait for it?
    DRAIN = enum.auto()  # a pod goes away while others go on: its ranks, which handle SIGTERM, have not ended
    RETURN = enum.auto()  # a rank that failed while others work has not ended, or not joined again


# Timers that count the program's own time. They stand still while someone is at a debugger's prompt,
# or has connected an editor's debugger.
PROGRAM_CLOCKS = (Timer.JOB, Timer.TIME_LIMIT_NEAR, Timer.GROW, Timer.FAULT)
# Timers that count the time of the outside world. All others are postponed when the job was suspended by Ctrl-Z.
OUTER_CLOCKS = (Timer.ALLOCATION_NEAR,)
# Timers that continue when the job enters another phase; all others belong to the phase in which they were set.
LASTING = (
    Timer.QUERY,
    Timer.SAMPLE,
    Timer.HANDOVER,
    Timer.MISMATCH,
    Timer.COMPILATION_CHECK,
    Timer.DEBUGGER_START,
    Timer.DETAILS,
    Timer.CALL_ORDER,
)


class _Key(NamedTuple):
    kind: Timer
    of: Hashable


class _Entry(NamedTuple):
    """A heap entry; entries are compared by their first three fields, which differ."""

    at: float
    kind: Timer
    number: int  # counts the timers in the order in which they were set
    of: Hashable
    then: Then

    @property
    def key(self) -> _Key:
        return _Key(self.kind, self.of)


class Timers:
    """The timers that run. Times are seconds since the epoch.

    A timer is identified by its kind, and by `of` if several of a kind run at once. Setting one is O(log n) in the
    number of timers, finding the next one O(1).
    """

    def __init__(self) -> None:
        self._entries: dict[_Key, _Entry] = {}
        self._heap: list[_Entry] = []  # all running timers, and some that were cancelled or replaced
        self._held: dict[_Key, tuple[float, Then]] = {}  # seconds left
        self._numbers = itertools.count()

    def set(self, kind: Timer, at: float, then: Then, *, of: Hashable = None) -> None:
        """Call `then` at this time, in place of an earlier or later one."""
        entry = _Entry(at, kind, next(self._numbers), of, then)
        self._held.pop(entry.key, None)
        self._entries[entry.key] = entry
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self._entries) + 64:
            self._rebuild()

    def advance(self, kind: Timer, at: float, then: Then, *, of: Hashable = None) -> None:
        """Set the timer, unless it is due earlier."""
        known = self.at(kind, of=of)
        if known is None or at < known:
            self.set(kind, at, then, of=of)

    def at(self, kind: Timer, *, of: Hashable = None) -> float | None:
        """When the timer is due; None if it does not run."""
        entry = self._entries.get(_Key(kind, of))
        return entry.at if entry is not None else None

    def ends_at(self, kind: Timer, now: float) -> float | None:
        """Return when the timer is due, or would be due if it is held and were resumed now; None without one."""
        held = self._held.get(_Key(kind, None))
        return now + held[0] if held is not None else self.at(kind)

    def cancel(self, *kinds: Timer) -> None:
        """Cancel all timers of these kinds."""
        for key in [key for key in (*self._entries, *self._held) if key.kind in kinds]:
            self._remove(key)

    def cancel_one(self, kind: Timer, of: Hashable) -> None:
        self._remove(_Key(kind, of))

    def cancel_phase(self) -> None:
        """Cancel all timers that belong to a phase of the job."""
        self.cancel(*(kind for kind in Timer if kind not in LASTING))

    def cancel_all(self) -> None:
        self.cancel(*Timer)

    # ---- time that does not count

    def hold(self, now: float, *kinds: Timer) -> None:
        """Stop the timers of these kinds, if they run, until `resume`."""
        for key, entry in [(key, entry) for key, entry in self._entries.items() if key.kind in kinds]:
            self._remove(key)
            self._held[key] = (entry.at - now, entry.then)

    def resume(self, now: float, *kinds: Timer) -> None:
        for key, (seconds, then) in [(key, held) for key, held in self._held.items() if key.kind in kinds]:
            self.set(key.kind, now + seconds, then, of=key.of)

    def postpone(self, seconds: float) -> None:
        """Postpone all timers except those of OUTER_CLOCKS, because the job has stood still for `seconds` seconds."""
        for key, entry in self._entries.items():
            if key.kind not in OUTER_CLOCKS:
                self._entries[key] = entry._replace(at=entry.at + seconds)
        self._rebuild()

    # ---- what is due

    def next_at(self) -> float | None:
        """When the next timer is due; None if there is none."""
        while self._heap and self._entries.get(self._heap[0].key) is not self._heap[0]:
            heapq.heappop(self._heap)
        return self._heap[0].at if self._heap else None

    def fire(self, now: float) -> list[Action]:
        """Call the timers that are due, the earliest first; timers that they set or cancel take effect at once."""
        return [action for entry in self._pop_due(now) for action in entry.then(now)]

    def fire_early(self, kind: Timer, now: float) -> list[Action]:
        """Call all timers of one kind, whenever they are due, and remove them."""
        early = [entry for key, entry in self._entries.items() if key.kind is kind]
        for entry in early:
            self._remove(entry.key)
        return [action for entry in early for action in entry.then(now)]

    def _pop_due(self, now: float) -> Iterator[_Entry]:
        while (at := self.next_at()) is not None and at <= now:
            entry = heapq.heappop(self._heap)
            del self._entries[entry.key]
            yield entry

    def _remove(self, key: _Key) -> None:
        self._entries.pop(key, None)
        self._held.pop(key, None)

    def _rebuild(self) -> None:
        self._heap = list(self._entries.values())
        heapq.heapify(self._heap)
